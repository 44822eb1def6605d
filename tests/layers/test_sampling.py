"""Drawing tokens: the right distribution, the right order of operations, the same answer always."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sgl_jax.core.sampling_params import MAX_LOGPROB_IDS, SamplingParams
from sgl_jax.core.step_plan import RowAdmission
from sgl_jax.layers.sampling.logprobs import token_logprobs
from sgl_jax.layers.sampling.row_params import (
    SampledRows,
    pack_row_params,
    packed_width,
    unpack_row_params,
)
from sgl_jax.layers.sampling.sample import BLOCK_ROWS, sample_tokens

CONTEXT = 600
VOCAB = 64
STOPS = 20
NUM_DRAWS = 2048
_sample = jax.jit(sample_tokens)
NO_LOGPROBS = np.bool_(False)


def admission(row=1, tokens=(0,), prompt_len=None, seed=0, stop_token_ids=(), **sampling):
    tokens = np.asarray(tokens, np.int32)
    prompt_len = len(tokens) if prompt_len is None else prompt_len
    return RowAdmission(row, tokens, prompt_len, SamplingParams(**sampling), seed, stop_token_ids)


def sample(logits, admissions, samples=True, batch=8):
    """Tokens drawn for rows that were admitted and nothing since, in the order given.

    Padded to `batch` rows and VOCAB impossible tokens, so that few shapes are compiled.
    """
    n, vocab = np.shape(logits)
    padded = np.full((max(n, batch), VOCAB), -np.inf, np.float32)
    padded[:n, :vocab] = logits
    table = np.zeros((32, CONTEXT), np.int32)
    rows, lengths = np.zeros((2, len(padded)), np.int32)
    packed = np.zeros((len(padded), packed_width(STOPS)), np.int32)
    for i, a in enumerate(admissions):
        table[a.row, : len(a.tokens)] = a.tokens
        rows[i], lengths[i], packed[i] = a.row, len(a.tokens), pack_row_params(a, STOPS)
    drawing = np.zeros(len(padded), bool)
    drawing[:n] = samples
    where = SampledRows(jnp.asarray(rows), jnp.asarray(lengths), jnp.asarray(drawing))
    params = unpack_row_params(jnp.asarray(packed))
    tokens, are_finite, _ = _sample(padded, params, jnp.asarray(table), where, NO_LOGPROBS)
    np.testing.assert_array_equal(are_finite[:n], np.isfinite(padded[:n].max(-1)))
    return np.asarray(tokens)[:n]


def draw_counts(logits, **sampling):
    """How often each token is drawn from one distribution, over as many seeds as draws."""
    row = admission(**sampling)
    rows = [row._replace(seed=seed) for seed in range(NUM_DRAWS)]
    return np.bincount(sample(np.tile(logits, (NUM_DRAWS, 1)), rows), minlength=len(logits))


def expected_probs(logits, temperature=1.0, top_k=-1, top_p=1.0, min_p=0.0):
    """The filters as SGLang's reference defines them: by sorting, each on the same distribution."""
    scaled = np.asarray(logits, np.float64) / temperature
    probs = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    order = np.argsort(-probs, kind="stable")
    in_order = probs[order]
    mass_before = np.cumsum(in_order) - in_order
    keep = mass_before < top_p
    if top_k > 0:
        keep &= np.arange(len(probs)) < top_k
    keep &= in_order >= min_p * in_order[0]
    kept = np.zeros_like(probs)
    kept[order[keep]] = in_order[keep]
    return kept / kept.sum()


def assert_drawn_from(counts, probs):
    """Pearson's chi-square, at a significance of about one in a million for up to 12 tokens."""
    possible = probs > 0
    assert counts[~possible].sum() == 0
    expected = counts.sum() * probs[possible]
    statistic = ((counts[possible] - expected) ** 2 / expected).sum()
    assert statistic < 50, (counts, expected)


LOGITS = np.log([0.30, 0.22, 0.16, 0.12, 0.08, 0.06, 0.04, 0.02])[[3, 0, 6, 1, 7, 2, 5, 4]]

FILTERS = [
    {},
    {"temperature": 0.5},
    {"temperature": 2.0},
    {"top_k": 3},
    {"top_p": 0.6},
    {"min_p": 0.25},
    {"top_k": 5, "top_p": 0.75},
    {"temperature": 0.7, "top_k": 6, "top_p": 0.95, "min_p": 0.1},
    {"top_k": 100},
    {"min_p": 1.0},
    {"min_p": 0.0, "top_p": 1.0},
    {"top_p": 1e-6},
]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_draws_follow_the_filtered_distribution(filters):
    assert_drawn_from(draw_counts(LOGITS, **filters), expected_probs(LOGITS, **filters))


def test_filters_keep_exactly_the_tokens_a_sort_would():
    """Random rows of random parameters: with every kept token equally likely, all are drawn."""
    rng = np.random.default_rng(0)
    for _ in range(5):
        logits = rng.normal(0, 2, 12)
        filters = {
            "top_k": int(rng.integers(1, 13)) if rng.random() < 0.7 else -1,
            "top_p": float(rng.uniform(0.05, 1.0)) if rng.random() < 0.7 else 1.0,
            "min_p": float(rng.uniform(0, 0.3)) if rng.random() < 0.5 else 0.0,
            "temperature": float(rng.uniform(0.5, 3.0)),
        }
        assert_drawn_from(draw_counts(logits, **filters), expected_probs(logits, **filters))


def test_greedy_takes_the_first_of_equal_logits_and_ignores_other_parameters():
    logits = [[1.0, 3.0, 3.0, 2.0]]
    assert sample(logits, [admission(temperature=0.0)]) == [1]
    assert sample(logits, [admission(temperature=0.0, top_p=0.1, seed=9)]) == [1]
    assert sample(logits, [admission(temperature=0.7, top_k=1, seed=9)]) == [1]


def test_a_draw_depends_on_seed_and_position_alone():
    rng = np.random.default_rng(1)
    logits = rng.normal(0, 1, (6, 50)).astype(np.float32)
    rows = [admission(row=i + 1, tokens=[0] * (i + 3), seed=2**32 - 1 - i) for i in range(6)]
    together = sample(logits, rows)
    for i in range(6):
        alone = rows[i]._replace(row=3)
        assert sample(logits[i : i + 1], [alone], batch=1) == together[i]
    backwards = sample(logits[::-1], rows[::-1])
    np.testing.assert_array_equal(backwards[::-1], together)
    with_others = [
        *rows[:3],
        admission(row=9, temperature=0.0),
        admission(row=8, temperature=1.0, top_p=0.3, repetition_penalty=2.0),
    ]
    np.testing.assert_array_equal(
        sample(np.concatenate([logits[:3], logits[:2]]), with_others)[:3], together[:3]
    )


@pytest.mark.parametrize("other", [lambda s: -1 - s, lambda s: s + 2**32, lambda s: s ^ 2**62])
def test_both_words_of_a_seed_count(other):
    seeds = [1, 2, 3, 2**31, -3, 5 << 32]
    rows = [admission(seed=seed) for s in seeds for seed in (s, other(s))]
    drawn = sample(np.zeros((2 * len(seeds), VOCAB)), rows, batch=16).reshape(-1, 2)
    assert (drawn[:, 0] == drawn[:, 1]).sum() <= 1


def test_seeds_and_positions_give_independent_draws():
    flat = np.zeros(VOCAB)
    by_seed = sample(
        np.tile(flat, (64, 1)), [admission(seed=s) for s in range(64)], batch=NUM_DRAWS
    )
    by_length = [admission(row=n, tokens=[0] * n) for n in range(1, 31)]
    by_position = sample(np.tile(flat, (30, 1)), by_length, batch=NUM_DRAWS)
    assert len(set(by_seed.tolist())) > 30
    assert len(set(by_position.tolist())) > 15


def penalised(logits, tokens, prompt_len, repetition=1.0, frequency=0.0, presence=0.0):
    """The penalties, written out in numpy."""
    logits = np.array(logits, np.float64)
    output = np.bincount(tokens[prompt_len:], minlength=len(logits))
    seen = np.bincount(tokens, minlength=len(logits)) > 0
    damped = np.where(logits > 0, logits / repetition, logits * repetition)
    return np.where(seen, damped, logits) - frequency * output - presence * (output > 0)


def test_rows_draw_alike_in_one_block_of_rows_and_in_several():
    rng = np.random.default_rng(5)
    num_rows = 4 * BLOCK_ROWS + 6  # the last block overlaps its neighbour
    logits = rng.normal(size=(num_rows, VOCAB)) * 2
    kinds = (
        {"temperature": 0},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 9, "repetition_penalty": 1.4},
        {"temperature": 0, "frequency_penalty": 1.1},
    )
    rows = []
    for i in range(num_rows):
        line = 1 + i % 31
        tokens = np.random.default_rng(line).integers(VOCAB, size=8)
        rows.append(admission(line, tokens, prompt_len=3, seed=i, **kinds[i % len(kinds)]))
    together = sample(logits, rows)
    alone = [sample(logits[i : i + 8], rows[i : i + 8]) for i in range(0, num_rows, 8)]
    np.testing.assert_array_equal(together, np.concatenate(alone))
    assert (together != logits.argmax(axis=1)).sum() > 10
    broken, bad = logits.copy(), [3, num_rows - 9]  # the second is in both of the last blocks
    broken[bad, 5] = np.nan
    np.testing.assert_array_equal(np.delete(sample(broken, rows), bad), np.delete(together, bad))


@pytest.mark.parametrize(
    "penalties",
    [
        {"repetition_penalty": 1.5},
        {"frequency_penalty": 0.7},
        {"presence_penalty": 1.1},
        {"repetition_penalty": 0.8, "frequency_penalty": -0.3, "presence_penalty": 0.4},
    ],
    ids=str,
)
def test_penalties_shift_the_distribution_as_their_formulas_say(penalties):
    rng = np.random.default_rng(2)
    logits = rng.normal(0, 1, 10)
    tokens = rng.integers(0, 10, 25)
    want = penalised(
        logits, tokens, 15, **{name.split("_")[0]: value for name, value in penalties.items()}
    )
    counts = draw_counts(logits, tokens=tokens, prompt_len=15, **penalties)
    assert_drawn_from(counts, expected_probs(want))
    assert sample([logits], [admission(1, tokens, 15, temperature=0.0, **penalties)]) == [
        want.argmax()
    ]


def test_penalties_of_one_row_leave_its_neighbours_alone():
    logits = np.array([[2.0, 1.9, 0.0]] * 2)
    rows = [
        admission(row=1, tokens=[0, 0], prompt_len=0, temperature=0.0, frequency_penalty=1.0),
        admission(row=2, tokens=[0, 0], prompt_len=0, temperature=0.0),
    ]
    np.testing.assert_array_equal(sample(logits, rows), [1, 0])


def test_penalties_count_contexts_longer_than_one_block():
    tokens = [1] * 100 + [2] * 490
    row = admission(tokens=tokens, prompt_len=100, temperature=0.0, frequency_penalty=0.1)
    assert sample([[0.0, 0.5, 49.5, 0.6]], [row]) == [3]
    assert sample([[0.0, 0.5, 49.7, 0.6]], [row]) == [2]


def test_logit_bias_adds_to_the_named_tokens_only():
    logits = [[0.0, 1.0, 2.0, 0.5]]
    assert sample(logits, [admission(temperature=0.0, logit_bias={3: 1.6})]) == [3]
    assert sample(logits, [admission(temperature=0.0, logit_bias={2: -1.5, 0: 0.9})]) == [1]
    counts = draw_counts(np.zeros(4), logit_bias={0: -100.0, 1: 1.0})
    assert_drawn_from(counts[1:], expected_probs([1.0, 0.0, 0.0]))


def test_stop_tokens_cannot_be_drawn_before_min_new_tokens():
    logits = [[5.0, 4.0, 1.0, 0.0]]

    def token(num_output):
        return sample(
            logits,
            [
                admission(
                    tokens=[2] * (3 + num_output),
                    prompt_len=3,
                    stop_token_ids=(0, 1),
                    temperature=0.0,
                    min_new_tokens=2,
                )
            ],
        )

    assert [token(0), token(1), token(2), token(3)] == [[2], [2], [0], [0]]


def test_greedy_rows_beside_random_ones_take_the_first_of_equal_logits():
    """Logits so close that their probabilities are equal in float32 are no ties."""
    logits = np.zeros((3, 40), np.float32)
    logits[0, [31, 6, 39]] = 1.0
    logits[1, 3], logits[1, 9] = 1e-9, 2e-9
    logits[2, 20] = -1.0
    rows = [admission(row=i, temperature=0.0) for i in (1, 2, 3)]
    beside = [*rows, admission(row=4, temperature=1.0)]
    tokens = sample(np.concatenate([logits, logits[:1]]), beside)[:3]
    np.testing.assert_array_equal(tokens, [6, 9, 0])
    np.testing.assert_array_equal(tokens, sample(logits, rows))


def test_rows_that_do_not_sample_change_nothing_for_those_that_do():
    logits = np.array([[1.0, 2.0], [2.0, 1.0]])
    rows = [
        admission(row=1, temperature=1.0, repetition_penalty=3.0),
        admission(row=2, temperature=0.0),
    ]
    assert sample(logits, rows, samples=[False, True])[1] == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_broken_logits_still_give_a_valid_token(bad, temperature):
    logits = np.zeros((2, VOCAB))
    logits[0] = bad
    rows = [
        admission(row=i, temperature=temperature, top_p=0.9, repetition_penalty=1.2) for i in (1, 2)
    ]
    tokens = sample(logits, rows)
    assert (tokens >= 0).all()
    assert (tokens < VOCAB).all()


def test_log_probabilities_are_of_the_unmodified_logits():
    logits = np.random.default_rng(3).normal(0, 3, (3, 30)).astype(np.float32)
    want = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    got = token_logprobs(jnp.asarray(logits), jnp.array([4, 0, 29]), ids(3))
    np.testing.assert_allclose(got.logprobs, want[np.arange(3), [4, 0, 29]], rtol=1e-5)
    order = np.argsort(-want, axis=-1)[:, :20]
    np.testing.assert_array_equal(got.top_ids, order)
    np.testing.assert_allclose(got.top_logprobs, np.take_along_axis(want, order, -1), rtol=1e-5)
    np.testing.assert_allclose(got.id_logprobs[:, :30], want, rtol=1e-5)
    assert np.isfinite(np.asarray(got.id_logprobs)).all()


def ids(num_rows):
    """Every token of a vocabulary of 30, and then none."""
    named = np.full((num_rows, MAX_LOGPROB_IDS), 2**31 - 1, np.int32)
    named[:, :30] = np.arange(30)
    return jnp.asarray(named)


def test_a_vocabulary_below_twenty_fills_the_alternatives_with_nothing():
    got = token_logprobs(jnp.zeros((1, 3)), jnp.array([1]), ids(1))
    np.testing.assert_array_equal(got.top_ids[0], [0, 1, 2] + [-1] * 17)
    assert np.isneginf(np.asarray(got.top_logprobs)[0, 3:]).all()


def test_more_stop_tokens_than_slots_are_refused():
    with pytest.raises(ValueError, match="could not broadcast"):
        pack_row_params(admission(stop_token_ids=tuple(range(STOPS + 1))), STOPS)
