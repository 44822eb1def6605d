"""A real server, its memory records broken from outside: it serves on, or ends and says why.

The engine process is told where to break by a module that Python imports at its start.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.live.live_server import STOP_TIMEOUT_S, LiveServer, live_server

BODY = {
    "text": "Hello",
    "sampling_params": {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True},
}
FLAGS = (
    *("--context-length", "256", "--max-running-requests", "4"),
    *("--check-memory", "busy", "--decode-log-interval", "0"),
)
# Each time the file appears, rank 0 loses a page in the next step.
SABOTAGE = """
import os
import sgl_jax.scheduler.scheduler as module

commit = module.Scheduler._apply_result

def commit_and_leak(self, event):
    if os.path.exists({flag!r}):
        os.remove({flag!r})
        self.ranks[0].memory.allocator.alloc(1, owner=1)
    commit(self, event)

module.Scheduler._apply_result = commit_and_leak
"""


def install_in_engine(source: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run `source` at the start of each process that is started from now on."""
    (folder / "sitecustomize.py").write_text(source)
    root = Path(__file__).parents[2]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), str(root)]))


@contextmanager
def breakable_server(
    folder: Path, monkeypatch: pytest.MonkeyPatch, action: str
) -> Iterator[tuple[LiveServer, Path]]:
    """A server, and the file that breaks it when it is made."""
    flag = folder / "break"
    install_in_engine(SABOTAGE.format(flag=str(flag)), folder, monkeypatch)
    dumps = ("--memory-dump-dir", str(folder / "dumps"))
    flags = (*FLAGS, *dumps, "--memory-error-action", action)
    code = 1 if action == "crash" else 0
    with live_server(folder, *flags, exit_code=code, is_quickly_compiled=True) as server:
        yield server, flag


def generate(server: LiveServer) -> httpx.Response:
    return httpx.post(server.url + "/generate", json=BODY, timeout=120)


def read_dump(folder: Path) -> Any:
    (path,) = (folder / "dumps").iterdir()
    return path, json.loads(path.read_text())


# By default tests/engine has it, without a server.
@pytest.mark.long
def test_repair_answers_500_and_serves_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with breakable_server(tmp_path, monkeypatch, "repair") as (server, flag):
        expected = generate(server).json()["output_ids"]
        flag.touch()
        failed = generate(server)
        assert failed.status_code == 500
        assert "memory wrong and started afresh" in failed.text
        assert generate(server).json()["output_ids"] == expected
        info = server.until_at_rest()
        (rank,) = info["ranks"]
        assert rank["leased_pages"] == 0
        held = rank["free_pages"] + rank["cached_pages"] + rank["reserved_pages"]
        assert held == rank["total_pages"]
        assert info["counters"]["memory_errors"] == 1
        metrics = httpx.get(server.url + "/metrics", timeout=60).text
        lines = [line for line in metrics.splitlines() if "sglang:memory_errors_total{" in line]
        assert [line.split()[-1] for line in lines] == ["1.0"]
        log = server.log.read_text()
    path, dump = read_dump(tmp_path)
    assert "CRITICAL" in log
    assert str(path) in log
    assert "leased" in dump["reason"]
    (view,) = (rank["view"] for rank in dump["ranks"])
    assert view["dp_rank"] == 0


@pytest.mark.long
def test_crash_ends_the_server_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with breakable_server(tmp_path, monkeypatch, "crash") as (server, flag):
        flag.touch()
        with pytest.raises((httpx.HTTPStatusError, httpx.TransportError)):
            generate(server).raise_for_status()
        server.process.wait(STOP_TIMEOUT_S)
    log = server.log.read_text()
    path, _ = read_dump(tmp_path)
    assert f"memory dump: {path}" in log
    assert "LedgerError: rank 0: " in log
