"""Files with prompts, histories, KV or recordings are closed to other users of the machine."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from sgl_jax.engine.offline import Engine
from tests.live.live_server import DEMO, live_server
from tests.live.test_restart import is_storing
from tests.live.test_sessions import GREEDY, Client
from tests.support.waiting import until

USUAL_UMASK = 0o022
STORE = {
    "enable_hierarchical_cache": True,
    "hicache_storage_backend": "file",
    "page_size": 4,
    "max_total_tokens": 4096,
    "context_length": 512,
}
PROMPT = list(range(300, 340))


@pytest.fixture(autouse=True)
def usual_umask() -> Iterator[None]:
    before = os.umask(USUAL_UMASK)
    yield
    os.umask(before)


def modes(folder: Path) -> dict[str, int]:
    """The permissions of everything below `folder`, by path."""
    return {str(p.relative_to(folder)): p.stat().st_mode & 0o777 for p in folder.rglob("*")}


def open_paths(folder: Path) -> dict[str, str]:
    """What another user of the machine could reach below `folder`, with its permissions."""
    found = {}
    for path in folder.iterdir():
        mode = path.stat().st_mode & 0o777
        if mode & 0o077:
            found[str(path)] = oct(mode)
            found |= open_paths(path) if path.is_dir() else {}
    return found


@pytest.mark.long
def test_a_server_closes_all_that_it_writes(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir(mode=0o755)  # as an operator may have made it
    old = data / "run.events"
    old.write_text("an earlier recording")
    flags = [word for name, value in STORE.items() for word in as_flag(name, value)]
    flags += ["--restore-cache", str(data / "cache" / "demo"), "--record-events", str(old)]
    with live_server(tmp_path, *flags, is_quickly_compiled=True) as server:
        client = Client(server)
        client.turn(client.open(streaming=True), PROMPT)
        client.post("/start_profile", output_dir=str(data / "profile"))
        client.post("/generate", input_ids=PROMPT, sampling_params=GREEDY)
        client.post("/stop_profile")
        until(lambda: not is_storing(server), "prefixes are in the store")
        assert client.post("/save_cache")["num_tokens"] > 0
    found = modes(data)
    for kind in ("blocks/", "saved_cache_2/", "profile/", "run.events"):
        assert any(kind in path for path in found), kind
    is_folder = {path: (data / path).is_dir() for path in found}
    assert found == {path: 0o700 if is_folder[path] else 0o600 for path in found}


def as_flag(name: str, value: object) -> list[str]:
    flag = "--" + name.replace("_", "-")
    return [flag] if value is True else [flag, str(value)]


def test_an_offline_engine_closes_its_folders(tmp_path: Path) -> None:
    """It leaves the umask of its process as it is."""
    folder = tmp_path / "data"
    folder.mkdir()
    settings = STORE | {"device": "cpu", "warmup": "none", "restore_cache": str(folder / "cache")}
    with Engine(str(DEMO), record_events=str(folder / "run.events"), **settings) as engine:
        engine.generate([PROMPT], {"max_new_tokens": 4})
    assert len(modes(folder)) > 5
    assert open_paths(folder) == {}
    assert os.umask(USUAL_UMASK) == USUAL_UMASK
