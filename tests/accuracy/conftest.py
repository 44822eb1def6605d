"""What the tests of accuracy share, over all workers of a run: the reference."""

import fcntl
import json
from pathlib import Path

import pytest

from tests.accuracy.variants import REFERENCE
from tests.accuracy.workload import Outcome, run
from tests.live.live_server import live_server


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """One folder for all workers of this run."""
    base = tmp_path_factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / "accuracy"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def reference(shared_folder: Path) -> Outcome:
    """What a server answers without retract, prefix cache, overlap, speculation or ranks."""
    kept = shared_folder / "reference.json"
    folder = shared_folder / "reference"
    with (shared_folder / "reference.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one worker makes it, the others wait
        if not kept.exists():
            folder.mkdir()
            with live_server(folder, *REFERENCE.flags) as server:
                outcome = run(server.url)
                assert server.get("/get_server_info")["counters"]["requests_retracted"] == 0
            kept.write_text(json.dumps(outcome))
    return Outcome(*json.loads(kept.read_text()))
