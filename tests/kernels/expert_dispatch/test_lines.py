"""Lines are sorted by expert, and each token finds its own; parts of them add up to all."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from sgl_jax.kernels.expert_dispatch.interface import XLA_MOVES
from sgl_jax.kernels.expert_dispatch.lines import (
    UNDIVIDED_TOKENS,
    are_few,
    in_parts,
    lines_at_once,
)
from sgl_jax.kernels.expert_dispatch.xla import add_by_choice, add_by_line, add_part

NUM_EXPERTS = 6


@st.composite
def choices(draw):
    """Experts [top_k, T] of a chip, unlike for each token; NUM_EXPERTS is another chip's."""
    top_k, num_tokens = draw(st.integers(1, 4)), draw(st.integers(1, 12))
    orders = st.permutations([*range(NUM_EXPERTS), *[NUM_EXPERTS] * 4])
    one_for_all = draw(st.booleans())
    first = draw(orders)[:top_k]
    tokens = [first if one_for_all else draw(orders)[:top_k] for _ in range(num_tokens)]
    return np.array(tokens, np.int32).T


def check_places(experts):
    lines = XLA_MOVES.sort(jnp.array(experts), jnp.int32(0), NUM_EXPERTS)
    flat = experts.reshape(-1)
    counts = [int((flat == expert).sum()) for expert in range(NUM_EXPERTS)]
    assert_array_equal(lines.group_sizes, counts)
    assert lines.num_used == sum(counts)
    lower = np.array([(flat < one).sum() for one in flat])
    earlier = np.array([(flat[:i] == one).sum() for i, one in enumerate(flat)])
    assert_array_equal(np.ravel(lines.places), lower + earlier)
    token = np.broadcast_to(np.arange(experts.shape[1]), experts.shape)
    assert_array_equal(np.asarray(lines.tokens)[lines.places], token)


# Each shape is a program of its own.
@settings(max_examples=5, deadline=None)
@given(choices())
def test_places_are_those_of_a_stable_sort(experts):
    check_places(experts)


@pytest.mark.long
@settings(max_examples=300, deadline=None)
@given(choices())
def test_places_are_those_of_a_stable_sort_however_often_it_is_tried(experts):
    check_places(experts)


def check_parts(experts, size, add_lines):
    lines = XLA_MOVES.sort(jnp.array(experts), jnp.int32(0), NUM_EXPERTS)
    rng = np.random.default_rng(0)
    num_tokens = experts.shape[1]
    x = rng.normal(size=(num_tokens, 3)).astype(np.float32)
    weights = rng.normal(size=experts.shape).astype(np.float32)
    seen = []

    def add(total, part):
        """Add tokens times the number of their line's expert, from 1 on."""
        stops = jnp.cumsum(part.group_sizes)
        line = jnp.arange(part.num_lines)
        factors = 1 + jnp.sum(line[:, None] >= stops, axis=1)
        jax.debug.callback(lambda used: seen.append(int(used)), part.num_used)
        gathered = XLA_MOVES.gather(jnp.array(x), part)
        # Arbitrary from the last line in use on.
        results = jnp.where((line < part.num_used)[:, None], gathered * factors[:, None], jnp.nan)
        return add_lines(total, results, jnp.array(weights), part)

    total = in_parts(lines, min(size, experts.size), add, jnp.zeros_like(x))
    factors = np.where(experts < NUM_EXPERTS, experts + 1, 0)
    expected = x * (factors * weights).sum(axis=0)[:, None]
    np.testing.assert_allclose(total, expected, rtol=0, atol=1e-5)
    jax.effects_barrier()
    assert sum(seen) == lines.num_used


@settings(max_examples=5, deadline=None)
@given(choices(), st.integers(1, 5), st.sampled_from([add_by_choice, add_by_line]))
def test_parts_of_any_size_add_up_to_the_whole(experts, size, add_lines):
    check_parts(experts, size, add_lines)


@pytest.mark.long
@settings(max_examples=100, deadline=None)
@given(choices(), st.integers(1, 5), st.sampled_from([add_by_choice, add_by_line]))
def test_parts_of_any_size_add_up_however_often_it_is_tried(experts, size, add_lines):
    check_parts(experts, size, add_lines)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_a_tokens_sum_has_the_same_bits_in_parts_of_any_size(dtype):
    """However many other tokens a step has, so that a retracted request gets its tokens again."""
    top_k, num_tokens, width = 4, 40, 16
    rng = np.random.default_rng(1)
    experts = np.array([rng.permutation(NUM_EXPERTS)[:top_k] for _ in range(num_tokens)]).T
    lines = XLA_MOVES.sort(jnp.array(experts, jnp.int32), jnp.int32(0), NUM_EXPERTS)
    of_line = rng.normal(size=(experts.size, width)).astype(dtype)
    weights = rng.normal(size=experts.shape).astype(np.float32)

    def total(size):
        padded = jnp.pad(jnp.array(of_line), ((0, -experts.size % size), (0, 0)))
        state = jnp.zeros((num_tokens, width), jnp.float32)
        for first in range(0, experts.size, size):
            results = padded[first : first + size]
            part = lines.part(jnp.int32(first), size)
            state = add_by_line(state, results, jnp.array(weights), part)
        return np.asarray(state)

    whole = total(experts.size)
    own = np.asarray(lines.places)
    expected = (of_line.astype(np.float64)[own] * weights[..., None]).sum(axis=0)
    np.testing.assert_allclose(whole, expected, rtol=0, atol=1e-5)
    for size in (7, 32, 100):
        assert_array_equal(total(size), whole)


def test_a_chip_takes_its_share_and_half_of_it_more_at_a_time():
    assert lines_at_once(2048, 8, num_chips=1) == 8 * 2048
    assert lines_at_once(2048, 8, num_chips=4) == 6144
    assert lines_at_once(2048, 8, num_chips=1024) == 64
    assert lines_at_once(UNDIVIDED_TOKENS, 8, num_chips=4) == 8 * UNDIVIDED_TOKENS


@pytest.mark.parametrize("num_chips", [4, 8])
def test_lines_are_scattered_from_eight_chips_on(num_chips):
    """Each way gives the other bits, so they show which one the step took."""
    num_tokens, top_k, width = 1024, 8, 4
    rng = np.random.default_rng(2)
    size = lines_at_once(num_tokens, top_k, num_chips)
    assert are_few(size, num_tokens * top_k) == (num_chips == 8)
    experts = np.array([rng.permutation(16)[:top_k] for _ in range(num_tokens)]).T
    lines = XLA_MOVES.sort(jnp.array(experts, jnp.int32), jnp.int32(0), 16).part(0, size)
    results = jnp.array(rng.normal(size=(size, width)).astype(np.float32))
    given = jnp.zeros((num_tokens, width)), results, jnp.ones((top_k, num_tokens)), lines
    by_choice, by_line = add_by_choice(*given), add_by_line(*given)
    assert (by_choice != by_line).any()
    wanted = by_line if num_chips == 8 else by_choice
    assert_array_equal(add_part(*given), wanted)
