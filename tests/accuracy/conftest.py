"""What the tests of accuracy share, over all workers of a run: the references."""

import fcntl
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.accuracy.served_models import DENSE, ServedModel
from tests.accuracy.variants import REFERENCE
from tests.accuracy.workload import NUM_QUESTIONS, NUM_SOME_QUESTIONS, Outcome, run
from tests.live.live_server import live_server


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """One folder for all workers of this run."""
    base = tmp_path_factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / "accuracy"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def reference_of(shared_folder: Path) -> Callable[..., Outcome]:
    """What a server of a model answers without retract, prefix cache, overlap, speculation or
    ranks."""

    def reference_of(model: ServedModel, num_questions: int = NUM_QUESTIONS) -> Outcome:
        folder = shared_folder / f"{model.name}-{num_questions}"
        kept = folder.with_suffix(".json")
        with folder.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # one worker makes it, the others wait
            if not kept.exists():
                folder.mkdir()
                flags = (*REFERENCE.flags, "--warmup", "none")
                with live_server(folder, *flags, model=model.path) as server:
                    outcome = run(server.url, num_questions)
                    assert server.get("/get_server_info")["counters"]["requests_retracted"] == 0
                kept.write_text(json.dumps(outcome))
        return Outcome(*json.loads(kept.read_text()))

    return reference_of


@pytest.fixture(scope="session")
def reference(reference_of: Callable[..., Outcome]) -> Outcome:
    """The dense model's, to the questions of default runs."""
    return reference_of(DENSE, NUM_SOME_QUESTIONS)
