"""The XLA latent attention against float64, on ragged batches drawn at random."""

from functools import partial
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from sgl_jax.kernels.latent_attention import chosen_xla
from sgl_jax.kernels.latent_attention.latents import ReusedChoice
from sgl_jax.kernels.latent_attention.xla import latent_attention
from tests.kernels.attention.problems import LAYER, Case, cases
from tests.kernels.latent_attention.problems import (
    SCALE,
    LatentProgram,
    build,
    expected,
    make_batch,
)
from tests.support.long import long

PROGRAMS = (
    LatentProgram(page_size=1, max_drafts=3),
    LatentProgram(page_size=16),
    LatentProgram(page_size=128, heads=3, nope_dim=4, value_dim=24, tokens=200, max_len=300),
)
# Rows shorter and longer than `top_k`, in blocks of keys; a key is as long as a row's part.
INDEXED = (
    LatentProgram(page_size=1, max_drafts=2, index_heads=5, key_dim=24, top_k=9),
    LatentProgram(page_size=16, index_heads=3, key_dim=128, top_k=40),
)


@partial(jax.jit, static_argnames=("program", "is_reused"))
def attend(problem, program, is_reused=False):
    return latent_attention(
        problem.queries,
        problem.latents,
        problem.up,
        problem.kv_cache,
        jnp.int32(LAYER),
        make_batch(problem, program),
        SCALE,
        problem.static_index(program, is_reused),
    )


def check(case, atol):
    problem = build(case)
    out, cache, _ = attend(problem, case.program)
    expected_out, expected_cache = expected(problem, case.program)
    num_tokens = problem.q_lens.sum()
    found = np.asarray(out[:num_tokens], np.float64)
    np.testing.assert_allclose(found, expected_out[:num_tokens], rtol=0, atol=atol)
    assert np.isfinite(np.asarray(out, np.float64)).all()
    # All pages but the null page, which padding may fill with anything.
    found = case.program.numbers(np.asarray(cache))[:, 1:]
    np.testing.assert_allclose(found, expected_cache[:, 1:], rtol=0, atol=1e-6)


@settings(max_examples=8, deadline=None)
@given(cases(PROGRAMS))
def test_agrees_with_float64_on_any_ragged_batch(case):
    """Unused slots and the null page hold NaN, so any read of them would show."""
    check(case, 2e-5)


@settings(max_examples=5, deadline=None)
@given(cases(INDEXED))
def test_chosen_tokens_are_attended_to_on_any_ragged_batch(case):
    """The choice is exact: the scores are whole numbers, and some of them are equal."""
    with mock.patch.object(chosen_xla, "SCORED_KEYS", 48):
        check(case, 2e-5)


@pytest.mark.parametrize(("dtype", "cache_dtype"), [("bfloat16", None), ("float32", jnp.int8)])
def test_latents_are_attended_to_as_the_cache_holds_them(dtype, cache_dtype):
    program = LatentProgram(dtype=jnp.dtype(dtype), cache_dtype=cache_dtype)
    check(
        Case(program, [(100, 1), (17, 1)], [(90, 40)], 0, seed=3), 0.03 if not cache_dtype else 2e-5
    )


@pytest.mark.parametrize("program", [INDEXED[0], *long(INDEXED[1])], ids=["1", "16"])
def test_a_later_layer_attends_to_the_tokens_that_an_earlier_one_chose(program):
    decodes, prefills = [(100, 1 + program.max_drafts), (17, 1)], [(90, 40)]
    problem = build(Case(program, decodes, prefills, 0, seed=3))
    num_tokens = problem.q_lens.sum()
    first, _, chosen = attend(problem, program, is_reused=True)
    found, cache, nothing = attend(problem._replace(index=ReusedChoice(chosen)), program)
    assert nothing is None
    assert (np.asarray(found)[:num_tokens] == np.asarray(first)[:num_tokens]).all()
    ends = np.concatenate([start + 1 + np.arange(length) for start, length in decodes + prefills])
    num_chosen = (np.asarray(chosen)[:num_tokens] >= 0).sum(axis=1)
    assert num_chosen.tolist() == np.minimum(ends, program.top_k).tolist()
    # It writes no keys.
    page = problem.page_table[0, 100 // program.page_size]
    assert not np.asarray(cache)[LAYER, page, 0, 100 % program.page_size, -128:].any()


def test_a_step_of_short_rows_has_no_choice_and_needs_none():
    program = INDEXED[1]
    problem = build(Case(program, [(7, 1)], [(0, 9)], 0, seed=3))
    _, _, chosen = attend(problem, program, is_reused=True)
    assert not np.asarray(chosen).any()
    check_dense = problem._replace(index=ReusedChoice(jnp.full_like(chosen, -1)))
    found, _, _ = attend(check_dense, program)
    want, _ = expected(problem._replace(index=None), program)
    np.testing.assert_allclose(found[:10], want[:10], rtol=0, atol=2e-5)


def test_the_choice_is_by_keys_as_the_cache_holds_them():
    program = INDEXED[0]._replace(dtype=jnp.dtype("bfloat16"), cache_dtype=jnp.int8, page_size=16)
    check(Case(program, [(100, 3), (17, 1)], [(90, 40)], 0, seed=3), 0.05)


@pytest.mark.parametrize("k", [7, 300, *long(1, 128)])
def test_the_greatest_scores_are_found_with_ties_and_what_is_not_finite(k):
    rng = np.random.default_rng(k)
    scores = rng.integers(-4, 4, (3, 2, 300)).astype(np.float32) * rng.choice([0.0, -1, 1e-30, 3])
    scores[0, 0, rng.integers(0, 300, 9)] = np.nan
    scores[:, 1, rng.integers(0, 300, 200)] = -np.inf
    scores[2] = -np.inf
    scores = scores.reshape(-1, 300)
    found = np.asarray(chosen_xla.positions_of_greatest(jnp.asarray(scores), k))
    for own, places in zip(scores, found, strict=True):
        ranked = np.where(np.isnan(own), np.inf, own)
        order = np.argsort(-ranked, kind="stable")[:k]
        right = np.sort(order[ranked[order] > -np.inf])
        assert places[: len(right)].tolist() == right.tolist()
        assert (places[len(right) :] == -1).all()
