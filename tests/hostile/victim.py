"""Measures what an attack with one key does to a stream with another."""

import http.client
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil

from tests.hostile.neighbor_attacks import ADMIN, ATTACKER, VICTIM
from tests.live.live_server import WARM, LiveServer, live_server

FLAGS = (
    *("--fair-share", "tokens", "--watchdog-timeout", "60"),
    *("--max-running-requests", "16"),
)
SETTLE_S = 2.0


class Measured(NamedTuple):
    """A victim's token gaps without and with an attack, and what the attack left."""

    name: str
    quiet_p99_ms: float
    attacked_p99_ms: float
    longest_ms: float
    num_tokens: int
    memory_growth: float  # of the resident memory of all processes, as a share

    @property
    def ratio(self) -> float:
        return self.attacked_p99_ms / self.quiet_p99_ms

    def __str__(self) -> str:
        return (
            f"{self.name:22}{self.quiet_p99_ms:9.1f} ms{self.attacked_p99_ms:9.1f} ms"
            f"{self.ratio:8.2f}{self.memory_growth:+9.1%}   longest {self.longest_ms:.0f} ms, "
            f"{self.num_tokens} tokens"
        )


class Victim(threading.Thread):
    """Streams generations one after another, and notes the time between two tokens."""

    def __init__(self, server: LiveServer) -> None:
        super().__init__(daemon=True)
        host, _, port = server.url.removeprefix("http://").partition(":")
        self._address = (host, int(port))
        self._done = threading.Event()
        self.gaps_ms: list[float] = []
        self.failures: list[str] = []

    def run(self) -> None:
        while not self._done.is_set():
            connection = http.client.HTTPConnection(*self._address, timeout=120)
            try:
                self._stream(connection)
            except (OSError, http.client.HTTPException) as error:
                self.failures.append(repr(error))
                return
            finally:
                connection.close()

    def _stream(self, connection: http.client.HTTPConnection) -> None:
        params = {"max_new_tokens": 1000, "temperature": 0, "ignore_eos": True}
        body = json.dumps({"text": "Hello", "sampling_params": params, "stream": True})
        headers = {"content-type": "application/json", "authorization": f"Bearer {VICTIM}"}
        connection.request("POST", "/generate", body, headers)
        answer = connection.getresponse()
        if answer.status != 200:
            self.failures.append(f"{answer.status}: {answer.read()[:200]!r}")
            self._done.set()
            return
        last_s = None
        while (line := answer.readline()) and not self._done.is_set():
            if line.startswith(b"data: {"):
                now_s = time.perf_counter()
                if last_s is not None:
                    self.gaps_ms.append(1e3 * (now_s - last_s))
                last_s = now_s

    def stop(self) -> list[float]:
        """End, and return the gaps in milliseconds."""
        self._done.set()
        self.join(130)
        assert not self.failures, self.failures
        return self.gaps_ms


@contextmanager
def attacked_server(folder: Path) -> Iterator[LiveServer]:
    """A server of the demonstration model for two clients and an operator."""
    keys, admin_keys = folder / "keys", folder / "admin-keys"
    keys.write_text(f"attacker {ATTACKER}\nvictim {VICTIM}\n")
    admin_keys.write_text(f"root {ADMIN}\n")
    files = ("--api-key-file", str(keys), "--admin-api-key-file", str(admin_keys))
    with live_server(folder, *WARM, *FLAGS, *files, key=ADMIN) as server:
        yield server


def measure(server: LiveServer, name: str, seconds: float) -> Measured:
    """Stream for `seconds` in quiet, then for `seconds` beside the attack."""
    before = _resident_bytes(server)
    quiet = _gaps(server, seconds)
    command = [sys.executable, "-m", "tests.hostile.neighbor_attacks", name, "--url", server.url]
    attacker = subprocess.Popen([*command, "--seconds", str(seconds + SETTLE_S)])
    try:
        time.sleep(SETTLE_S)  # its modules are loaded
        attacked = _gaps(server, seconds)
        assert attacker.wait(seconds + 120) == 0
    finally:
        attacker.kill()
    assert server.process.poll() is None, server.log.read_text()[-2000:]
    server.until_at_rest(120)
    after = _resident_bytes(server)
    quiet_p99, attacked_p99 = np.percentile(quiet, 99), np.percentile(attacked, 99)
    return Measured(
        name,
        float(quiet_p99),
        float(attacked_p99),
        max(attacked),
        len(attacked),
        after / before - 1,
    )


def _gaps(server: LiveServer, seconds: float) -> list[float]:
    victim = Victim(server)
    victim.start()
    time.sleep(seconds)
    return victim.stop()


def _resident_bytes(server: LiveServer) -> int:
    root = psutil.Process(server.process.pid)
    members = (root, *root.children(recursive=True))
    return sum(member.memory_info().rss for member in members if member.is_running())
