"""Drafts of a model's own draft layer: a plain layer's, whatever the mesh; they change no token."""

import numpy as np
import pytest

from sgl_jax.checkpoint.convert import convert
from sgl_jax.checkpoint.errors import CheckpointError
from sgl_jax.executor.model_executor import ModelExecutor
from tests.executor.draft_checks import (
    GREEDY,
    PROMPTS,
    RANDOM,
    check_drafts,
    check_draws,
    check_same_tokens,
    rows,
)
from tests.executor.step_driver import Driver, Row
from tests.models.draft_reference import (
    DraftReference,
    markov_weights,
    random_weights,
    write_checkpoint,
)
from tests.support.long import long

pytestmark = pytest.mark.usefixtures("few_shapes")

DRAFTING = {"speculative_algorithm": "MTP", "speculative_num_draft_tokens": 3}


@pytest.fixture(scope="session")
def random_model(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("random"), random_weights())


@pytest.fixture(scope="session")
def markov_model(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("markov"), markov_weights())


@pytest.fixture
def make(make_executor):
    def make(folder, **overrides):
        settings = {"model_path": str(folder), "load_format": "safetensors"}
        return make_executor(**settings | overrides)

    return make


@pytest.mark.parametrize(
    "settings",
    [
        {},
        *long(
            {"page_size": 1},
            {"dp_size": 2},
            {"tp_size": 2},
            {"tp_size": 2, "hidden_sharding": "tensor"},
            {"dp_size": 2, "tp_size": 2, "weight_sharding": "data"},
            {"speculative_algorithm": "NEXTN", "speculative_num_draft_tokens": 1},
        ),
    ],
    ids=str,
)
def test_drafts_are_those_of_the_plain_layer(make, random_model, settings):
    reference = DraftReference(random_weights())
    assert check_drafts(make(random_model, **DRAFTING | settings), reference, 9) > 20


@pytest.mark.long
@pytest.mark.parametrize(
    "case",
    [
        (RANDOM, {"dp_size": 2}, False),
        *long(
            (GREEDY, {}, True),
            (GREEDY, {"tp_size": 2}, False),
            (RANDOM, {}, True),
            (RANDOM, {"page_size": 16}, False),
        ),
    ],
    ids=lambda own: f"{own[0].temperature}-{own[1]}",
)
def test_drafts_change_no_token(make, random_model, case):
    sampling, settings, overlap = case
    drafting = make(random_model, **DRAFTING | settings)
    check_same_tokens(make(random_model), drafting, sampling, overlap=overlap)


@pytest.mark.parametrize("sampling", [GREEDY, RANDOM], ids=["greedy", "random"])
def test_drafts_of_the_models_own_distribution_are_all_accepted(make, markov_model, sampling):
    """Also at random: a draft is drawn with the noise of the token that verifies it."""
    executor = make(markov_model, **DRAFTING)
    prompts = PROMPTS[::2]
    driver = Driver(executor, rows(1, sampling, prompts), num_drafts=3)
    assert [len(output) for output in driver.run(8)] == [1 + 7 * 4] * 2
    plain = Driver(make(markov_model), rows(1, sampling, prompts)).run(29)
    assert [row.output for row in driver.rows] == plain


def test_a_row_at_the_end_of_its_context_drafts_what_fits(make, markov_model):
    executor = make(markov_model, **DRAFTING)
    (row,) = rows(prompts=[np.random.default_rng(1).integers(0, 90, 50).tolist()])
    (output,) = Driver(executor, [row], num_drafts=3).run(12, overlap=False)
    plain = Driver(make(markov_model), [Row(0, 1, list(row.prompt), seed=7)])
    assert output == plain.run(6 + len(output))[0]
    assert len(output) >= 14


@pytest.mark.parametrize("num_draws", long(3_000, 100_000), ids=str)
def test_draws_with_drafts_are_of_the_models_distribution(make, tmp_path, num_draws):
    """Some drafts are right, and some are wrong."""
    vocab_size = 12
    weights = markov_weights(vocab_size=vocab_size)
    rng = np.random.default_rng(1)
    weights["mtp.fc.weight"] += rng.normal(0, 0.1, weights["mtp.fc.weight"].shape)
    executor = make(write_checkpoint(tmp_path, weights, eos_token_id=0), **DRAFTING)
    logits = DraftReference(weights).logits(np.arange(vocab_size))
    assert 1.1 < check_draws(executor, logits, 0.8, num_draws) < 3.5


def test_memory_of_the_draft_layer_is_one_more_layer(make, random_model):
    pools = [make(random_model, **own)._state.kv_pools for own in ({}, DRAFTING)]
    assert [len(pool) for (pool,) in pools] == [2, 3]


@pytest.mark.long
def test_a_converted_checkpoint_drafts_the_same(make, markov_model, tmp_path):
    convert(markov_model, tmp_path / "orbax", "float32", has_draft_layer=True)
    executor = make(tmp_path / "orbax", load_format="orbax", **DRAFTING)
    driver = Driver(executor, rows(prompts=PROMPTS[:1]), num_drafts=3)
    assert [len(output) for output in driver.run(4)] == [1 + 3 * 4]


def test_a_checkpoint_without_the_draft_layer_is_refused(make_args, tmp_path):
    weights = {name: own for name, own in random_weights().items() if "mtp" not in name}
    args = make_args(
        model_path=str(write_checkpoint(tmp_path, weights)), load_format="safetensors", **DRAFTING
    )
    with pytest.raises(CheckpointError, match=r"do not match config.json: mtp\.fc\.weight is miss"):
        ModelExecutor(args)


def test_a_model_without_a_draft_layer_is_refused(make_args):
    with pytest.raises(ValueError, match="Qwen3ForCausalLM has no draft layer for --speculative"):
        ModelExecutor(make_args(speculative_algorithm="MTP"))
