"""A server process under attack: how long `/health` takes meanwhile, and what memory stays.

The server is real; its engine follows a script, so that all time and memory is the frontend's.
"""

import contextlib
import http.client
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 60.0
PROBE_TIMEOUT_S = 120.0
PROBE_INTERVAL_S = 0.02
NUM_TRIES = 3
LONGEST_HEALTH_S = 0.5
MEMORY_SLACK_BYTES = 100 * 2**20


@dataclass
class HostileServer:
    """A running server; `log` is the file with its output."""

    port: int
    process: subprocess.Popen[bytes]
    log: Path

    def connect(self, timeout_s: float = PROBE_TIMEOUT_S) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout_s)

    def post(
        self, path: str, body: bytes, headers: dict[str, str] | None = None
    ) -> tuple[int, bytes]:
        """Status and body of the answer, or (0, b"") if the server closed the connection."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PROBE_TIMEOUT_S)
        head = {"content-type": "application/json"} | (headers or {})
        # It may answer before it has read everything.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.request("POST", path, body, head)
        try:
            answer = connection.getresponse()
            return answer.status, answer.read()
        except (ConnectionError, http.client.BadStatusLine):
            return 0, b""
        finally:
            connection.close()

    def health_s(self) -> float:
        """Seconds that one `/health` takes, on a connection of its own."""
        start = time.perf_counter()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PROBE_TIMEOUT_S)
        connection.request("GET", "/health")
        assert connection.getresponse().status == 200
        connection.close()
        return time.perf_counter() - start

    @property
    def resident_bytes(self) -> int:
        """Of the server and its children but the engine; what they share is counted once."""
        process = psutil.Process(self.process.pid)
        total = 0
        for member in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):  # workers come and go
                if "scripted_engine" not in " ".join(member.cmdline()):
                    total += member.memory_full_info().pss
        return int(total)


@dataclass
class Watch:
    """What was seen during an attack; `memory_gain_bytes` is of its end."""

    health_s: list[float] = field(default_factory=list)
    memory_gain_bytes: int = 0

    @property
    def longest_health_s(self) -> float:
        return max(self.health_s)

    def __str__(self) -> str:
        mib = self.memory_gain_bytes / 2**20
        return f"longest /health {self.longest_health_s * 1e3:.0f} ms, memory {mib:+.0f} MiB"


def assert_unharmed(server: HostileServer, name: str, attack: Callable[[], None]) -> None:
    """`attack` neither fills the server's memory nor freezes the server.

    What freezes it does so each time; another process, which may hold a shared machine's cores for
    half a second, does not. So an attack that was slow is tried again.
    """
    for _ in range(NUM_TRIES):
        with watching(server) as watch:
            attack()
        print(f"{name}: {watch}")
        assert watch.memory_gain_bytes < MEMORY_SLACK_BYTES, str(watch)
        if watch.longest_health_s < LONGEST_HEALTH_S:
            return
    pytest.fail(f"{name}: {watch}, {NUM_TRIES} times")


@contextmanager
def watching(server: HostileServer, settle_s: float = 10.0) -> Iterator[Watch]:
    """Ask `/health` all the time within; afterwards, wait `settle_s` for memory to come back."""
    watch = Watch()
    failures: list[Exception] = []
    done = threading.Event()

    def probe() -> None:
        while not done.is_set():
            try:
                watch.health_s.append(server.health_s())
            except Exception as error:
                failures.append(error)
                return
            done.wait(PROBE_INTERVAL_S)

    server.health_s()
    before = server.resident_bytes
    prober = threading.Thread(target=probe)
    prober.start()
    try:
        yield watch
    finally:
        done.set()
        prober.join(PROBE_TIMEOUT_S)
    assert not failures, failures
    deadline = time.monotonic() + settle_s
    while True:
        watch.memory_gain_bytes = server.resident_bytes - before
        if watch.memory_gain_bytes < MEMORY_SLACK_BYTES or time.monotonic() > deadline:
            return
        time.sleep(0.2)


@contextmanager
def hostile_server(folder: Path, model: Path, *flags: str) -> Iterator[HostileServer]:
    """The server on `model`, ready; ended with SIGTERM, upon which it must exit with 0."""
    command = [sys.executable, "-m", "tests.server.scripted_server"]
    command += ["--model-path", str(model), "--port", "0", "--drain-timeout", "5", *flags]
    log = folder / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        yield HostileServer(_port(process, log), process, log)
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        assert process.wait(STOP_TIMEOUT_S) == 0, log.read_text()[-2000:]
    finally:
        if process.poll() is None:
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
            process.kill()
            process.wait(STOP_TIMEOUT_S)


def _port(process: subprocess.Popen[bytes], log: Path) -> int:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        found = re.search(r"ready at http://[^:]+:(\d+)", log.read_text())
        if found:
            return int(found[1])
        assert process.poll() is None, log.read_text()[-2000:]
        time.sleep(0.05)
    raise AssertionError(f"not ready in time: {log.read_text()[-2000:]}")
