"""The experts of each token, as a float64 router chooses them, however the work is cut up."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sgl_jax.core.errors import InvalidRequestError
from sgl_jax.engine.loop import core
from sgl_jax.engine.offline import Engine
from sgl_jax.engine.offline_results import Generation
from tests.engine.retracting_engine import retracting_engine
from tests.models.golden_server import GOLDEN
from tests.models.qwen3_moe_reference import Qwen3MoeReference

FAMILY = GOLDEN / "qwen3_moe"
UNLIKE_LAYERS = GOLDEN / "qwen3_moe_mixed"  # with and without experts
VARIANTS: dict[str, dict[str, Any]] = {
    "two ranks": {"dp_size": 2},
    "two chips": {"tp_size": 2},
    "distributed experts": {"tp_size": 2, "ep_size": 2},
    "experts over ranks": {"dp_size": 2, "ep_size": 2},
    "copies": {"tp_size": 2, "ep_size": 2, "ep_num_redundant_experts": 3},
    "shared hidden states": {"tp_size": 2, "hidden_sharding": "tensor"},
    "no overlap": {"disable_overlap_schedule": True, "page_size": 1},
    "drafts": {"speculative_algorithm": "NGRAM"},
    "several steps": {"num_decode_steps": "4"},
    "host memory": {"enable_hierarchical_cache": True, "hicache_ratio": 2.0},
    "invariant": {"enable_deterministic_inference": True},
}
PROMPTS = [np.random.default_rng(5).integers(3, 240, n).tolist() for n in (45, 3, 30)]


def make_engine(family: Path = FAMILY, **settings: Any) -> Engine:
    return retracting_engine(family, **{"enable_return_routed_experts": True} | settings)


def check_routing(
    model: Qwen3MoeReference, prompt: list[int], result: Generation, start: int = 0
) -> None:
    experts, margins = model.routing((prompt + result.output_ids)[:-1])
    assert result.routed_experts is not None
    assert result.routed_experts.shape == experts[start:].shape
    is_clear = margins > 1e-4
    assert is_clear.mean() > 0.99
    reported = np.sort(result.routed_experts, axis=2)
    np.testing.assert_array_equal(reported[is_clear[start:]], experts[start:][is_clear[start:]])


def check_engine(engine: Engine, family: Path = FAMILY) -> None:
    """From an empty cache, from a full one, and from a position on."""
    model = Qwen3MoeReference(family)
    sampling = {"max_new_tokens": 20, "temperature": 0.0, "ignore_eos": True}
    for _ in range(2):
        results = engine.generate(PROMPTS, sampling, return_routed_experts=True)
        for prompt, result in zip(PROMPTS, results, strict=True):
            assert result.cached_tokens == 0
            check_routing(model, prompt, result)
    starts = [45, 2, 17]
    results = engine.generate(
        PROMPTS, sampling, return_routed_experts=True, routed_experts_start_len=starts
    )
    for prompt, result, start in zip(PROMPTS, results, starts, strict=True):
        check_routing(model, prompt, result, start)
    assert [result.cached_tokens // 16 for result in results] == [2, 0, 1]
    assert engine.generate([[3]], sampling)[0].routed_experts is None


def test_they_are_those_of_a_float64_router(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "_MAX_VALUES_BYTES", 100)  # a message for each request
    with make_engine() as engine:
        check_engine(engine)
        with pytest.raises(InvalidRequestError, match=r"\[0, 2\], got 3"):
            engine.generate([[3, 4]], return_routed_experts=True, routed_experts_start_len=3)


def test_models_and_settings_without_them_are_refused_with_the_reason() -> None:
    for folder, reason in ((GOLDEN / "qwen3", "no experts"), (FAMILY, "--enable-return-routed")):
        with (
            make_engine(folder, enable_return_routed_experts=False) as engine,
            pytest.raises(InvalidRequestError, match=reason),
        ):
            engine.generate([[3, 4]], return_routed_experts=True)
    with pytest.raises(ValueError, match="--enable-return-routed-experts needs a model with exp"):
        make_engine(GOLDEN / "qwen3")


@pytest.mark.long
def test_layers_without_experts_have_zeros() -> None:
    with make_engine(UNLIKE_LAYERS) as engine:
        check_engine(engine, UNLIKE_LAYERS)


@pytest.mark.long
@pytest.mark.parametrize("settings", VARIANTS.values(), ids=VARIANTS)
def test_every_setting_gives_the_same(settings: dict[str, Any]) -> None:
    with make_engine(**settings) as engine:
        check_engine(engine)
