"""A trainer's arrays become the weights of a running engine, all or none."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from flax.nnx.traversals import unflatten_mapping
from safetensors.numpy import save

from sgl_jax import Engine
from sgl_jax.checkpoint.arriving import ArrivingWeights
from sgl_jax.checkpoint.tensor_files import TensorFiles
from sgl_jax.core.errors import InvalidRequestError
from sgl_jax.core.messages import CancelCall, PauseGeneration
from sgl_jax.core.weight_messages import (
    UpdateWeightsFromDisk,
    UpdateWeightsFromTensor,
    UpdateWeightVersion,
)
from tests.models.draft_reference import random_weights, write_checkpoint
from tests.support.long import long
from tests.support.waiting import until

GOLDEN = Path(__file__).parents[1] / "golden" / "qwen3"
PROMPTS = [[5, 6, 7], [9] * 20]
MODES: Any = ["staged", "chunked"]


@pytest.fixture(scope="module")
def old() -> dict[str, Any]:
    with TensorFiles(GOLDEN) as files:
        return {name: files.read(name, ()) for name in files.shapes}


@pytest.fixture(scope="module")
def new(old: dict[str, Any]) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        name: tensor + rng.normal(0, 0.05, tensor.shape).astype(tensor.dtype)
        for name, tensor in old.items()
    }


@pytest.fixture(scope="module")
def started() -> Iterator[Engine]:
    sizes = {"context_length": 128, "max_total_tokens": 512, "chunked_prefill_size": 32}
    with Engine(
        model_path=str(GOLDEN), device="cpu", page_size=4, max_running_requests=8, **sizes
    ) as engine:
        yield engine


@pytest.fixture
def engine(started: Engine) -> Engine:
    started._engine.checked_call(UpdateWeightsFromDisk(model_path=str(GOLDEN)))
    return started


def outputs(engine: Engine) -> list[list[int]]:
    sampling = {"max_new_tokens": 8, "temperature": 0.0, "ignore_eos": True}
    return [each.output_ids for each in engine.generate(PROMPTS, sampling)]


def bits(engine: Engine) -> list[Any]:
    return [np.array(array) for array in engine._engine.core.executor.weights.arrays]


@pytest.fixture(scope="module")
def of_new(started: Engine, new: dict[str, Any]) -> tuple[list[Any], list[list[int]]]:
    """The parameters and outputs of the new weights, in the first way."""
    started.update_weights(new, version="new")
    return bits(started), outputs(started)


def num_compiled(engine: Engine) -> int:
    """Return the compilations of this process on other threads than the one in the background."""
    count: int = engine.server_info()["counters"]["compiles_after_ready"]
    return count


def as_state(tensors: dict[str, Any]) -> nnx.State[Any, Any]:
    """Return the tree of nested names that a trainer's model has."""
    params = {tuple(name.split(".")): nnx.Param(own) for name, own in tensors.items()}
    return nnx.State(unflatten_mapping(params))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("form", [dict, as_state, lambda tensors: iter(tensors.items())])
def test_outputs_are_of_the_arrays_and_nothing_compiles(
    engine: Engine,
    old: dict[str, Any],
    new: dict[str, Any],
    of_new: tuple[list[Any], list[list[int]]],
    mode: Any,
    form: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sgl_jax.checkpoint.trainer_weights._BUCKET_BYTES", 4096)
    of_old = outputs(engine)
    assert of_old != of_new[1]
    held = {name: jax.device_put(tensor) for name, tensor in new.items()}
    before = num_compiled(engine)
    engine.update_weights(form(held), version="1", mode=mode)
    assert num_compiled(engine) == before
    for array in held.values():
        array.delete()  # as donation does
    assert outputs(engine) == of_new[1]
    for found, expected in zip(bits(engine), of_new[0], strict=True):
        np.testing.assert_array_equal(found, expected)
    assert engine.info["weight_version"] == "1"
    engine.update_weights(old, version="0", mode=mode)
    assert outputs(engine) == of_old


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("keep_cache", [False, True])
def test_no_request_uses_kv_of_other_weights(
    engine: Engine, new: dict[str, Any], of_new: Any, mode: Any, keep_cache: bool
) -> None:
    """Neither of ended requests nor of those that go on with it."""
    outputs(engine)
    # A request that is retracted computes its prompt again, and may share that.
    prompt = PROMPTS[1] if keep_cache else [8] * 20
    running = engine.stream(prompt, {"max_new_tokens": 90, "ignore_eos": True})
    next(running)
    engine.update_weights(new, version="new", mode=mode, keep_cache=keep_cache)
    sampling = {"max_new_tokens": 8, "temperature": 0.0, "ignore_eos": True}
    answers = engine.generate(PROMPTS, sampling, return_logprob=True)
    assert [each.output_ids for each in answers] == of_new[1]
    assert [each.cached_tokens for each in answers] == [0, 0]
    assert [each.weight_versions for each in answers] == [((0, "new"),)] * 2
    assert not any(each.has_old_kv for each in answers)
    *_, last = running
    assert last.has_old_kv == keep_cache
    assert len(last.output_ids) == 90


def test_streams_go_on_over_an_update_and_say_which_tokens_are_of_which_weights(
    engine: Engine, new: dict[str, Any]
) -> None:
    def count(name: str) -> int:
        counted: int = engine.server_info()["counters"][name]
        return counted

    sampling = {"max_new_tokens": 56, "temperature": 0.0, "ignore_eos": True}
    before, retracted = count("generated_tokens"), count("requests_retracted")
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(engine.generate, [[5 + i, 6, 7] for i in range(8)], sampling)
        while count("generated_tokens") < before + 8 * 10:
            assert not ended.done()
        engine.update_weights(new, version="new", keep_cache=True)
        answers = ended.result(60)
    for each in answers:
        (first, _), (start, version) = each.weight_versions
        assert (first, version) == (0, "new")
        assert 8 <= start < 56
        assert len(each.output_ids) == 56
        assert each.has_old_kv
    assert count("requests_retracted") == retracted


def test_a_flush_empties_the_cache_after_every_pause(engine: Engine) -> None:
    for mode in ("in_place", "retract", "abort"):
        whole = engine.generate([PROMPTS[1]], {"max_new_tokens": 90, "ignore_eos": True, "seed": 1})
        stream = engine.stream(PROMPTS[1], {"max_new_tokens": 90, "ignore_eos": True, "seed": 1})
        next(stream)
        engine.pause_generation(mode)
        assert engine.flush_cache()
        assert sum(rank["cached_pages"] for rank in engine.server_info()["ranks"]) == 0
        engine.continue_generation()
        *_, last = stream
        assert mode == "abort" or last.output_ids == whole[0].output_ids


@pytest.mark.parametrize("num_updates", [5, *long(100)])
def test_updates_leave_no_memory_behind(
    engine: Engine, new: dict[str, Any], num_updates: int
) -> None:
    engine.update_weights(new, version="")
    live = [(array.shape, array.dtype) for array in jax.live_arrays()]
    for i in range(num_updates):
        engine.update_weights(new, version=str(i), mode=MODES[i % 2])
    assert len(jax.live_arrays()) == len(live)


@pytest.mark.parametrize(("mode", "num_sets"), [("staged", 2), ("chunked", 1)])
def test_the_peak_is_one_or_two_sets_of_weights(
    engine: Engine, old: dict[str, Any], mode: Any, num_sets: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def live_bytes() -> int:
        return sum(array.nbytes for array in jax.live_arrays() if not array.is_deleted())

    def make(*args: Any) -> Any:
        leaf = usual(*args)
        peaks.append(live_bytes())
        return leaf

    usual, peaks = ArrivingWeights.make, list[int]()
    monkeypatch.setattr(ArrivingWeights, "make", make)
    weight_bytes = engine.info["weight_bytes"]
    before = live_bytes()
    engine.update_weights(old, version="", mode=mode)
    assert max(peaks) - before <= (num_sets - 1 + 0.01) * weight_bytes
    assert max(peaks) - before >= (num_sets - 1) * weight_bytes


@pytest.mark.parametrize("mode", MODES)
def test_a_bad_last_tensor_leaves_the_old_weights_or_stops(
    engine: Engine, old: dict[str, Any], of_new: Any, mode: Any
) -> None:
    of_old = outputs(engine)
    norm = "model.norm.weight"
    bad = {name: own for name, own in old.items() if name != norm} | {norm: old[norm] * np.nan}
    with pytest.raises(InvalidRequestError, match="no finite numbers"):
        engine.update_weights(iter(bad.items()), version="bad", mode=mode)
    assert engine.info["is_paused"] == (mode == "chunked")
    if mode == "chunked":
        with pytest.raises(InvalidRequestError, match="the weights are incomplete"):
            engine.continue_generation()
        engine.release_memory_occupation(["weights"])
        assert all(array.is_deleted() for array in engine._engine.core.executor.weights.arrays)
        engine.update_weights(old, version="good")
    assert outputs(engine) == of_old


@pytest.mark.parametrize("mode", MODES)
def test_a_first_tensor_that_cannot_be_taken_changes_nothing(
    engine: Engine, new: dict[str, Any], of_new: Any, mode: Any
) -> None:
    engine.update_weights(new, version="new")
    with pytest.raises(InvalidRequestError, match="own is unexpected"):
        engine.update_weights({"own": new["model.norm.weight"]}, version="bad", mode=mode)
    assert (engine.info["is_paused"], engine.info["weight_version"]) == (False, "new")
    assert outputs(engine) == of_new[1]


@pytest.mark.parametrize("mode", MODES)
def test_a_refusal_says_what_generation_waits_for(
    engine: Engine, new: dict[str, Any], mode: Any
) -> None:
    """Memory that was released, and weights only if some were deleted."""
    unknown = {"own": new["model.norm.weight"]}
    waits = "generation stays paused until "
    engine.release_memory_occupation(["kv_cache"])
    with pytest.raises(InvalidRequestError, match=f"; {waits}kv_cache is resumed$"):
        engine.update_weights(unknown, version="bad", mode=mode)
    engine.release_memory_occupation(["weights"])
    with pytest.raises(InvalidRequestError, match=f"{waits}an update is complete and kv_cache is"):
        engine.update_weights(unknown, version="bad", mode=mode)
    engine.resume_memory_occupation()
    with pytest.raises(InvalidRequestError, match=f"; {waits}an update is complete$"):
        engine.update_weights(unknown, version="bad", mode=mode)
    with pytest.raises(InvalidRequestError, match="complete an update, then set the label"):
        engine._engine.checked_call(UpdateWeightVersion(new_version="label"))
    engine.update_weights(new, version="new")
    with pytest.raises(InvalidRequestError) as error:
        engine.update_weights(unknown, version="bad", mode=mode)
    assert waits not in str(error.value)


@pytest.mark.parametrize("abort_all_requests", [False, True])
def test_served_weights_may_get_another_label(
    engine: Engine, new: dict[str, Any], abort_all_requests: bool
) -> None:
    """Requests keep their KV and are of both labels, or end; the prefix cache is kept."""
    outputs(engine)
    before = engine._engine.frontend.num_weight_changes
    running = engine.stream([8] * 20, {"max_new_tokens": 90, "ignore_eos": True})
    next(running)
    message = UpdateWeightVersion(new_version="label", abort_all_requests=abort_all_requests)
    assert engine._engine.checked_call(message)["new_version"] == "label"
    assert engine.info["weight_version"] == "label"
    *_, last = running
    if abort_all_requests:
        assert last.finish_reason
        assert last.finish_reason.type == "abort"
        assert last.finish_reason.message == "the label of the weights was changed"
        assert last.weight_versions == ((0, str(GOLDEN)),)
    else:
        (first, _), (start, version) = last.weight_versions
        assert (first, version) == (0, "label")
        assert 0 < start < len(last.output_ids) == 90
        assert not last.has_old_kv
    (again,) = engine.generate([PROMPTS[1]], {"max_new_tokens": 1})
    assert again.cached_tokens == 16
    assert again.weight_versions == ((0, "label"),)
    assert engine._engine.frontend.num_weight_changes == before
    engine.update_weights(new, version="new")


def test_bodies_are_collected_until_nothing_is_missing(
    engine: Engine, new: dict[str, Any], of_new: Any
) -> None:
    """The message of `/update_weights_from_tensor`."""
    of_old, names = outputs(engine), list(new)
    begin = UpdateWeightsFromTensor(tensors={}, weight_version="3")
    assert engine._engine.checked_call(begin)["num_missing"] == len(names)
    for half in (names[::2], names[1::2]):
        assert outputs(engine) == of_old
        body = save({name: new[name] for name in half})
        reply = engine._engine.checked_call(
            UpdateWeightsFromTensor(tensors=body, weight_version="3")
        )
    assert reply == {
        "success": True,
        "message": "serving the weights '3'",
        "num_paused_requests": 0,
    }
    assert outputs(engine) == of_new[1]
    with pytest.raises(InvalidRequestError, match="not a safetensors file"):
        engine._engine.checked_call(UpdateWeightsFromTensor(tensors=b"\x80\x04."))


def test_an_update_that_was_abandoned_is_dropped_by_the_next(
    engine: Engine, old: dict[str, Any], new: dict[str, Any], of_new: Any
) -> None:
    def cut() -> Iterator[tuple[str, Any]]:
        yield from list(old.items())[:3]
        raise RuntimeError("the trainer failed")

    with pytest.raises(RuntimeError, match="the trainer failed"):
        engine.update_weights(cut(), version="same")
    some = dict(list(old.items())[3:])
    with pytest.raises(InvalidRequestError, match="is missing"):
        engine.update_weights(some, version="same")
    engine.update_weights(new, version="same")
    assert outputs(engine) == of_new[1]


def test_memory_is_released_and_comes_back(
    engine: Engine, new: dict[str, Any], of_new: Any
) -> None:
    """Pools first, then weights; requests that come meanwhile run once both are there."""

    def live_bytes() -> int:
        return sum(array.nbytes for array in jax.live_arrays())

    outputs(engine)
    before = live_bytes()
    engine.release_memory_occupation(["kv_cache"])
    after_pools = live_bytes()
    engine.release_memory_occupation()
    assert before - after_pools >= engine.info["kv_pool_bytes"]
    assert after_pools - live_bytes() == engine.info["weight_bytes"]
    with ThreadPoolExecutor(1) as pool:
        answering = pool.submit(outputs, engine)
        engine.resume_memory_occupation(["weights"])
        engine.update_weights(new, version="new")
        assert engine.info["is_paused"]
        engine.resume_memory_occupation(["kv_cache"])
        assert answering.result(60) == of_new[1]
    assert live_bytes() == before
    assert engine.server_info()["counters"]["step_failures"] == 0


def test_a_pause_that_ends_before_the_memory_is_back_ends_with_its_return(
    engine: Engine, new: dict[str, Any], of_new: Any
) -> None:
    """The order of trainers that share the devices."""
    outputs(engine)
    engine.release_memory_occupation()
    engine.resume_memory_occupation(["weights"])
    engine.pause_generation("abort")
    assert engine.flush_cache()
    with pytest.raises(InvalidRequestError, match="the weights are incomplete"):
        engine.continue_generation()
    engine.update_weights(new, version="new")
    engine.continue_generation()
    assert engine.info["is_paused"]
    engine.resume_memory_occupation(["kv_cache"])
    assert not engine.info["is_paused"]
    engine.release_memory_occupation(["cuda_graph"])
    assert outputs(engine) == of_new[1]
    engine.resume_memory_occupation(["cuda_graph"])


def test_an_aborted_rollout_goes_on_with_the_same_tokens(engine: Engine) -> None:
    prompts = [[5 + i, 6, 7] for i in range(8)]
    whole = {"temperature": 1.0, "max_new_tokens": 56, "ignore_eos": True}
    seeds = [whole | {"seed": i} for i in range(8)]
    expected = engine.generate(prompts, seeds, return_logprob=True)
    before = engine.server_info()["counters"]["generated_tokens"]
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(engine.generate, prompts, seeds, return_logprob=True)
        while engine.server_info()["counters"]["generated_tokens"] < before + 8 * 20:
            assert not ended.done()
        engine.pause_generation("abort")
        parts = ended.result(60)
    engine.continue_generation()
    assert {each.finish_reason and each.finish_reason.type for each in parts} == {"abort"}
    assert all(len(each.output_ids) == len(each.logprobs) > 0 for each in parts)
    resent = [[*prompt, *own.output_ids] for prompt, own in zip(prompts, parts, strict=True)]
    rest = [
        own | {"max_new_tokens": 56 - len(part.output_ids)}
        for own, part in zip(seeds, parts, strict=True)
    ]
    for one, part, last in zip(expected, parts, engine.generate(resent, rest), strict=True):
        assert part.output_ids + last.output_ids == one.output_ids


def test_messages_that_wait_for_the_thread_together_are_answered_in_turn(
    engine: Engine, new: dict[str, Any], of_new: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first is answered while the thread makes the last parameters."""

    def make(*args: Any) -> Any:
        made.append(args)
        if len(made) == 1:
            until(lambda: len(stagings) == 2, "both wait")
        if len(made) == len(first) + 2:
            assert is_answered.wait(20)
        return usual(*args)

    usual, made, is_answered = ArrivingWeights.make, list[Any](), threading.Event()
    stagings = engine._engine.core._controls.updates.stagings
    first = {name: own for name, own in new.items() if "layers" not in name}
    last = {name: own for name, own in new.items() if "layers" in name}
    monkeypatch.setattr(ArrivingWeights, "make", make)
    with ThreadPoolExecutor(2) as pool:
        replies = []
        for own in (first, last):
            message = UpdateWeightsFromTensor(tensors=own, weight_version="3")
            replies.append(pool.submit(engine._engine.checked_call, message))
            until(lambda: stagings, "the first waits")
        replies[0].add_done_callback(lambda _: is_answered.set())
        answers = [each.result(60) for each in replies]
    assert [each.get("num_missing") for each in answers] == [len(last), None]
    assert outputs(engine) == of_new[1]


@pytest.mark.long
def test_a_deleted_draft_layer_must_come_again(tmp_path: Path) -> None:
    """Otherwise an update may have its tensors alone, or lack them."""
    folder = write_checkpoint(tmp_path, random_weights())
    with TensorFiles(folder) as files:
        tensors = {name: files.read(name, ()) for name in files.shapes}
    drafts = {name: own for name, own in tensors.items() if name.startswith("mtp.")}
    model = {name: own for name, own in tensors.items() if name not in drafts}
    drafting = {"speculative_algorithm": "MTP", "speculative_num_draft_tokens": 3}
    sizes = {"context_length": 64, "max_total_tokens": 256, "chunked_prefill_size": 32}
    sizes["max_running_requests"] = 2
    with Engine(str(folder), device="cpu", warmup="none", **sizes, **drafting) as engine:
        engine.update_weights(drafts, version="1", mode="chunked")
        assert not engine.info["is_paused"]
        bad = UpdateWeightsFromTensor(tensors={"own": drafts["mtp.norm.weight"]}, mode="chunked")
        begin = UpdateWeightsFromTensor(tensors=drafts, mode="chunked", is_last=False)
        engine._engine.checked_call(begin)
        with pytest.raises(InvalidRequestError, match="own is unexpected"):
            engine._engine.checked_call(bad)
        with pytest.raises(InvalidRequestError, match="mtp"):
            engine.update_weights(model, version="2")
        assert engine.info["is_paused"]
        engine.update_weights(tensors, version="2")
        assert not engine.info["is_paused"]
        outputs(engine)


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_pause_while_memory_is_released_lasts(engine: Engine, is_cancelled: bool) -> None:
    engine.release_memory_occupation(["kv_cache"])
    rid = engine._engine.frontend.call(PauseGeneration(), lambda _: None)
    engine.resume_memory_occupation(["weights"])
    if is_cancelled:
        engine._engine.frontend._send(CancelCall(call=rid))
    engine.resume_memory_occupation()
    assert engine.info["is_paused"] != is_cancelled
    if not is_cancelled:
        engine.continue_generation()
    outputs(engine)


def test_an_engine_without_memory_ends_as_usual(caplog: pytest.LogCaptureFixture) -> None:
    sizes = {"context_length": 64, "max_total_tokens": 256}
    with Engine(model_path=str(GOLDEN), device="cpu", warmup="none", **sizes) as engine:
        engine.release_memory_occupation()
    assert "the engine ended" not in caplog.text
    assert not hasattr(engine._engine.core.executor, "weights")
