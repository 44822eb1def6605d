"""The tokens that an indexer chooses in bfloat16 are those of float64, but for a few."""

import numpy as np
import pytest

from benchmarks.kernels.index_recall import (
    INPUTS,
    Problem,
    choose_in_bfloat16,
    greatest,
    measure,
)
from tests.models.latent_draft_reference import REUSING, SPARSE, LatentDraftReference


@pytest.mark.parametrize(
    ("inputs", "context", "top_k"),
    [
        ("correlated", 1024, 256),
        *(
            pytest.param(name, context, 2048, marks=pytest.mark.long)
            for name in INPUTS
            for context in (4096, 65536)
        ),
    ],
)
def test_rounding_changes_few_of_the_chosen_tokens_and_attention_little(inputs, context, top_k):
    rng = np.random.default_rng(0)
    found = measure(INPUTS[inputs](rng, 2, context), rng, top_k)
    print(found)
    assert found.float8_keys < found.bfloat16
    assert found.bfloat16 > 0.985
    assert found.error < 0.1


@pytest.mark.parametrize("source", [SPARSE, REUSING], ids=lambda own: own.name)
def test_the_choice_of_a_checkpoints_activations_is_kept(source):
    """Its queries and keys of 256 tokens, as the first layer computes them in float64."""
    model, tokens = LatentDraftReference(source), np.arange(256) * 7 % 128
    name = "model.layers.0.self_attn"
    x = model.norm("model.layers.0.input_layernorm", model.embedding[tokens])
    latent = model.norm(f"{name}.q_a_layernorm", model.project(f"{name}.q_a_proj", x))
    queries, weights, keys = model.indexer(f"{name}.indexer", x, latent, range(256))
    top_k, last = model.config["index_topk"], slice(-64, None)
    problem = Problem(queries[last], weights[last], keys)
    right, found = greatest(problem.scores(), top_k), choose_in_bfloat16(problem, top_k)
    shares = [len(np.intersect1d(*pair)) / top_k for pair in zip(right, found, strict=True)]
    print(np.mean(shares))
    assert np.mean(shares) > 0.97
