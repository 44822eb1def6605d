"""A real server process for tests, on a free loopback port, ended by its pid."""

import contextlib
import os
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

from tests.support.quick_compilation import QUICK_FLAGS

DEMO = Path(__file__).parents[2] / "models" / "demo"
# Compiles all programs before ready: for long runs that limit the time of an answer.
WARM = ("--warmup", "all")
START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 60.0
_TEXT_WORKER = "sgl_jax.text.worker"


@dataclass
class LiveServer:
    """A running server; `log` is the file with its output, `key` an admin's, if it needs one."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path
    key: str = ""

    def get(self, path: str) -> Any:
        headers = bearer(self.key)
        # Certificates are of no use on a loopback, and cost 20 ms of processor time to read.
        response = httpx.get(self.url + path, headers=headers, timeout=60, verify=False)
        response.raise_for_status()
        return response.json()

    @property
    def engine(self) -> psutil.Process:
        """The process of the engine."""
        children = psutil.Process(self.process.pid).children()
        (engine,) = (child for child in children if _TEXT_WORKER not in child.cmdline())
        return engine

    @property
    def text_processes(self) -> list[psutil.Process]:
        """The process that text workers are forked from, unless it has just ended."""
        children = psutil.Process(self.process.pid).children()
        return [child for child in children if _TEXT_WORKER in child.cmdline()]

    def close_sessions(self) -> None:
        """All that are open."""
        with httpx.Client(base_url=self.url, timeout=60) as client:
            for session in self.get("/list_sessions")["sessions"]:
                body = {"session_id": session["session_id"]}
                client.post("/close_session", json=body).raise_for_status()

    def assert_balance(self) -> None:
        """At rest every page is free, cached, reserved or held by a session, on every rank."""
        for rank in self.until_at_rest()["ranks"]:
            assert rank["leased_pages"] == 0, rank
            assert rank["free_rows"] + rank["session_rows"] == rank["total_rows"], rank
            held = rank["free_pages"] + rank["cached_pages"] + rank["reserved_pages"]
            assert held + rank["session_held_pages"] == rank["total_pages"], rank
        assert "LedgerError" not in self.log.read_text()

    def until_at_rest(self, timeout_s: float = 60.0) -> dict[str, Any]:
        """Wait until nothing runs or waits; returns the server's info then."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            info: dict[str, Any] = self.get("/get_server_info")
            if not any(rank["num_running"] or rank["num_waiting"] for rank in info["ranks"]):
                return info
            time.sleep(0.1)
        raise AssertionError(f"still busy after {timeout_s} s: {info['ranks']}")

    def assert_nothing_leaked(self) -> None:
        """At rest every page is free, cached or reserved, on every rank."""
        for rank in self.until_at_rest()["ranks"]:
            assert rank["leased_pages"] == 0, rank
            assert rank["protected_pages"] == 0, rank
            assert rank["free_rows"] == rank["total_rows"], rank
            held = rank["free_pages"] + rank["cached_pages"] + rank["reserved_pages"]
            assert held == rank["total_pages"], rank
        assert "LedgerError" not in self.log.read_text()

    def assert_flush_frees_everything(self) -> None:
        """At rest, the prefix cache is all that held pages."""
        self.until_at_rest()
        httpx.post(self.url + "/flush_cache", timeout=60).raise_for_status()
        for rank in self.get("/get_server_info")["ranks"]:
            assert rank["free_pages"] + rank["reserved_pages"] == rank["total_pages"], rank


def bearer(key: str) -> dict[str, str]:
    """The header that sends an API key; none for an empty one."""
    return {"authorization": f"Bearer {key}"} if key else {}


def free_port() -> int:
    """A loopback port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def users_environment() -> dict[str, str]:
    """The environment without the devices and the compiler's flags of the tests' own process."""
    return {k: v for k, v in os.environ.items() if k not in ("JAX_PLATFORMS", "XLA_FLAGS")}


@contextmanager
def live_server(
    folder: Path,
    *flags: str,
    model: Path = DEMO,
    exit_code: int = 0,
    key: str = "",
    is_quickly_compiled: bool = False,
) -> Iterator[LiveServer]:
    """`python -m sgl_jax.launch_server` on `model`, healthy; ended with SIGTERM, if not before.

    Without `WARM` among the flags each program is compiled in the step that needs it first: the
    server is ready ten seconds sooner, and most tests need few of the programs. With
    `is_quickly_compiled` all programs are compiled as in `tests/support/quick_compilation.py`.
    """
    port = free_port()
    log = folder / "server.log"
    command = [
        *(sys.executable, "-m", "sgl_jax.launch_server", "--model-path", str(model)),
        *("--device", "cpu", "--warmup", "none", "--port", str(port), *flags),
    ]
    environment = users_environment()
    if is_quickly_compiled:
        environment["XLA_FLAGS"] = QUICK_FLAGS
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
    server = LiveServer(f"http://127.0.0.1:{port}", process, log, key)
    try:
        _wait_until_healthy(server)
        yield server
        process.send_signal(signal.SIGTERM)
        assert process.wait(STOP_TIMEOUT_S) == exit_code, log.read_text()[-2000:]
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(STOP_TIMEOUT_S)


def _wait_until_healthy(server: LiveServer) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            raise AssertionError(f"the server ended: {server.log.read_text()[-2000:]}")
        with contextlib.suppress(httpx.TransportError):  # not listening yet
            if httpx.get(server.url + "/health", timeout=5, verify=False).status_code == 200:
                return
        time.sleep(0.2)  # the processor is the compiler's meanwhile
    raise AssertionError(f"not healthy in time: {server.log.read_text()[-2000:]}")
