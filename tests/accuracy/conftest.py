"""What the tests of accuracy share, over all workers of a run: the references."""

import fcntl
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.accuracy.served_models import DENSE, ServedModel
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
def reference_of(shared_folder: Path) -> Callable[[ServedModel], Outcome]:
    """What a server of a model answers without retract, prefix cache, overlap, speculation or
    ranks."""

    def reference_of(model: ServedModel) -> Outcome:
        kept = shared_folder / f"{model.name}.json"
        folder = shared_folder / model.name
        with (shared_folder / f"{model.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # one worker makes it, the others wait
            if not kept.exists():
                folder.mkdir()
                flags = (*REFERENCE.flags, "--warmup", "none")
                with live_server(folder, *flags, model=model.path) as server:
                    outcome = run(server.url)
                    assert server.get("/get_server_info")["counters"]["requests_retracted"] == 0
                kept.write_text(json.dumps(outcome))
        return Outcome(*json.loads(kept.read_text()))

    return reference_of


@pytest.fixture(scope="session")
def reference(reference_of: Callable[[ServedModel], Outcome]) -> Outcome:
    """The dense model's."""
    return reference_of(DENSE)
