"""A server in a process of its own: what it prints, its engine, its exit, and what it leaves."""

import contextlib
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx
import psutil

SCRIPTED = "tests.server.scripted_server"
REAL = "sgl_jax.launch_server"


class Server:
    """A server process on a free port. `temporary` is the folder that it takes for `/tmp`."""

    def __init__(
        self, program: str, model: Path, *flags: str, environment: Mapping[str, str] | None = None
    ) -> None:
        self.temporary = Path(tempfile.mkdtemp(prefix="server-"))
        command = [sys.executable, "-m", program, "--model-path", str(model), "--port", "0", *flags]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, **(environment or {}), "TMPDIR": str(self.temporary)},
        )
        self.printed: list[str] = []
        self.url = ""
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_ready(self, timeout_s: float = 60) -> "Server":
        """Wait until it says where it is ready."""
        self.url = self.wait_line(r"ready at (http://\S+)", timeout_s)
        return self

    def wait_line(self, pattern: str, timeout_s: float = 60) -> str:
        """The first group of `pattern` in a line that was not waited for before."""
        deadline = time.monotonic() + timeout_s
        while (left_s := deadline - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                found = re.search(pattern, self._lines.get(timeout=min(left_s, 0.2)))
                if found:
                    return found[1]
            if self.process.poll() is not None and self._lines.empty():
                break
        raise AssertionError(f"no {pattern!r} in {self.printed}")

    def wait_exit(self, timeout_s: float = 30) -> int:
        """The exit code, within the time."""
        code = self.process.wait(timeout_s)
        self._reader.join(5)
        return code

    @property
    def engine(self) -> psutil.Process:
        """The engine's process."""
        children = psutil.Process(self.process.pid).children()
        (child,) = (child for child in children if "sgl_jax.text.worker" not in child.cmdline())
        return child

    def num_running(self) -> int:
        """Requests that the first rank runs."""
        state = httpx.get(f"{self.url}/get_server_info").json()
        return int(state["ranks"][0]["num_running"])

    def left_behind(self) -> list[str]:
        """Names of temporary files and folders that are there."""
        return sorted(path.name for path in self.temporary.iterdir())

    def end(self) -> None:
        """Kill what still runs and remove the temporary folder."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
        self.process.kill()
        self.process.wait()
        shutil.rmtree(self.temporary, ignore_errors=True)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.printed.append(line)
            self._lines.put(line)


@contextlib.contextmanager
def running_server(
    program: str, model: Path, *flags: str, environment: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """`program` (`SCRIPTED` or `REAL`) on `model`; ended afterwards, if it has not ended."""
    server = Server(program, model, *flags, environment=environment)
    try:
        yield server
    finally:
        server.end()
