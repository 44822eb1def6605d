"""sglang-router as a process of its own before some workers."""

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests.live.live_server import free_port

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 60.0


@contextmanager
def router(folder: Path, policy: str, worker_urls: Sequence[str]) -> Iterator[str]:
    """The URL of a router that knows all workers and found them healthy."""
    port = free_port()
    log = folder / "router.log"
    command = [
        *(sys.executable, "-m", "sglang_router.launch_router", "--policy", policy),
        *("--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())),
        *("--worker-urls", *worker_urls),
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_for_workers(url, len(worker_urls), process, log)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(STOP_TIMEOUT_S)


def _wait_for_workers(
    url: str, num_workers: int, process: subprocess.Popen[bytes], log: Path
) -> None:
    """A router listens before it has asked its workers who they are."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise AssertionError(f"the router ended: {log.read_text()[-2000:]}")
        with contextlib.suppress(httpx.TransportError):  # not listening yet
            workers = httpx.get(url + "/workers", timeout=5).json()["workers"]
            if sum(worker["is_healthy"] for worker in workers) == num_workers:
                return
        time.sleep(0.2)
    raise AssertionError(f"workers not found in time: {log.read_text()[-2000:]}")
