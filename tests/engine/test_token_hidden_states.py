"""The hidden state of each token, as transformers computes it, however the work is cut up."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from sgl_jax.core.errors import InvalidRequestError
from sgl_jax.engine.front import request_checks
from sgl_jax.engine.loop import core
from sgl_jax.engine.offline import Engine
from tests.engine.retracting_engine import retracting_engine
from tests.models.golden_server import GOLDEN, TOLERANCE

DENSE, EXPERTS = GOLDEN / "qwen3", GOLDEN / "qwen3_moe"
VARIANTS: dict[str, tuple[Path, dict[str, Any]]] = {
    "two ranks": (DENSE, {"dp_size": 2}),
    "two chips": (DENSE, {"tp_size": 2}),
    "shared hidden states": (DENSE, {"tp_size": 2, "hidden_sharding": "tensor"}),
    "no overlap": (DENSE, {"disable_overlap_schedule": True, "page_size": 1}),
    "drafts": (DENSE, {"speculative_algorithm": "NGRAM"}),
    "several steps": (DENSE, {"num_decode_steps": "4"}),
    "host memory": (DENSE, {"enable_hierarchical_cache": True, "hicache_ratio": 2.0}),
    "invariant": (DENSE, {"enable_deterministic_inference": True}),
    "experts": (EXPERTS, {"enable_return_routed_experts": True}),
    "several steps of experts": (
        EXPERTS,
        {"num_decode_steps": "4", "enable_return_routed_experts": True},
    ),
    "recurrent states": (GOLDEN / "qwen3_5", {}),
    "windows": (GOLDEN / "qwen2_windows", {}),
    "latents": (GOLDEN / "deepseek_v3", {}),
}
GREEDY = {"max_new_tokens": 16, "temperature": 0.0, "ignore_eos": True}


def make_engine(family: Path = DENSE, **settings: Any) -> Engine:
    return retracting_engine(family, **{"enable_return_hidden_states": True} | settings)


def logits_of(family: Path) -> Callable[[np.ndarray], np.ndarray]:
    """The model's last product. Its matrix has full rank: equal logits are equal states."""
    weights = load_file(family / "model.safetensors")
    name = "lm_head.weight" if "lm_head.weight" in weights else "model.embed_tokens.weight"
    head = next(own for key, own in weights.items() if key.endswith(name)).astype(np.float32)
    assert np.linalg.matrix_rank(head) == head.shape[1]
    return lambda states: states @ head.T


def check_engine(engine: Engine, family: Path = DENSE, *, has_experts: bool = False) -> None:
    """From an empty cache and from a full one, next to beginnings of the prompt."""
    stored, logits = np.load(family / "golden.npz"), logits_of(family)
    prompt, greedy = stored["prompt"].tolist(), stored["greedy"].tolist()
    expected = np.concatenate([stored["prompt_logits"], stored["greedy_logits"][1:]])
    options: dict[str, Any] = {"return_hidden_states": True}
    if has_experts:
        options |= {"return_routed_experts": True, "routed_experts_start_len": [5, 0, 1, 0]}
    for _ in range(2):
        whole, *parts = engine.generate(
            [prompt, prompt[:9], prompt[:30], prompt[:1]], GREEDY, **options
        )
        assert whole.output_ids == greedy
        assert whole.cached_tokens == 0
        assert whole.hidden_states is not None
        assert whole.hidden_states.dtype == np.float32
        np.testing.assert_allclose(logits(whole.hidden_states), expected, rtol=0, atol=TOLERANCE)
        for result, num_tokens in zip(parts, (9, 30, 1), strict=True):
            assert result.hidden_states is not None
            assert len(result.hidden_states) == num_tokens + 15
            own = logits(result.hidden_states[:num_tokens])
            np.testing.assert_allclose(own, expected[:num_tokens], rtol=0, atol=TOLERANCE)
        if has_experts:
            assert whole.routed_experts is not None
            assert len(whole.routed_experts) == len(expected) - 5
    (prompt_only,) = engine.generate([prompt], {"max_new_tokens": 0}, return_hidden_states=True)
    assert prompt_only.hidden_states is not None
    own = logits(prompt_only.hidden_states)
    np.testing.assert_allclose(own, expected[: len(prompt)], rtol=0, atol=TOLERANCE)
    assert engine.generate([prompt], GREEDY)[0].hidden_states is None


def test_they_are_those_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "_MAX_VALUES_BYTES", 100)  # a message for each request
    with make_engine() as engine:
        check_engine(engine)
        monkeypatch.setattr(request_checks, "_MOST_HIDDEN_NUMBERS", 3 * 64)
        with pytest.raises(InvalidRequestError, match="of at most 3 tokens, not of up to 4"):
            engine.generate([[3, 4, 5, 6]], return_hidden_states=True)


def test_engines_without_the_flag_refuse_them() -> None:
    with (
        make_engine(enable_return_hidden_states=False) as engine,
        pytest.raises(InvalidRequestError, match="--enable-return-hidden-states"),
    ):
        engine.generate([[3, 4]], return_hidden_states=True)


@pytest.mark.long
@pytest.mark.parametrize(("family", "settings"), VARIANTS.values(), ids=VARIANTS)
def test_every_setting_gives_the_same(family: Path, settings: dict[str, Any]) -> None:
    with make_engine(family, **settings) as engine:
        has_experts = "enable_return_routed_experts" in settings
        check_engine(engine, family, has_experts=has_experts)


@pytest.mark.long
def test_states_of_bfloat16_are_exact() -> None:
    """Each is a number of bfloat16, so an answer loses no digit."""
    with make_engine(dtype="bfloat16") as engine:
        (result,) = engine.generate([[3, 4, 5]], GREEDY, return_hidden_states=True)
    assert result.hidden_states is not None
    assert not (result.hidden_states.view(np.uint32) & 0xFFFF).any()
    assert np.abs(result.hidden_states).max() > 0.1
