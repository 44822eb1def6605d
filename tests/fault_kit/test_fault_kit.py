"""Each process of a server is ended, stopped, slowed or starved in each phase of the server's life.

Under every fault, each client gets its answer or hears an error, the exit code is right, nothing
takes longer than 30 seconds, and neither a process nor a socket is left.

The default run has some of the cases, on the server with a scripted engine; `-m long` has all, on
the server that users start as well.
"""

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.engine.scripted_engine import SLOW_START_SEED
from tests.fault_kit.faults import FAULTS, is_gone, sockets_in
from tests.live.live_server import DEMO
from tests.server.server_process import REAL, SCRIPTED, Server, running_server
from tests.support.tokenizers import byte_level, save
from tests.support.waiting import until

LIMIT_S = 30.0
PHASES = ("loading", "warm-up", "serving", "draining")
PROCESSES = ("server", "engine")
# The server lives on after these, unless what runs short is needed at that moment.
PASSING = ("pause", "slow")
SHORTAGES = ("no_memory", "no_files", "no_disk")
QUICK = {
    ("loading", "engine", "kill"),
    ("serving", "server", "kill"),
    ("serving", "engine", "no_files"),
}
CASES = [
    pytest.param(
        *(program, phase, who, fault),
        id=f"{program.split('.')[-1]}-{phase}-{who}-{fault}",
        marks=() if program == SCRIPTED and (phase, who, fault) in QUICK else pytest.mark.long,
    )
    for program in (SCRIPTED, REAL)
    for phase in PHASES
    for who in PROCESSES
    for fault in FAULTS
]


class Client(threading.Thread):
    """Asks for one long stream and notes how it ended."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self._url = url
        self.begun = threading.Event()
        self.last_line = ""
        self.error: str | None = None
        self.start()

    def run(self) -> None:
        sampling = {"max_new_tokens": 100, "ignore_eos": True, "temperature": 0.0}
        body = {"text": "hello", "stream": True, "sampling_params": sampling}
        try:
            with httpx.stream("POST", f"{self._url}/generate", json=body, timeout=LIMIT_S) as lines:
                for line in lines.iter_lines():
                    if line:
                        self.last_line = line
                        self.begun.set()
        except httpx.TransportError as error:
            self.error = repr(error)
        self.begun.set()

    @property
    def was_answered(self) -> bool:
        return self.last_line == "data: [DONE]"

    @property
    def heard_an_error(self) -> bool:
        return self.error is not None or '"error"' in self.last_line


@pytest.fixture(scope="module")
def scripted_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(byte_level(), tmp_path_factory.mktemp("model") / "scripted")


@contextlib.contextmanager
def server_in(program: str, phase: str, model: Path) -> Iterator[tuple[Server, Client | None]]:
    """A server in that phase, with a client while it serves or drains."""
    flags = ["--engine-heartbeat-timeout", "2"]
    if program == REAL:
        flags += ["--device", "cpu", "--context-length", "128", "--max-running-requests", "2"]
        flags += ["--compilation-cache-dir", "none"] if phase == "warm-up" else ["--warmup", "none"]
    else:
        seed = SLOW_START_SEED if phase in ("loading", "warm-up") else 20
        flags += ["--random-seed", str(seed)]
    with running_server(program, DEMO if program == REAL else model, *flags) as server:
        server.url = server.wait_line(r"listening at (http://\S+);")
        if phase == "loading":
            yield server, None
            return
        if phase == "warm-up":
            # Two processes print: it may have come before the server listened.
            until(lambda: is_warming_up(server), "the engine warms up", 2 * LIMIT_S)
            yield server, None
            return
        server.wait_ready()
        client = Client(server.url)
        assert client.begun.wait(LIMIT_S), server.printed
        if phase == "draining":
            server.process.send_signal(signal.SIGTERM)
            server.wait_line("(requests to finish)")
        yield server, client


@pytest.mark.parametrize(("program", "phase", "who", "fault"), CASES)
def test_every_fault_ends_well(
    program: str, phase: str, who: str, fault: str, scripted_model: Path
) -> None:
    with server_in(program, phase, scripted_model) as (server, client):
        engine = server.engine
        family = psutil.Process(server.process.pid).children(recursive=True)
        # An engine that is killed ends the server without a signal.
        is_told = phase == "draining" or fault == "kill"
        victim = psutil.Process(server.process.pid) if who == "server" else engine
        with contextlib.suppress(psutil.NoSuchProcess):  # a drain may just have ended
            FAULTS[fault](victim)
        if fault == "stop" and who == "server":
            victim.resume()  # nothing can answer for it; what it missed must be caught up
        if fault == "stop" and who == "engine" and phase in ("loading", "warm-up", "serving"):
            until(lambda: health(server) == "stuck", "a stopped engine is noticed", LIMIT_S)
        if client is not None:
            if fault in SHORTAGES and phase == "serving":
                more = [Client(server.url) for _ in range(5)]
                for one in more:
                    one.join(LIMIT_S)
                    assert one.was_answered or one.heard_an_error, one.last_line
            if fault == "stop" and who == "engine" and phase == "serving":
                server.process.send_signal(signal.SIGTERM)
                is_told = True
            client.join(LIMIT_S)
            assert not client.is_alive()
            assert client.was_answered or client.heard_an_error, client.last_line
            if fault in PASSING:
                assert client.was_answered, client.error or client.last_line
        assert exit_code(server, is_told) in expected_exits(phase, who, fault), server.printed
        until(lambda: all(map(is_gone, family)), f"some of {family} live on")
        until(lambda: not sockets_in(server.temporary), f"left: {sockets_in(server.temporary)}")


def is_warming_up(server: Server) -> bool:
    return any("progress: compiling: " in line or "warming up" in line for line in server.printed)


def health(server: Server) -> str:
    return str(httpx.get(f"{server.url}/health", timeout=5).json()["status"])


def exit_code(server: Server, is_told: bool) -> int:
    """Of a server that ends by itself within a second, or is told to.

    `is_told`: it was already, or must end without.
    """
    deadline = time.monotonic() + 1
    while not is_told and server.process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    if not is_told and server.process.poll() is None:
        server.process.send_signal(signal.SIGTERM)
    return server.wait_exit(LIMIT_S)


def expected_exits(phase: str, who: str, fault: str) -> set[int]:
    if fault == "kill":
        return {-signal.SIGKILL} if who == "server" else {1}
    if fault in SHORTAGES:
        return {0, 1}  # it may do without
    return {0}
