"""Updates of a model of 163 million parameters: memory, compilations, and streams meanwhile."""

import gc
import json
import resource
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from sgl_jax import Engine

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]
DEMO = Path(__file__).parents[2] / "models" / "demo"
NUM_LAYERS = 12
SHAPE = {
    "vocab_size": 32000,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "head_dim": 64,
    "layer_types": ["full_attention"] * NUM_LAYERS,
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("model")
    config = json.loads((DEMO / "config.json").read_text()) | SHAPE
    (folder / "config.json").write_text(json.dumps(config))
    settings: dict[str, Any] = {
        "load_format": "dummy",
        "tokenizer_path": str(DEMO),
        "context_length": 512,
        "max_running_requests": 8,
        "max_total_tokens": 4096,
        "dtype": "float32",
        "device": "cpu",
        "warmup": "none",
    }
    with Engine(str(folder), **settings) as engine:
        yield engine


@pytest.fixture(scope="module")
def weights(engine: Engine) -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    return {
        name: jax.device_put(rng.standard_normal(shape, np.float32) * 0.02)
        for name, shape in engine.weight_shapes.items()
        if name != "lm_head.weight"
    }


def live_bytes() -> int:
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


@pytest.mark.parametrize("mode", ["staged", "chunked"])
def test_a_hundred_updates_keep_memory_flat_and_compile_nothing(
    engine: Engine, weights: dict[str, jax.Array], mode: Any
) -> None:
    assert sum(array.nbytes for array in weights.values()) > 500 << 20
    sampling = {"max_new_tokens": 2, "temperature": 0.0, "ignore_eos": True}

    def update(version: int) -> None:
        engine.update_weights(weights, version=str(version), mode=mode)
        (result,) = engine.generate([[5, 6, 7]], sampling)
        assert [name for _, name in result.weight_versions] == [str(version)]

    for number in range(5):
        update(number)
    before, peak = live_bytes(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    compiled = engine.server_info()["counters"]["compiles_after_ready"]
    for number in range(5, 105):
        update(number)
    assert live_bytes() == before
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 1.05 * peak
    assert engine.server_info()["counters"]["compiles_after_ready"] == compiled


def test_streams_go_on_with_no_gap_longer_than_an_update(
    engine: Engine, weights: dict[str, jax.Array]
) -> None:
    times: list[list[float]] = [[] for _ in range(8)]
    versions: set[str] = set()

    def read(index: int) -> None:
        sampling = {"max_new_tokens": 120, "temperature": 1.0, "ignore_eos": True, "seed": index}
        for each in engine.stream([5, 6, 7, index], sampling):
            times[index].append(time.perf_counter())
            versions.update(name for _, name in each.weight_versions)

    engine.update_weights(weights, version="before")
    readers = [threading.Thread(target=read, args=(index,)) for index in range(8)]
    for reader in readers:
        reader.start()
    while min(map(len, times)) < 10:
        time.sleep(0.01)
    gaps, updates = [], []
    for number in range(5):
        begin = time.perf_counter()
        engine.update_weights(weights, version=f"new {number}", keep_cache=True)
        end = time.perf_counter()
        num_tokens = [len(own) for own in times]
        while any(len(own) == count for own, count in zip(times, num_tokens, strict=True)):
            time.sleep(0.01)
        updates.append(end - begin)
        gaps.append(max(_longest_gap(own, begin, end) for own in times))
    for reader in readers:
        reader.join()
    print("gaps", np.round(gaps, 3), "updates", np.round(updates, 3))
    assert versions == {"before", *(f"new {number}" for number in range(5))}
    assert all(map(float.__le__, gaps, updates))


def _longest_gap(times: list[float], begin: float, end: float) -> float:
    """The longest time between two tokens of a stream that overlaps with [begin, end]."""
    at = np.array(times)
    overlaps = (at[1:] >= begin) & (at[:-1] <= end)
    return float(np.diff(at)[overlaps].max())
