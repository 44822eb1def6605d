"""Measures what an attack with one key does to a stream and to short requests with another."""

import http.client
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil

from tests.hostile.neighbor_attacks import ADMIN, ATTACKER, COMPUTING, VICTIM
from tests.live.live_server import DEMO, WARM, LiveServer, live_server
from tests.support.images import save_vision_model

FLAGS = (
    *("--fair-share", "tokens", "--watchdog-timeout", "60"),
    *("--max-running-requests", "16"),
)
IMAGE_FLAGS = ("--enable-multimodal", "--load-format", "dummy", "--image-cache-size", "0.001")
SETTLE_S = 2.0
SHORT_INTERVAL_S = 0.3
SCHEMA = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}})


class Seen(NamedTuple):
    """What the victim saw: times in milliseconds."""

    gaps_ms: list[float]  # between two tokens of its streams
    short_ms: list[float]  # of requests for few tokens with a small schema


class Measured(NamedTuple):
    """What the victim saw without and with an attack, and what the attack left."""

    name: str
    quiet: Seen
    attacked: Seen
    memory_growth: float  # of the resident memory of all processes, as a share

    @property
    def ratio(self) -> float:
        """The 99th percentile of the gaps during the attack over the one without."""
        return _p99(self.attacked.gaps_ms) / _p99(self.quiet.gaps_ms)

    @property
    def rate(self) -> float:
        """Tokens of the victim's streams during the attack over those without."""
        return len(self.attacked.gaps_ms) / len(self.quiet.gaps_ms)

    def __str__(self) -> str:
        quiet, attacked = self.quiet, self.attacked
        return (
            f"{self.name:20}{_p99(quiet.gaps_ms):9.1f}{_p99(attacked.gaps_ms):9.1f}"
            f"{self.ratio:7.2f}{max(quiet.gaps_ms):9.0f}{max(attacked.gaps_ms):9.0f}"
            f"{max(quiet.short_ms):9.0f}{max(attacked.short_ms, default=np.inf):9.0f}"
            f"{self.rate:8.2f}{self.memory_growth:+8.1%}"
        )


HEADER = (
    f"{'':20}{'99 % of gaps, ms':^25}{'longest gap':^18}{'slowest short':^18}\n"
    f"{'attack':20}{'quiet':>9}{'attacked':>9}{'ratio':>7}"
    f"{'quiet':>9}{'attacked':>9}{'quiet':>9}{'attacked':>9}{'rate':>8}{'memory':>8}"
)


class Victim:
    """Reads a stream that began before the attack, and beside it sends short requests."""

    def __init__(self, server: LiveServer) -> None:
        host, _, port = server.url.removeprefix("http://").partition(":")
        self._address = (host, int(port))
        self._done = threading.Event()
        self.seen = Seen([], [])
        self.failures: list[str] = []
        self._threads = [
            threading.Thread(target=self._repeat, args=(act,), daemon=True)
            for act in (self._stream, self._short)
        ]
        for thread in self._threads:
            thread.start()
        while not (self.seen.gaps_ms and self.seen.short_ms) and not self.failures:
            time.sleep(0.05)

    def forget(self) -> None:
        """Begin to measure again."""
        self.seen.gaps_ms.clear()
        self.seen.short_ms.clear()

    def _repeat(self, act: Callable[[http.client.HTTPConnection], None]) -> None:
        while not self._done.is_set() and not self.failures:
            connection = http.client.HTTPConnection(*self._address, timeout=120)
            try:
                act(connection)
            except (OSError, http.client.HTTPException) as error:
                self.failures.append(repr(error))
            finally:
                connection.close()

    def _ask(
        self, connection: http.client.HTTPConnection, **fields: Any
    ) -> http.client.HTTPResponse:
        headers = {"content-type": "application/json", "authorization": f"Bearer {VICTIM}"}
        connection.request("POST", "/generate", json.dumps({"text": "Hello", **fields}), headers)
        answer = connection.getresponse()
        if answer.status != 200:
            self.failures.append(f"{answer.status}: {answer.read()[:200]!r}")
        return answer

    def _stream(self, connection: http.client.HTTPConnection) -> None:
        params = {"max_new_tokens": 8000, "temperature": 0, "ignore_eos": True}
        answer = self._ask(connection, sampling_params=params, stream=True)
        last_s = None
        while (line := answer.readline()) and not self._done.is_set():
            if line.startswith(b"data: {"):
                now_s = time.perf_counter()
                if last_s is not None:
                    self.seen.gaps_ms.append(1e3 * (now_s - last_s))
                last_s = now_s

    def _short(self, connection: http.client.HTTPConnection) -> None:
        begin_s = time.perf_counter()
        params = {"max_new_tokens": 8, "temperature": 0, "json_schema": SCHEMA}
        self._ask(connection, sampling_params=params).read()
        self.seen.short_ms.append(1e3 * (time.perf_counter() - begin_s))
        self._done.wait(SHORT_INTERVAL_S)

    def stop(self) -> Seen:
        """End, and return what was seen."""
        self._done.set()
        for thread in self._threads:
            thread.join(130)
        assert not self.failures, self.failures
        return self.seen


@contextmanager
def attacked_server(folder: Path, *, takes_images: bool = False) -> Iterator[LiveServer]:
    """A server of the demonstration model for two clients and an operator; or of a tiny model that
    takes images."""
    keys, admin_keys = folder / "keys", folder / "admin-keys"
    keys.write_text(f"attacker {ATTACKER}\nvictim {VICTIM}\n")
    admin_keys.write_text(f"root {ADMIN}\n")
    files = ("--api-key-file", str(keys), "--admin-api-key-file", str(admin_keys))
    model, flags = DEMO, WARM
    if takes_images:
        # Its programs are compiled in the first measurement.
        model, flags = save_vision_model(folder / "model"), IMAGE_FLAGS
    with live_server(
        *(folder, *flags, *FLAGS, *files),
        model=model,
        key=ADMIN,
        is_quickly_compiled=takes_images,
    ) as server:
        yield server


def measure(server: LiveServer, name: str, seconds: float) -> Measured:
    """Watch the victim for `seconds` without the attack, then for `seconds` during it.

    Without an attack that computes on all rows, ordinary requests do.
    """
    before = _resident_bytes(server)
    quiet = _watch(server, "full_batch" if name in COMPUTING else None, seconds)
    attacked = _watch(server, name, seconds)
    server.until_at_rest(120)
    return Measured(name, quiet, attacked, _resident_bytes(server) / before - 1)


def _watch(server: LiveServer, name: str | None, seconds: float) -> Seen:
    """Return what the victim sees for `seconds` during the attack with this name, if any."""
    victim = Victim(server)
    if name is None:
        victim.forget()
        time.sleep(seconds)
        return victim.stop()
    command = [sys.executable, "-m", "tests.hostile.neighbor_attacks", name, "--url", server.url]
    attacker = subprocess.Popen([*command, "--seconds", str(seconds + SETTLE_S)])
    try:
        time.sleep(SETTLE_S)  # its modules are loaded
        victim.forget()
        time.sleep(seconds)
        seen = victim.stop()
        assert attacker.wait(seconds + 120) == 0
    finally:
        attacker.kill()
    assert server.process.poll() is None, server.log.read_text()[-2000:]
    return seen


def _p99(values: list[float]) -> float:
    return float(np.percentile(values, 99))


def _resident_bytes(server: LiveServer) -> int:
    root = psutil.Process(server.process.pid)
    members = (root, *root.children(recursive=True))
    return sum(member.memory_info().rss for member in members if member.is_running())
