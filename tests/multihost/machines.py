"""Hosts with networks of their own: network namespaces of Linux, whose cables can be pulled."""

import contextlib
import functools
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_ETC = Path("/etc/netns")


class Machines(NamedTuple):
    """Namespaces on one bridge, with an address for each rank."""

    addresses: list[str]
    prefixes: list[list[str]]  # of a command that runs there
    cables: list[str]

    def cut(self, rank: int) -> None:
        """Take a host's network away: packets are lost, and nobody is notified."""
        _ip("link", "set", self.cables[rank], "down")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=30)


@functools.cache
def can_cut() -> bool:
    """True if this process may make namespaces and bridges."""
    if os.geteuid() or not shutil.which("ip"):
        return False
    name = f"try{os.getpid()}"
    try:
        _ip("link", "add", name, "type", "bridge")
        _ip("link", "del", name)
        _ip("netns", "add", name)
    except subprocess.SubprocessError:
        return False
    _ip("netns", "del", name)
    return True


@contextlib.contextmanager
def machines(count: int) -> Iterator[Machines]:
    """`count` namespaces, which this process reaches as they reach each other."""
    own = f"sg{os.getpid()}"
    network = f"10.{200 + os.getpid() % 50}.{os.getpid() // 50 % 250}"
    names = [f"{own}h{rank}" for rank in range(count)]
    addresses = [f"{network}.{2 + rank}" for rank in range(count)]
    try:
        _ip("link", "add", own, "type", "bridge")
        _ip("addr", "add", f"{network}.1/24", "dev", own)
        _ip("link", "set", own, "up")
        for name, address in zip(names, addresses, strict=True):
            _ip("netns", "add", name)
            # Mounted over /etc/hosts: gloo listens at the address of the host's name.
            folder = _ETC / name
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(
                f"127.0.0.1 localhost\n{address} {socket.gethostname()}\n"
            )
            _ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("link", "set", name, "master", own, "up")
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield Machines(addresses, [["ip", "netns", "exec", name] for name in names], names)
    finally:
        # A namespace lives on while its processes end, and would keep its cable.
        links = [("link", "del", name) for name in (*names, own)]
        for words in (*links, *(("netns", "del", name) for name in names)):
            with contextlib.suppress(subprocess.SubprocessError):
                _ip(*words)
        for name in names:
            shutil.rmtree(_ETC / name, ignore_errors=True)
