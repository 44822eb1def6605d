"""A server process from its first line to its exit code."""

import contextlib
import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.engine.scripted_engine import CRASH_SEED

STEP_MS = 20


class Server:
    """A server process and what it printed."""

    def __init__(self, model: Path, *flags: str) -> None:
        command = [sys.executable, "-m", "tests.server.scripted_server"]
        command += ["--model-path", str(model), "--port", "0", *flags]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.printed: list[str] = []
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = ""

    def wait_ready(self) -> "Server":
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            line = self._lines.get(timeout=60)
            found = re.search(r"ready at (http://\S+)", line)
            if found:
                self.url = found[1]
                return self
        raise AssertionError(self.printed)

    def wait_exit(self, timeout_s: float = 30) -> int:
        code = self.process.wait(timeout_s)
        self._reader.join(5)
        return code

    @property
    def engine(self) -> psutil.Process:
        return self._child("scripted_engine")

    @property
    def text_workers(self) -> psutil.Process:
        return self._child("text.worker")

    def _child(self, word: str) -> psutil.Process:
        children = psutil.Process(self.process.pid).children()
        (child,) = (child for child in children if word in " ".join(child.cmdline()))
        return child

    def num_running(self) -> int:
        state = httpx.get(f"{self.url}/get_server_info").json()
        return int(state["ranks"][0]["num_running"])

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.printed.append(line)
            self._lines.put(line)


@pytest.fixture
def start(model_folder: Path) -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def make(*flags: str) -> Server:
        servers.append(Server(model_folder, *flags))
        return servers[-1]

    yield make
    for server in servers:
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(server.process.pid).children():
                child.kill()
        server.process.kill()
        server.process.wait()


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


@contextlib.contextmanager
def streaming(server: Server, tokens: int = 200) -> Iterator[Iterator[str]]:
    body = {"text": "hello", "stream": True, "sampling_params": {"max_new_tokens": tokens}}
    with httpx.stream("POST", f"{server.url}/generate", json=body, timeout=30) as answer:
        assert answer.status_code == 200
        lines = (line for line in answer.iter_lines() if line)
        next(lines)
        yield lines


def test_it_serves_drops_gone_clients_and_drains_on_sigterm(
    start: Callable[..., Server],
) -> None:
    server = start("--random-seed", str(STEP_MS)).wait_ready()
    assert any("warming up" in line for line in server.printed)

    with streaming(server) as _:  # read one event, then go away
        assert server.num_running() == 1
    until(lambda: server.num_running() == 0, "a client that went away from a stream")
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/generate", json={"text": "hello"}, timeout=0.5)
    until(lambda: server.num_running() == 0, "a client that gave up waiting")

    with streaming(server, tokens=100) as lines:
        # A service manager signals every process of the service, not only the first.
        server.engine.send_signal(signal.SIGTERM)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        refused = httpx.post(f"{server.url}/generate", json={"text": "hello"})
        assert refused.status_code == 503
        *_, last, done = lines
    assert done == "data: [DONE]"
    meta = json.loads(last.removeprefix("data: "))["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 100}
    assert server.wait_exit() == 0, server.printed


def test_what_does_not_finish_in_time_ends_with_an_error(start: Callable[..., Server]) -> None:
    server = start("--random-seed", "100", "--drain-timeout", "0.2").wait_ready()
    with streaming(server) as lines:
        server.process.send_signal(signal.SIGINT)
        *_, last = lines
    assert "shutting down" in json.loads(last.removeprefix("data: "))["error"]["message"]
    assert server.wait_exit() == 0


def test_a_second_signal_ends_it_at_once(start: Callable[..., Server]) -> None:
    server = start("--random-seed", "100").wait_ready()
    engine = server.engine
    with streaming(server):
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_exit(10) == 128 + signal.SIGTERM
    until(lambda: not engine.is_running(), "the engine lives on")


def test_when_the_engine_dies_so_does_the_server_and_says_why(
    start: Callable[..., Server],
) -> None:
    server = start("--random-seed", str(STEP_MS)).wait_ready()
    with streaming(server) as lines:
        os.kill(server.engine.pid, signal.SIGKILL)
        *_, last = lines
    assert "killed by signal 9" in json.loads(last.removeprefix("data: "))["error"]["message"]
    assert server.wait_exit() == 1
    assert any("killed by signal 9" in line for line in server.printed)


def test_an_engine_that_does_not_start_is_explained(start: Callable[..., Server]) -> None:
    server = start("--random-seed", str(CRASH_SEED))
    assert server.wait_exit() == 1
    assert any(
        "cannot serve" in line and "the script says not to start" in line for line in server.printed
    )


def test_a_port_that_is_taken_is_said_at_once(start: Callable[..., Server]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = start("--port", str(port))
        assert server.wait_exit() == 1
    assert any(f"cannot listen on 127.0.0.1:{port}" in line for line in server.printed)


def test_a_signal_while_starting_ends_it(start: Callable[..., Server]) -> None:
    server = start()
    until(lambda: any("warming up" in line for line in server.printed), "the engine starts")
    server.process.send_signal(signal.SIGTERM)
    assert server.wait_exit() == 0
