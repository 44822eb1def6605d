"""A server that starts shows its progress in `/health`."""

import itertools
import json
import shutil
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.live.live_server import DEMO
from tests.server.server_process import REAL, running_server

PHASES = ["loading", "compiling_loops", "compiling", "warming_up", "compiling_in_background"]
FLAGS = (
    *("--device", "cpu", "--load-format", "dummy", "--warmup", "plain"),
    *("--max-running-requests", "1", "--chunked-prefill-size", "2"),
    *("--compilation-cache-dir", "none"),
)


@pytest.fixture
def wide_model(tmp_path: Path) -> Path:
    """A model whose random weights take seconds to make: the engine reports once a second."""
    folder = tmp_path / "wide"
    shutil.copytree(DEMO, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 2**15}))
    return folder


@pytest.mark.long
def test_phases_come_in_order_and_count_up_to_their_totals(wide_model: Path) -> None:
    seen: list[tuple[int, dict[str, Any]]] = []  # status, progress
    with running_server(REAL, wide_model, *FLAGS) as server:
        url = server.wait_line(r"listening at (http://\S+);")
        deadline = time.monotonic() + 300
        while not seen or seen[-1][1].get("phase") != PHASES[-1]:
            assert time.monotonic() < deadline, server.printed
            answer = httpx.get(url + "/health", timeout=5)
            if progress := answer.json().get("progress"):
                seen.append((answer.status_code, progress))
            time.sleep(0.1)
    order = [PHASES.index(progress["phase"]) for _, progress in seen]
    assert order == sorted(order)
    assert {PHASES[place] for place in order} >= {"loading", "compiling"}
    for status, progress in seen:
        assert 0 <= progress["done"] <= progress["total"]
        assert status == 200 or progress["phase"] != PHASES[-1]
    for (_, earlier), (_, later) in itertools.pairwise(seen):
        assert earlier["phase"] != later["phase"] or earlier["done"] <= later["done"]
    counts = {progress["done"] for _, progress in seen if progress["phase"] == "compiling"}
    assert len(counts) > 1
