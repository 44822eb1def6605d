"""Server processes that serve as one engine, on free loopback ports, each ended by its pid."""

import contextlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.live.live_server import DEMO, free_port, users_environment
from tests.multihost.machines import Machines
from tests.support.quick_compilation import QUICK_FLAGS

GOLDEN = Path(__file__).parents[1] / "golden"
KEY = "a key that the hosts share"
START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 60.0
# Of the tiny models: programs are few, and each is compiled when it is needed first.
FLAGS = (
    *("--device", "cpu", "--warmup", "none", "--page-size", "4", "--max-running-requests", "8"),
    *("--max-total-tokens", "512", "--chunked-prefill-size", "32", "--context-length", "128"),
    *("--compilation-cache-dir", "none", "--check-memory", "busy", "--host-timeout", "10"),
    *("--memory-error-action", "crash"),
)


@dataclass
class Host:
    """One host of a group: its server process, and the log with its output."""

    rank: int
    url: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def front(self) -> psutil.Process:
        """Its server process. Raises psutil.NoSuchProcess if it has ended."""
        return psutil.Process(self.process.pid)

    @property
    def engine(self) -> psutil.Process:
        """Its engine process. Raises psutil.NoSuchProcess if it has ended."""
        for child in self.front.children():
            if "sgl_jax.engine" in child.cmdline():
                return child
        raise psutil.NoSuchProcess(self.process.pid)

    def wait(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """Its exit code."""
        return self.process.wait(timeout_s)

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")


def start_host(
    folder: Path,
    rank: int,
    flags: tuple[str, ...],
    network: Machines | None = None,
    **environment: str,
) -> Host:
    """A server process with `flags`, not ready yet; on this machine, or its own of `network`."""
    port = free_port()
    while any(flag.endswith((f":{port}", f":{port - 1}")) for flag in flags):
        port = free_port()  # the two of --dist-init-addr are not bound yet
    address = network.addresses[rank] if network else "127.0.0.1"
    command = [
        *(network.prefixes[rank] if network else []),
        *(sys.executable, "-m", "sgl_jax.launch_server", "--host", address),
        *("--port", str(port), "--node-rank", str(rank), *flags),
    ]
    log = folder / f"host{rank}.log"
    own = {"XLA_FLAGS": QUICK_FLAGS, "SGL_JAX_HOST_KEY": KEY, **environment}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=users_environment() | own
        )
    return Host(rank, f"http://{address}:{port}", process, log)


@contextmanager
def live_group(
    folder: Path,
    num_hosts: int,
    *flags: str,
    model: str = "llama",
    waits: bool = True,
    network: Machines | None = None,
    last_flags: tuple[str, ...] = (),
) -> Iterator[list[Host]]:
    """`num_hosts` hosts that serve a golden model, ready unless `waits` is False.

    The last host also has `last_flags`. Whatever runs at the end of the context is killed.
    """
    address = network.addresses[0] if network else "127.0.0.1"
    common = (
        *("--model-path", str(model_folder(model)), "--nnodes", str(num_hosts)),
        *("--dist-init-addr", f"{address}:{two_free_ports()}", *FLAGS, *flags),
    )
    each = [common] * (num_hosts - 1) + [(*common, *last_flags)]
    hosts = [start_host(folder, rank, own, network) for rank, own in enumerate(each)]
    try:
        if waits:
            wait_until_ready(hosts)
        yield hosts
    finally:
        for host in hosts:
            with contextlib.suppress(psutil.NoSuchProcess):
                host.engine.kill()
            host.process.kill()
            host.process.wait(STOP_TIMEOUT_S)


def wait_until_ready(hosts: list[Host]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    for host in hosts:
        while True:
            assert host.process.poll() is None, host.output[-3000:]
            assert time.monotonic() < deadline, host.output[-3000:]
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(host.url + "/health", timeout=5).status_code == 200:
                    break
            time.sleep(0.2)


def end(hosts: list[Host], rank: int = 0) -> list[int]:
    """SIGTERM to one host; the exit codes of all."""
    hosts[rank].process.send_signal(signal.SIGTERM)
    return [host.wait() for host in hosts]


def generate(url: str, prompts: list[list[int]], **sampling: Any) -> Any:
    """The answers of `/generate`, with log-probabilities."""
    body = {
        "input_ids": prompts,
        "sampling_params": {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True, **sampling},
        "return_logprob": True,
    }
    response = httpx.post(url + "/generate", json=body, timeout=120)
    response.raise_for_status()
    return response.json()


def model_folder(model: str) -> Path:
    """A demonstration model, or a golden one, which has no tokenizer."""
    return DEMO.parent / model if model.startswith(DEMO.name) else GOLDEN / model


def two_free_ports() -> int:
    """A port that is free, and the next one, too."""
    while True:
        port = free_port()
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port + 1))
            return port
