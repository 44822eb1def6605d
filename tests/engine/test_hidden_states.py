"""The last hidden states of prompts, as transformers computes them, however the work is cut up."""

from typing import Any

import numpy as np
import pytest

from sgl_jax.core.errors import InvalidRequestError
from sgl_jax.engine.offline import Engine
from tests.engine.retracting_engine import retracting_engine
from tests.models.golden_server import GOLDEN, TOLERANCE

FOLDER = GOLDEN / "qwen3"
PROMPT_ONLY = {"max_new_tokens": 0}
VARIANTS: dict[str, dict[str, Any]] = {
    "two ranks": {"dp_size": 2},
    "two chips": {"tp_size": 2},
    "shared hidden states": {"tp_size": 2, "hidden_sharding": "tensor"},
    "no overlap": {"disable_overlap_schedule": True, "page_size": 1},
    "drafts": {"speculative_algorithm": "NGRAM"},
    "several steps": {"num_decode_steps": "4"},
    "programs in the background": {"warmup": "staged"},
}


def make_engine(**settings: Any) -> Engine:
    return retracting_engine(FOLDER, **settings)


def check_embeddings(engine: Engine) -> None:
    """Each alone and all together, from an empty cache and again from a full one."""
    stored = np.load(FOLDER / "embeddings.npz")
    prompts = [
        part.tolist() for part in np.split(stored["prompts"], np.cumsum(stored["lens"])[:-1])
    ]
    whole = engine.generate(prompts, PROMPT_ONLY, return_hidden=True)
    again = engine.generate(prompts, PROMPT_ONLY, return_hidden=True)
    mixed = [
        engine.generate([prompt, prompt[:9]], PROMPT_ONLY, return_hidden=True)[0]
        for prompt in prompts
    ]
    for results in (whole, again, mixed):
        for result, expected in zip(results, stored["embeddings"], strict=True):
            assert result.hidden is not None
            embedding = result.hidden / np.linalg.norm(result.hidden)
            np.testing.assert_allclose(embedding, expected, rtol=0, atol=TOLERANCE)
            assert result.output_ids == []
    assert again[-1].cached_tokens == 60
    assert engine.server_info()["counters"]["compiles_after_ready"] == 0


def test_they_are_those_of_transformers() -> None:
    with make_engine() as engine:
        check_embeddings(engine)
        with pytest.raises(InvalidRequestError, match="needs max_new_tokens 0"):
            engine.generate([[3, 4]], {"max_new_tokens": 1}, return_hidden=True)


@pytest.mark.long
@pytest.mark.parametrize("settings", VARIANTS.values(), ids=VARIANTS)
def test_every_setting_gives_the_same(settings: dict[str, Any]) -> None:
    with make_engine(**settings) as engine:
        check_embeddings(engine)
