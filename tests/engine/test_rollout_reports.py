"""Defects that users of other engines reported about weights that change under a rollout."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sgl_jax import Engine
from sgl_jax.checkpoint.tensor_files import TensorFiles
from tests.support.waiting import until

GOLDEN = Path(__file__).parents[1] / "golden" / "qwen3"
PROMPTS = [[5 + i, 6, 7] for i in range(4)]
SAMPLING = {"max_new_tokens": 90, "temperature": 1.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def weights() -> dict[str, np.ndarray]:
    with TensorFiles(GOLDEN) as files:
        return {name: files.read(name, ()) for name in files.shapes}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    sizes = {"context_length": 128, "max_total_tokens": 512, "max_running_requests": 4}
    with Engine(str(GOLDEN), device="cpu", page_size=4, **sizes) as engine:
        yield engine


def paused(engine: Engine, pool: ThreadPoolExecutor, mode: Any) -> Any:
    """Start a rollout, pause the engine in the middle of it, and return the future results."""
    seeds = [SAMPLING | {"seed": i} for i in range(4)]
    before = engine.server_info()["counters"]["generated_tokens"]
    ended = pool.submit(engine.generate, PROMPTS, seeds, return_logprob=True)
    while engine.server_info()["counters"]["generated_tokens"] < before + 40:
        assert not ended.done()
    engine.pause_generation(mode)
    return ended


@pytest.mark.parametrize("mode", ["staged", "chunked"])
@pytest.mark.parametrize("pause", ["in_place", "retract", "abort"])
def test_weights_change_while_generation_is_paused(
    engine: Engine, weights: dict[str, np.ndarray], pause: Any, mode: Any
) -> None:
    """The update neither waits for the requests nor ends the pause."""
    engine.update_weights(weights, version="old")
    with ThreadPoolExecutor(1) as pool:
        ended = paused(engine, pool, pause)
        engine.update_weights(weights, version="new", mode=mode)
        assert engine.info["is_paused"]
        assert engine.flush_cache()
        engine.continue_generation()
        results = ended.result(60)
    for each in results:
        assert each.finish_reason
        assert each.finish_reason.type == ("abort" if pause == "abort" else "length")
        assert each.weight_versions[0] == (0, "old")
        assert each.weight_versions[-1][1] == ("old" if pause == "abort" else "new")
        assert len(each.logprobs) == len(each.output_ids)


@pytest.mark.parametrize("pause", ["in_place", "retract"])
def test_requests_aborted_while_they_wait_return_what_they_have(
    engine: Engine, weights: dict[str, np.ndarray], pause: Any
) -> None:
    """Those without tokens name the weights that they would have been of."""
    engine.update_weights(weights, version="old")
    with ThreadPoolExecutor(2) as pool:
        ended = paused(engine, pool, pause)
        waiting = pool.submit(engine.generate, [[9, 9]], SAMPLING)
        until(lambda: engine._engine.frontend.num_open == 5, "it waits")
        engine.pause_generation("abort")
        results, (empty,) = ended.result(60), waiting.result(60)
    engine.continue_generation()
    for each in results:
        assert len(each.output_ids) >= 1
        assert len(each.logprobs) == len(each.output_ids)
        assert each.finish_reason.type == "abort"
    assert (empty.output_ids, empty.weight_versions) == ([], ((0, "old"),))


def test_the_same_weights_again_give_the_same_tokens(
    engine: Engine, weights: dict[str, np.ndarray]
) -> None:
    """After memory was released in each order of tags, and after a refused update."""
    sampling = SAMPLING | {"seed": 1, "max_new_tokens": 20}
    bad = {name: own * np.nan for name, own in weights.items()}
    (expected,) = engine.generate(PROMPTS[:1], sampling)
    for tags in (["weights"], ["kv_cache", "weights"], ["weights", "kv_cache"]):
        for tag in tags:
            engine.release_memory_occupation([tag])
        for tag in reversed(tags):
            engine.resume_memory_occupation([tag])
        with pytest.raises(ValueError, match="no finite numbers"):
            engine.update_weights(bad, version="bad")
        engine.update_weights(weights, version="again", mode="chunked")
        (found,) = engine.generate(PROMPTS[:1], sampling)
        assert found.output_ids == expected.output_ids
        assert found.cached_tokens == 0
