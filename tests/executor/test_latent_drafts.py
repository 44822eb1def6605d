"""Drafts of DeepSeek V3's own next layer: a plain layer's, whatever the mesh."""

import numpy as np
import pytest

from sgl_jax.models.config import ModelConfig, ModelConfigError
from tests.executor.draft_checks import (
    GREEDY,
    RANDOM,
    check_drafts,
    check_draws,
    check_same_tokens,
)
from tests.executor.test_layer_drafts import DRAFTING
from tests.models.latent_draft_reference import (
    QUANTIZED,
    REUSING,
    SPARSE,
    LatentDraftReference,
    write_drafting_checkpoint,
    write_markov_checkpoint,
)
from tests.support.long import long

pytestmark = pytest.mark.usefixtures("few_shapes")


@pytest.fixture(scope="session")
def latent_model(tmp_path_factory):
    return write_drafting_checkpoint(tmp_path_factory.mktemp("latent"))


@pytest.fixture
def make(make_executor, latent_model):
    def make(**overrides):
        settings = {
            "model_path": str(latent_model),
            "load_format": "safetensors",
            "context_length": 64,
        }
        return make_executor(**settings | overrides)

    return make


@pytest.mark.parametrize(
    "settings",
    [
        {},
        *long(
            {"page_size": 1},
            {"dp_size": 2, "ep_size": 2},
            {"tp_size": 2},
            {"tp_size": 2, "hidden_sharding": "tensor"},
        ),
    ],
    ids=str,
)
def test_drafts_are_those_of_the_plain_layer(make, latent_model, settings):
    reference = LatentDraftReference(latent_model)
    assert check_drafts(make(**DRAFTING | settings), reference, 7) > 15


@pytest.mark.long
def test_drafts_of_a_model_without_latents_of_queries(make, tmp_path):
    folder = write_drafting_checkpoint(tmp_path, query_latents=False)
    executor = make(model_path=str(folder), **DRAFTING)
    assert check_drafts(executor, LatentDraftReference(folder), 7) > 15


@pytest.mark.long
@pytest.mark.parametrize("settings", [{}, {"dp_size": 2, "ep_size": 2}, {"tp_size": 2}], ids=str)
def test_a_draft_layer_in_fp8_blocks_drafts_as_its_numbers_say(make_executor, tmp_path, settings):
    folder = write_drafting_checkpoint(tmp_path, QUANTIZED)
    executor = make_executor(
        model_path=str(folder), load_format="safetensors", context_length=64, **DRAFTING, **settings
    )
    assert check_drafts(executor, LatentDraftReference(folder), 7) > 15


@pytest.mark.long
@pytest.mark.parametrize("source", [SPARSE, REUSING], ids=lambda own: own.name)
@pytest.mark.parametrize("settings", [{}, {"page_size": 1, "tp_size": 2}], ids=str)
def test_a_draft_layer_with_an_indexer_drafts_as_its_numbers_say(make, tmp_path, settings, source):
    folder = write_drafting_checkpoint(tmp_path, source)
    executor = make(model_path=str(folder), **DRAFTING, **settings)
    reference = LatentDraftReference(folder)
    assert check_drafts(executor, reference, 7) > 15
    plain = make(model_path=str(folder), **settings)
    check_same_tokens(plain, executor, GREEDY)


@pytest.mark.parametrize("sampling", long(GREEDY, RANDOM), ids=["greedy", "random"])
def test_drafts_change_no_token(make, sampling):
    check_same_tokens(make(), make(**DRAFTING), sampling)


@pytest.mark.long
@pytest.mark.parametrize("num_draws", [3_000, 100_000])
def test_draws_with_drafts_are_of_the_models_distribution(make, tmp_path, num_draws):
    folder = write_markov_checkpoint(tmp_path, num_tokens=12)
    executor = make(model_path=str(folder), **DRAFTING)
    reference = LatentDraftReference(folder)
    logits = np.array([(reference.hidden([own]) @ reference.head)[0] for own in range(12)])
    assert 1.1 < check_draws(executor, logits, 0.8, num_draws) < 3.5


def test_memory_of_the_draft_layer_is_one_more_layer(make):
    pools = [make(**own)._state.kv_pools for own in ({}, DRAFTING)]
    assert [pool.shape[0] for (pool,) in pools] == [5, 6]


def test_a_checkpoint_that_brings_no_draft_layer_is_refused():
    config = ModelConfig.from_path("sgl_jax/planner/models/kimi-k2.json")
    with pytest.raises(ModelConfigError, match="has no draft layer for --speculative-algorithm"):
        config.drafting()
