"""Logits split over chips by vocabulary: the same tokens as of whole rows, and the same reports."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from sgl_jax.core.sampling_params import SamplingParams
from sgl_jax.core.step_plan import RowAdmission
from sgl_jax.layers.sampling.draw import draw_tokens, score_tokens
from sgl_jax.layers.sampling.row_params import SampledRows, pack_row_params, unpack_row_params
from sgl_jax.layers.sampling.split_logits import SplitLogits

VOCAB = 22  # not divided by 4
ROWS = 6


@functools.cache  # compiled once for all values
def on_chips(tp, function, vocab_size=VOCAB, dp=1):
    """`function(SplitLogits, *inputs)` on dp x tp chips, of whole rows and inputs of all ranks.

    Returns every chip's results, stacked.
    """
    mesh = Mesh(np.array(jax.devices()[: dp * tp]).reshape(dp, tp), ("data", "tensor"))

    def local(columns, inputs):
        results = function(SplitLogits(columns, vocab_size), *inputs)
        return jax.tree.map(lambda x: x[None], results)

    run = jax.jit(
        jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(P("data", "tensor"), P("data")),
            out_specs=P(("data", "tensor")),
            check_vma=False,
        )
    )

    def call(logits, *inputs):
        # What lies past the vocabulary would win if it counted.
        padding = ((0, 0), (0, -vocab_size % tp))
        padded = np.pad(logits, padding, constant_values=np.inf)
        return jax.tree.map(np.asarray, run(padded, inputs))

    return call


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_of_equal_logits_the_lowest_id_is_greedy(tp):
    rng = np.random.default_rng(0)
    logits = rng.integers(0, 3, (64, VOCAB)).astype(np.float32)  # many ties, within and across
    logits[0], logits[1] = -np.inf, 0.0
    logits[2, :-1], logits[2, -1] = -1.0, -0.5
    every_chip, are_finite = on_chips(tp, SplitLogits.greedy_tokens)(logits)
    for tokens, is_finite in zip(every_chip, are_finite, strict=True):
        np.testing.assert_array_equal(tokens, logits.argmax(-1))
        np.testing.assert_array_equal(is_finite, np.arange(64) > 0)  # the first is all -inf


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_greedy_token_is_in_the_vocabulary_even_where_logits_are_nan(tp):
    logits = np.zeros((VOCAB + 1, VOCAB), np.float32)
    np.fill_diagonal(logits[:VOCAB], np.nan)
    logits[VOCAB] = np.nan
    every_chip, are_finite = on_chips(tp, SplitLogits.greedy_tokens)(logits)
    assert (every_chip == every_chip[0]).all()
    assert every_chip.min() >= 0
    assert every_chip.max() < VOCAB
    assert not are_finite.any()


SAMPLINGS = {
    "greedy": [{"temperature": 0.0}] * ROWS,
    "one random": [{"temperature": 0.0}] * (ROWS - 1) + [{"temperature": 1.0}],
    "random": [{"temperature": 1.5}] * ROWS,
    "filters": [{"temperature": 1.0, "top_k": 2 + i, "top_p": 0.9} for i in range(ROWS)],
    "bias": [{"temperature": 0.0, "logit_bias": {20 - i: 30.0}} for i in range(ROWS)],
}


def draw_rows(logits, packed, table, rows, lengths, samples, flags):
    return draw_tokens(logits, packed, table, SampledRows(rows, lengths, samples), flags[0])


def draw(tp, samplings, returns_logprobs, dp=1, logits=None, stops=()):
    """(tokens, whether logits are finite, log-probabilities) on every chip, of as many ranks, all
    alike."""
    if logits is None:
        logits = np.random.default_rng(1).normal(size=(ROWS, VOCAB)).astype(np.float32)
    packed = np.stack(
        [
            pack_row_params(
                RowAdmission(i, np.zeros(3, np.int32), 3, SamplingParams(**sampling), 7 + i, stops),
                1,
            )
            for i, sampling in enumerate(samplings)
        ]
    )
    rows, lengths = np.arange(ROWS, dtype=np.int32), np.full(ROWS, 3, np.int32)
    inputs = (packed, np.zeros((ROWS, 8), np.int32), rows, lengths, np.ones(ROWS, bool))
    flags = np.zeros(dp, bool)
    flags[-1] = returns_logprobs  # of the last rank

    repeated = [np.concatenate([x] * dp) for x in (logits, *inputs)]
    return on_chips(tp, draw_rows, dp=dp)(*repeated, flags)


@pytest.mark.parametrize("returns_logprobs", [False, True])
@pytest.mark.parametrize("name", SAMPLINGS)
def test_chips_draw_together_what_one_draws_alone(name, returns_logprobs):
    alone, _, alone_logprobs = draw(1, SAMPLINGS[name], returns_logprobs)
    tokens, are_finite, logprobs = draw(4, SAMPLINGS[name], returns_logprobs)
    assert are_finite.all()
    for chip in range(4):
        np.testing.assert_array_equal(tokens[chip], alone[0])
        for got, expected in zip(logprobs, alone_logprobs, strict=True):
            np.testing.assert_allclose(got[chip], expected[0], rtol=1e-6)
    assert bool(logprobs.logprobs.any()) == returns_logprobs


@pytest.mark.parametrize("returns_logprobs", [False, True])
@pytest.mark.parametrize("name", ["greedy", "filters", "bias"])
@pytest.mark.parametrize("tp", [1, 4])
def test_every_chip_finds_the_rows_whose_logits_are_not_finite(tp, name, returns_logprobs):
    logits = np.random.default_rng(1).normal(size=(ROWS, VOCAB)).astype(np.float32)
    clean, _, _ = draw(tp, SAMPLINGS[name], returns_logprobs, logits=logits)
    logits[0, 3] = np.nan
    logits[2, VOCAB - 1] = np.inf
    logits[3] = -np.inf
    logits[4, 1:5] = -np.inf  # tokens that the model rules out
    tokens, are_finite, _ = draw(tp, SAMPLINGS[name], returns_logprobs, logits=logits)
    for drawn, is_finite in zip(tokens, are_finite, strict=True):
        np.testing.assert_array_equal(is_finite, [False, True, False, False, True, True])
        np.testing.assert_array_equal(drawn[[1, 5]], clean[0][[1, 5]])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_mask_of_stop_tokens_hides_no_row_whose_logits_are_not_finite(temperature):
    stop, sampling = 4, {"temperature": temperature, "min_new_tokens": 9}
    logits = np.random.default_rng(1).normal(size=(ROWS, VOCAB)).astype(np.float32)
    logits[0, stop] = np.nan
    logits[2, stop] = np.inf
    logits[3, :stop] = logits[3, stop + 1 :] = -np.inf  # the mask removes the only finite one
    logits[4] = -np.inf
    _, are_finite, _ = draw(1, [sampling] * ROWS, False, logits=logits, stops=(stop,))
    np.testing.assert_array_equal(are_finite[0], [False, True, False, True, False, True])


@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize("name", ["greedy", "random"])
def test_masks_hide_no_row_whose_logits_are_not_finite_and_are_not_the_reason_for_one(tp, name):
    logits = np.zeros((ROWS, VOCAB), np.float32)
    logits[0, 9] = np.nan  # not allowed by the mask
    allowed = np.full((ROWS, 1), 1 << 4, np.int32)  # token 4 only

    def draw_masked(logits, packed, table, rows, lengths, samples, masks):
        where = SampledRows(rows, lengths, samples)
        return draw_tokens(logits, packed, table, where, jnp.bool_(False), masks)

    admissions = [
        RowAdmission(i, np.zeros(3, np.int32), 3, SamplingParams(**sampling), 7 + i, ())
        for i, sampling in enumerate(SAMPLINGS[name])
    ]
    packed = np.stack([pack_row_params(admission, 1) for admission in admissions])
    rows, lengths = np.arange(ROWS, dtype=np.int32), np.full(ROWS, 3, np.int32)
    inputs = (packed, np.zeros((ROWS, 8), np.int32), rows, lengths, np.ones(ROWS, bool), allowed)
    tokens, are_finite, _ = on_chips(tp, draw_masked)(logits, *inputs)
    for drawn, is_finite in zip(tokens, are_finite, strict=True):
        np.testing.assert_array_equal(is_finite, np.arange(ROWS) > 0)
        np.testing.assert_array_equal(drawn[1:], 4)


@pytest.mark.parametrize(("tp", "dp"), [(2, 1), (4, 1), (1, 2), (2, 2)])
def test_rows_of_any_filters_draw_the_same_on_any_mesh(tp, dp):
    vocab, num_rows = 2500, 24
    kinds = (
        {"temperature": 1.0},
        {"temperature": 0.8, "top_k": 40},
        {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 1.3, "min_p": 0.05},
        {"temperature": 1.0, "top_k": 3000, "top_p": 0.95, "min_p": 0.01},
        {"temperature": 0.0},
    )
    logits = np.random.default_rng(3).normal(size=(num_rows, vocab)).astype(np.float32) * 2
    packed = np.stack(
        [
            pack_row_params(
                RowAdmission(
                    i, np.zeros(3, np.int32), 3, SamplingParams(**kinds[i % len(kinds)]), i, ()
                ),
                1,
            )
            for i in range(num_rows)
        ]
    )
    inputs = (np.full(num_rows, 3, np.int32), np.arange(num_rows) % 7 != 3)  # some are padding

    def tokens(tp, dp):
        rows = np.tile(np.arange(num_rows // dp, dtype=np.int32), dp)  # each rank has its own
        table = np.zeros((num_rows, 8), np.int32)
        arrays = (logits, packed, table, rows, *inputs, np.zeros(dp, bool))
        drawn, _, _ = on_chips(tp, draw_rows, vocab, dp)(*arrays)
        for rank in drawn.reshape(dp, tp, -1):
            assert (rank == rank[0]).all()
        return drawn.reshape(dp, tp, -1)[:, 0].reshape(-1)

    samples = inputs[1]
    np.testing.assert_array_equal(tokens(tp, dp)[samples], tokens(1, 1)[samples])


def test_a_rank_reports_though_the_others_want_nothing():
    tokens, _, logprobs = draw(2, SAMPLINGS["greedy"], True, dp=2)
    assert (tokens == tokens[0]).all()
    assert not logprobs.logprobs[:2].any()  # chips of the first rank
    assert (logprobs.logprobs[2:] < 0).all()


@pytest.mark.parametrize("tp", [1, 4])
def test_scores_are_those_of_the_given_tokens(tp):
    logits = np.random.default_rng(2).normal(size=(5, VOCAB)).astype(np.float32)
    tokens = jnp.array([3, 0, 21, 7, 7])
    ids = np.array([[0, 21], [20, 1], [5, 5], [2, 4], [21, 0]])
    lines = [
        RowAdmission(i, np.zeros(1, np.int32), 1, SamplingParams(), i, (), logprob_ids=tuple(own))
        for i, own in enumerate(ids.tolist())
    ]
    packed = np.stack([pack_row_params(line, 1) for line in lines])

    def score(logits, tokens, packed):
        return score_tokens(logits, tokens, unpack_row_params(packed))

    scores = on_chips(tp, score)(logits, tokens, packed)
    normaliser = np.log(np.exp(logits.astype(np.float64)).sum(-1))
    expected = logits[np.arange(5), tokens] - normaliser
    for chip in range(tp):
        np.testing.assert_allclose(scores.logprobs[chip], expected, atol=1e-5)
        named = np.take_along_axis(logits, ids, -1) - normaliser[:, None]
        np.testing.assert_allclose(scores.id_logprobs[chip][:, :2], named, atol=1e-5)
        np.testing.assert_array_equal(scores.top_ids[chip][:, 0], logits.argmax(-1))
