"""The TPU's choices of experts and places of lines, simulated on the CPU, against XLA's."""

from functools import lru_cache

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas.tpu import force_tpu_interpret_mode

from sgl_jax.kernels.expert_lines.tpu import routing
from sgl_jax.kernels.expert_lines.xla import xla_choose, xla_sort
from tests.kernels.simulation import EAGER, MODES, simulate
from tests.quick_compilation import quick_jit

# Experts, those chosen, and tokens.
SIZES = ((4, 2, 1), (8, 3, 40), (60, 4, 64), (128, 8, 24))


def choose(interpret, top_k, norm_topk_prob):
    @quick_jit
    def run(logits, is_token):
        with force_tpu_interpret_mode(interpret):
            return routing.tpu_choose(logits, is_token, top_k, norm_topk_prob)

    return run


def sort(interpret, num_own):
    @quick_jit
    def run(experts, first):
        with force_tpu_interpret_mode(interpret):
            lines = routing.tpu_sort(experts, first, num_own)
        return lines.places, lines.group_sizes, lines.num_used

    return run


compiled_choose, compiled_sort = lru_cache(choose), lru_cache(sort)


def draw_logits(num_experts, num_tokens, levels, seed):
    """Logits with ties if there are few `levels`, and the tokens that are no padding."""
    rng = np.random.default_rng(seed)
    logits = rng.integers(0, levels, (num_tokens, num_experts)).astype(np.float32)
    return logits * (8 / levels), rng.random(num_tokens) < 0.8


def check_choice(logits, is_token, top_k, norm_topk_prob, run):
    weights, experts = simulate(run, logits, is_token)
    expected = xla_choose(jnp.array(logits), jnp.array(is_token), top_k, norm_topk_prob)
    np.testing.assert_array_equal(experts, expected[1])
    np.testing.assert_allclose(weights, expected[0], rtol=1e-5, atol=1e-7)


def draw_experts(num_experts, top_k, num_tokens, one_for_all, seed):
    """Unlike experts of each token; `num_experts` is none."""
    rng = np.random.default_rng(seed)
    ranks = rng.random((num_experts + 1, 1 if one_for_all else num_tokens))
    experts = np.argsort(ranks, axis=0)[:top_k].astype(np.int32)
    return np.broadcast_to(experts, (top_k, num_tokens)).copy()


def check_places(experts, first, num_own, run):
    """The lines of each expert are as many as of XLA's sort, and hold each token once."""
    places, sizes, num_used = simulate(run, experts, np.int32(first))
    expected = xla_sort(jnp.array(experts), first, num_own)
    np.testing.assert_array_equal(sizes, expected.group_sizes)
    assert num_used == expected.num_used
    is_own = (experts >= first) & (experts < first + num_own)
    np.testing.assert_array_equal(np.sort(places[is_own]), np.arange(num_used))
    assert np.all(places[~is_own] >= num_used)
    expert_of_line = np.repeat(np.arange(num_own), sizes)
    np.testing.assert_array_equal(expert_of_line[places[is_own]], experts[is_own] - first)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("norm_topk_prob", [True, False])
@settings(max_examples=6, deadline=None)
@given(st.sampled_from(SIZES), st.sampled_from((1, 3, 10**6)), st.integers(0, 2**32 - 1))
def test_the_most_probable_experts_are_chosen(mode, norm_topk_prob, size, levels, seed):
    num_experts, top_k, num_tokens = size
    case = draw_logits(num_experts, num_tokens, levels, seed)
    run = compiled_choose(MODES[mode], top_k, norm_topk_prob)
    check_choice(*case, top_k, norm_topk_prob, run)


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=8, deadline=None)
@given(
    st.sampled_from(SIZES),
    st.sampled_from((0, 1, 3)),
    st.booleans(),
    st.integers(0, 2**32 - 1),
)
def test_each_line_of_a_chips_experts_is_one_tokens(mode, size, chip, one_for_all, seed):
    num_experts, top_k, num_tokens = size
    num_own = num_experts // 4
    experts = draw_experts(num_experts, top_k, num_tokens, one_for_all, seed)
    check_places(experts, chip * num_own, num_own, compiled_sort(MODES[mode], num_own))


def test_a_chip_may_have_all_experts_and_none_of_the_tokens():
    experts = draw_experts(8, 3, 40, one_for_all=False, seed=1)
    check_places(experts, 0, 8, compiled_sort(EAGER, 8))
    check_places(np.full((3, 40), 8, np.int32), 0, 8, compiled_sort(EAGER, 8))


def test_blocks_of_tokens_are_chosen_for_in_turn(monkeypatch):
    monkeypatch.setattr(routing, "_BLOCK_TOKENS", 128)
    case = draw_logits(8, 300, 3, seed=2)
    check_choice(*case, 3, True, choose(EAGER, 3, True))


def test_longer_steps_are_sorted_by_xla():
    experts = draw_experts(8, 3, 600, one_for_all=False, seed=3)
    lines = routing.tpu_sort(jnp.array(experts), jnp.int32(2), 4)
    expected = xla_sort(jnp.array(experts), 2, 4)
    np.testing.assert_array_equal(lines.tokens, expected.tokens)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_token_that_is_not_finite_leaves_the_others_alone(bad):
    run = compiled_choose(EAGER, 3, True)
    logits, is_token = draw_logits(8, 40, 10**6, seed=4)
    expected = simulate(run, logits, is_token)
    logits[7] = bad
    found = simulate(run, logits, is_token)
    others = np.arange(40) != 7
    for own, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(own[:, others], other[:, others])
    assert np.all((found[1] >= 0) & (found[1] <= 8))


def test_experts_of_equal_infinite_logits_are_unlike():
    logits = np.full((5, 8), -np.inf, np.float32)
    _, experts = simulate(compiled_choose(EAGER, 3, True), logits, np.ones(5, bool))
    np.testing.assert_array_equal(experts, [[0] * 5, [1] * 5, [2] * 5])


def count_the_token_itself(monkeypatch):
    own = routing._earlier
    monkeypatch.setattr(
        routing, "_earlier", lambda size: own(size) + jnp.eye(size, dtype="bfloat16")
    )


def count_later_tokens(monkeypatch):
    own = routing._earlier
    monkeypatch.setattr(routing, "_earlier", lambda size: own(size).T)


@pytest.mark.parametrize("fault", [count_the_token_itself, count_later_tokens])
def test_a_seeded_fault_of_the_places_is_noticed(fault, monkeypatch):
    experts = draw_experts(8, 3, 40, one_for_all=False, seed=5)
    check_places(experts, 2, 4, sort(EAGER, 4))
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        check_places(experts, 2, 4, sort(EAGER, 4))


def test_a_choice_without_what_was_taken_is_noticed(monkeypatch):
    case = draw_logits(8, 40, 3, seed=6)
    check_choice(*case, 3, True, choose(EAGER, 3, True))
    iota = routing.lax.broadcasted_iota
    monkeypatch.setattr(routing.lax, "broadcasted_iota", lambda *args: iota(*args) * 0)
    with pytest.raises(AssertionError):
        check_choice(*case, 3, True, choose(EAGER, 3, True))
