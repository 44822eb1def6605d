"""Other weights while requests are there: tokens as of an engine started on them, nothing lost."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from sgl_jax.core.engine_messages import EngineInfo, Reply, WeightsChanged
from sgl_jax.core.messages import (
    FrontMessage,
    GenerateRequest,
    OpenSession,
    PauseGeneration,
    SessionTurn,
)
from sgl_jax.core.sampling_params import SamplingParams
from sgl_jax.core.server_args import ServerArgs
from sgl_jax.core.weight_messages import UpdateWeightsFromDisk
from sgl_jax.engine.loop.core import EngineCore
from sgl_jax.scheduler.events import Resume
from tests.engine.scripted_channel import ScriptedChannel

GOLDEN = Path(__file__).parents[1] / "golden" / "qwen3"
MAX_TURNS = 200
NEW_TOKENS = 12
SAMPLING = SamplingParams(max_new_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)


def copy_of(folder: Path, name: str) -> Path:
    target = folder / name
    shutil.copytree(GOLDEN, target)
    return target


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and the same with other weights."""
    folder = tmp_path_factory.mktemp("models")
    old, new = copy_of(folder, "old"), copy_of(folder, "new")
    rng = np.random.default_rng(0)
    tensors = {
        name: tensor + rng.normal(0, 0.05, tensor.shape).astype(tensor.dtype)
        for name, tensor in load_file(new / "model.safetensors").items()
    }
    save_file(tensors, new / "model.safetensors")
    return old, new


def start(folder: Path) -> EngineCore:
    return EngineCore(
        ServerArgs(
            model_path=str(folder),
            device="cpu",
            dp_size=2,
            page_size=4,
            context_length=64,
            max_total_tokens=256,
            max_running_requests=4,
            chunked_prefill_size=16,
            warmup="none",
            check_memory="busy",
        )
    )


def requests(prefix: str) -> list[FrontMessage]:
    return [
        GenerateRequest(rid=f"{prefix}{i}", input_ids=[3 + i] * (4 * i + 1), sampling=SAMPLING)
        for i in range(6)
    ]


def outputs(channel: ScriptedChannel, prefix: str) -> list[list[int]]:
    return [channel.tokens()[f"{prefix}{i}"] for i in range(6)]


def until_idle(core: EngineCore, messages: list[FrontMessage]) -> Iterator[list[FrontMessage]]:
    yield messages
    for _ in range(MAX_TURNS):
        yield []
        if core.scheduler.is_idle:
            return
    raise AssertionError(f"not idle after {MAX_TURNS} turns")


def run(core: EngineCore, script: Iterator[list[FrontMessage]]) -> ScriptedChannel:
    channel = ScriptedChannel(script)
    core._is_shutting_down = False
    core.run(channel, close=False)
    core.scheduler.audit()
    return channel


def reply(channel: ScriptedChannel, rid: str = "update") -> Reply:
    (found,) = (m for m in channel.sent if isinstance(m, Reply) and m.rid == rid)
    return found


def update(folder: Path, **fields: Any) -> UpdateWeightsFromDisk:
    return UpdateWeightsFromDisk(rid="update", model_path=str(folder), **fields)


@pytest.fixture(scope="module")
def of_new(folders: tuple[Path, Path]) -> list[list[int]]:
    """What an engine says that was started on the new weights."""
    core = start(folders[1])
    channel = run(core, until_idle(core, requests("a")))
    core._close()
    return outputs(channel, "a")


@pytest.fixture(scope="module")
def engine(folders: tuple[Path, Path]) -> Iterator[EngineCore]:
    core = start(folders[0])
    yield core
    core._close()


@pytest.fixture(scope="module")
def of_old(engine: EngineCore, of_new: list[list[int]]) -> list[list[int]]:
    tokens = outputs(run(engine, until_idle(engine, requests("a"))), "a")
    assert all(old != new for old, new in zip(tokens, of_new, strict=True))
    return tokens


@pytest.fixture
def core(engine: EngineCore, folders: tuple[Path, Path]) -> EngineCore:
    """An engine with the old weights."""
    run(engine, until_idle(engine, [update(folders[0])]))
    return engine


def test_it_answers_as_one_started_on_these_weights(
    core: EngineCore,
    folders: tuple[Path, Path],
    of_old: list[list[int]],
    of_new: list[list[int]],
) -> None:
    def script() -> Iterator[list[FrontMessage]]:
        yield from until_idle(core, requests("a"))
        yield from until_idle(core, [update(folders[1])])
        yield from until_idle(core, requests("b"))

    channel = run(core, script())
    assert outputs(channel, "a") == of_old
    assert outputs(channel, "b") == of_new
    assert reply(channel).data["success"]
    (changed,) = (m.info for m in channel.sent if isinstance(m, EngineInfo))
    assert changed["model_path"] == str(folders[1])
    assert core.executor.compile_counts()["compiles_after_ready"] == 0


@pytest.mark.parametrize("starts", [True, False])
def test_a_stored_head_is_used_though_the_config_ties_it(
    core: EngineCore,
    folders: tuple[Path, Path],
    of_new: list[list[int]],
    tmp_path: Path,
    starts: bool,
) -> None:
    tied = tmp_path / "tied"
    shutil.copytree(folders[1], tied)
    config = json.loads((tied / "config.json").read_text())
    (tied / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    if starts:
        core = start(tied)

    def script() -> Iterator[list[FrontMessage]]:
        yield from until_idle(core, [] if starts else [update(tied)])
        yield from until_idle(core, requests("a"))

    assert outputs(run(core, script()), "a") == of_new
    if starts:
        core._close()


@pytest.mark.parametrize("keep_cache", [False, True])
def test_requests_that_run_go_on_with_the_new_weights(
    core: EngineCore,
    folders: tuple[Path, Path],
    of_old: list[list[int]],
    of_new: list[list[int]],
    keep_cache: bool,
) -> None:
    """Those that have not started are the new weights' alone, even where their prefix was cached,
    by requests before or by those that keep their KV."""

    def script() -> Iterator[list[FrontMessage]]:
        yield requests("a")
        yield from ([] for _ in range(4))
        yield [update(folders[1], keep_cache=keep_cache, flush_cache=False)]
        yield from until_idle(core, requests("b"))

    retracted = core.scheduler.counters()["requests_retracted"]
    channel = run(core, script())
    told = reply(channel).data
    assert told["num_paused_requests"] == 4
    retracted = core.scheduler.counters()["requests_retracted"] - retracted
    assert retracted == (0 if keep_cache else 4)
    assert {end.type for end in channel.ends().values()} == {"length"}
    assert all(len(tokens) == NEW_TOKENS for tokens in outputs(channel, "a"))
    assert outputs(channel, "a") != of_old
    assert [tokens[0] for tokens in outputs(channel, "a")[:4]] == [t[0] for t in of_old[:4]]
    assert outputs(channel, "a")[4:] == of_new[4:]
    assert outputs(channel, "b") == of_new
    (changed,) = (m for m in channel.sent if isinstance(m, WeightsChanged))
    assert changed.version == str(folders[1])
    assert sorted(changed.kept_rids) == ([f"a{i}" for i in range(4)] if keep_cache else [])


def test_all_requests_are_aborted_on_demand(core: EngineCore, folders: tuple[Path, Path]) -> None:
    def script() -> Iterator[list[FrontMessage]]:
        yield requests("a")
        yield []
        yield [update(folders[1], abort_all_requests=True)]

    channel = run(core, script())
    assert reply(channel).data["num_paused_requests"] == 0
    assert {end.message for end in channel.ends().values()} == {"the weights were updated"}


def test_a_session_forgets_the_kv_of_the_old_weights(
    core: EngineCore, folders: tuple[Path, Path]
) -> None:
    def turn(rid: str, tokens: list[int]) -> GenerateRequest:
        session = SessionTurn(id="s")
        return GenerateRequest(rid=rid, input_ids=tokens, sampling=SAMPLING, session=session)

    def script() -> Iterator[list[FrontMessage]]:
        yield [OpenSession(rid="open", session_id="s", streaming=True)]
        yield from until_idle(core, [turn("first", [7] * 9)])
        yield from until_idle(core, [update(folders[1])])
        assert all(view.session_rows == 0 for view in core.scheduler.memory_views())
        yield from until_idle(core, [turn("second", [8, 9])])
        history = [7] * 9 + channel.tokens()["first"] + [8, 9]
        whole = GenerateRequest(rid="whole", input_ids=history, sampling=SAMPLING, namespace="x")
        yield from until_idle(core, [whole])

    channel = ScriptedChannel(script())
    core._is_shutting_down = False
    core.run(channel, close=False)
    assert channel.tokens()["second"] == channel.tokens()["whole"]


def test_a_pause_goes_on_after_an_update(core: EngineCore, folders: tuple[Path, Path]) -> None:
    def script() -> Iterator[list[FrontMessage]]:
        yield [PauseGeneration(rid="pause"), *requests("a"), update(folders[1])]
        yield from ([] for _ in range(3))
        assert core.scheduler.num_waiting == 6

    channel = run(core, script())
    core.scheduler.handle(Resume())
    assert reply(channel).ok
    assert channel.tokens() == {f"a{i}": [] for i in range(6)}


def broken(folder: Path, how: str) -> Path:
    """A folder whose weights cannot be served, for each reason."""
    target = copy_of(folder, how)
    weights = target / "model.safetensors"
    if how == "truncated":
        weights.write_bytes(weights.read_bytes()[:-1000])
    elif how == "missing":
        weights.unlink()
    else:
        tensors = load_file(weights)
        norm = tensors["model.norm.weight"]
        tensors["model.norm.weight"] = norm[:-1] if how == "shape" else norm * np.nan
        save_file(tensors, weights)
    return target


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("truncated", "model.safetensors"),
        ("missing", "holds neither"),
        ("shape", "model.norm.weight has shape [63] instead of [64]"),
        ("nan", "no finite numbers"),
    ],
)
def test_weights_that_cannot_be_loaded_leave_the_old_ones(
    core: EngineCore,
    folders: tuple[Path, Path],
    tmp_path: Path,
    of_old: list[list[int]],
    how: str,
    why: str,
) -> None:
    def script() -> Iterator[list[FrontMessage]]:
        yield requests("a")
        yield from ([] for _ in range(4))
        yield from until_idle(core, [update(broken(tmp_path, how))])

    channel = run(core, script())
    assert not reply(channel).ok
    assert why in reply(channel).message
    assert reply(channel).data["param"] == "model_path"
    assert outputs(channel, "a") == of_old
    assert core.info["model_path"] == str(folders[0])


@pytest.mark.parametrize("how", ["truncated", "missing", "shape", "nan"])
@pytest.mark.parametrize("aborts", [False, True])
def test_weights_that_cannot_be_loaded_leave_requests_and_caches(
    core: EngineCore, tmp_path: Path, of_old: list[list[int]], how: str, aborts: bool
) -> None:
    def script() -> Iterator[list[FrontMessage]]:
        yield from until_idle(core, requests("a"))
        cached.append(cached_pages(core))
        yield [*requests("b"), OpenSession(rid="open", session_id=f"{how}{aborts}")]
        yield from ([] for _ in range(4))
        yield [update(broken(tmp_path, how), abort_all_requests=aborts)]
        yield from until_idle(core, [])
        cached.append(cached_pages(core))

    cached: list[int] = []
    retracted = core.scheduler.counters()["requests_retracted"]
    channel = run(core, script())
    assert not reply(channel).ok
    assert outputs(channel, "b") == of_old
    assert core.scheduler.counters()["requests_retracted"] == retracted
    assert 0 < cached[0] <= cached[1]


def cached_pages(core: EngineCore) -> int:
    return sum(view.cached_pages for view in core.scheduler.memory_views())


@pytest.mark.parametrize("files", ["whole", "nan"])
def test_pools_make_room_for_the_new_weights_where_the_devices_have_none(
    core: EngineCore,
    folders: tuple[Path, Path],
    tmp_path: Path,
    of_old: list[list[int]],
    of_new: list[list[int]],
    files: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only then a load that fails costs the caches."""
    load = core.executor.weights._load

    def without_room(path: str, load_format: str) -> Any:
        if hasattr(core.executor, "_state"):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return load(path, load_format)

    def script() -> Iterator[list[FrontMessage]]:
        yield from until_idle(core, requests("a"))
        monkeypatch.setattr(core.executor.weights, "_load", without_room)
        yield [update(folders[1] if files == "whole" else broken(tmp_path, "nan"))]
        monkeypatch.undo()
        assert cached_pages(core) == 0
        yield from until_idle(core, requests("b"))

    channel = run(core, script())
    assert reply(channel).ok == (files == "whole")
    assert outputs(channel, "b") == (of_new if files == "whole" else of_old)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"intermediate_size": 128}, "intermediate_size is 128 instead of 96"),
        (
            {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3},
            "layers: 3 instead of 2",
        ),
        (
            {"rope_parameters": {"rope_theta": 5.0, "rope_type": "default"}},
            "layers[1].rope.theta is 5.0 instead of 10000.0",
        ),
    ],
)
def test_another_model_is_refused_by_what_differs_and_disturbs_nothing(
    core: EngineCore, tmp_path: Path, of_old: list[list[int]], changes: dict[str, Any], why: str
) -> None:
    def script() -> Iterator[list[FrontMessage]]:
        yield requests("a")
        yield from ([] for _ in range(4))
        yield from until_idle(core, [update(other)])

    other = copy_of(tmp_path, "other")
    config = other / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    retracted = core.scheduler.counters()["requests_retracted"]
    channel = run(core, script())
    assert why in reply(channel).message
    assert reply(channel).data == {"code": "other_model", "param": "model_path"}
    assert outputs(channel, "a") == of_old
    assert core.scheduler.counters()["requests_retracted"] == retracted


@pytest.mark.parametrize("path", ["x" * 5000, "a\0b", "/nowhere"])
def test_a_path_that_cannot_be_is_refused(core: EngineCore, path: str) -> None:
    channel = run(core, until_idle(core, [update(path)]))  # type: ignore[arg-type]
    assert not reply(channel).ok
    assert reply(channel).data["param"] == "model_path"
