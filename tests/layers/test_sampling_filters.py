"""Thresholds and draws of large vocabularies, whose rows fill several strips."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sgl_jax.layers.sampling.filters import AT_ONCE, ONE_BY_ONE, search_threshold
from sgl_jax.layers.sampling.race import NUM_STRIPS, pad_to_strips, race, split_strips

VOCAB = 1900  # fills strips of 384, the last one in part
CUTS = {"TPU": AT_ONCE, "others": ONE_BY_ONE}


def weights_of(rng, kind, num_rows=8):
    """float32[num_rows, VOCAB], each row's largest 1."""
    logits = rng.normal(0, 2, (num_rows, VOCAB))
    if kind == "ties":
        logits = np.round(logits)
    elif kind == "flat":
        logits[:] = 0.0
    elif kind == "peaked":
        logits[:, 7] += 60.0
    return np.exp(logits - logits.max(axis=1, keepdims=True)).astype(np.float32)


def kept_by_sorting(weights, top_k, top_p):
    """Which tokens of one row top-k and top-p keep together, in float64, ties included."""
    in_order = np.sort(weights.astype(np.float64))[::-1]
    threshold = in_order[min(top_k, len(in_order)) - 1] if top_k else 0.0
    if top_p < 1.0:
        enough = np.cumsum(in_order) >= top_p * in_order.sum()
        threshold = max(threshold, in_order[enough.argmax()])
    return weights >= threshold


def find(cut, weights, top_k, top_p):
    top_k, top_p = jnp.asarray(top_k, jnp.int32), jnp.asarray(top_p, jnp.float32)
    search = jax.jit(lambda w: search_threshold(pad_to_strips(w), top_k, top_p, cut))
    return np.asarray(search(jnp.asarray(weights)))[:, None]


@pytest.mark.parametrize("kind", ["random", "ties", "flat", "peaked"])
@pytest.mark.parametrize("cut", CUTS)
def test_a_search_keeps_the_tokens_a_sort_would(cut, kind):
    weights = weights_of(np.random.default_rng(3), kind)
    top_k = [0, 1, 2, 50, VOCAB, VOCAB + 9, 40, 0]
    # None of them is within rounding of a sum of the first tokens.
    top_p = [0.9013, 1.0, 1.0, 1.0, 1.0, 1.0, 0.5017, 0.01003]
    kept = weights >= find(CUTS[cut], weights, top_k, top_p)
    for row in range(len(weights)):
        expected = kept_by_sorting(weights[row], top_k[row], top_p[row])
        np.testing.assert_array_equal(kept[row], expected, err_msg=f"row {row}")


@pytest.mark.parametrize("cut", CUTS)
def test_a_search_without_filters_keeps_all(cut):
    weights = weights_of(np.random.default_rng(4), "random", 2)
    np.testing.assert_array_equal(find(CUTS[cut], weights, [0, 3], [1.0, 1.0])[0], 0.0)


def race_rows(weights, seeds, positions):
    strips = split_strips(pad_to_strips(jnp.asarray(weights, jnp.float32)))
    seeds = np.stack([np.zeros_like(seeds), seeds], axis=1)
    return np.asarray(jax.jit(race)(strips, jnp.asarray(seeds), jnp.asarray(positions)))


def test_a_race_draws_in_proportion_to_the_weights():
    """Tokens at one place of several strips, tokens alone at theirs, and none elsewhere."""
    num_draws, width = 16_384, 384
    tokens = [5, 5 + width, 5 + 4 * width, 130, 1899, 3 * width, 4 * width - 1, 600]
    probs = np.array([0.25, 0.05, 0.1, 0.3, 0.02, 0.08, 0.15, 0.05])
    weights = np.zeros((1, VOCAB))
    weights[0, tokens] = probs / probs.max()
    seeds = np.arange(num_draws, dtype=np.int32)
    drawn = race_rows(np.tile(weights, (num_draws, 1)), seeds, np.full(num_draws, 9, np.int32))
    counts = np.bincount(drawn, minlength=VOCAB)
    assert counts.sum() == counts[tokens].sum()
    expected = num_draws * probs
    assert ((counts[tokens] - expected) ** 2 / expected).sum() < 40  # one in 10**6 of 7 degrees


def test_a_race_of_a_flat_vocabulary_reaches_each_part_of_it_alike():
    num_draws = 16_384
    seeds = np.arange(num_draws, dtype=np.int32)
    drawn = race_rows(np.ones((num_draws, VOCAB)), seeds, seeds)
    for parts in (drawn * 19 // VOCAB, drawn % 19):
        expected = num_draws / 19
        assert ((np.bincount(parts, minlength=19) - expected) ** 2 / expected).sum() < 64
    assert drawn.max() < VOCAB


def test_a_race_never_draws_a_weight_of_zero():
    weights = np.zeros((8192, VOCAB))
    winners = np.arange(8192) * 37 % VOCAB
    weights[np.arange(8192), winners] = 1.0
    seeds = np.arange(8192, dtype=np.int32)
    np.testing.assert_array_equal(race_rows(weights, seeds, seeds + 1), winners)


def test_a_race_depends_on_neither_place_nor_number_of_rows():
    weights = weights_of(np.random.default_rng(6), "random", 24)
    seeds, positions = np.arange(24, dtype=np.int32), np.arange(24, dtype=np.int32) * 5
    together = race_rows(weights, seeds, positions)
    for size in (1, 3, 16):
        part = slice(24 - size, 24)
        alone = race_rows(weights[part], seeds[part], positions[part])
        np.testing.assert_array_equal(alone, together[part])
    assert len(set(together.tolist())) > 12


def test_strips_hold_every_token_once():
    weights = np.arange(1, VOCAB + 1, dtype=np.float32)[None]
    strips = split_strips(pad_to_strips(jnp.asarray(weights)))
    assert len(strips) == NUM_STRIPS
    joined = np.concatenate([np.asarray(strip) for strip in strips], axis=1)
    np.testing.assert_array_equal(joined[:, :VOCAB], weights)
    assert not joined[:, VOCAB:].any()
