"""The TPU's choices of experts and places of lines, simulated on the CPU, against XLA's."""

from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas.tpu import force_tpu_interpret_mode

from sgl_jax.core.layer_configs import ExpertChoice
from sgl_jax.kernels.expert_dispatch.lines import Router
from sgl_jax.kernels.expert_dispatch.tpu import routing
from sgl_jax.kernels.expert_dispatch.xla import xla_choose, xla_sort
from tests.kernels.simulation import EAGER, MODES, simulate
from tests.support.long import long

EPS = 1e-6
CHOICE = ExpertChoice(top_k=3, norm_topk_prob=True)
# Experts, those chosen, and tokens.
SIZES = ((4, 2, 1), (8, 3, 40), (60, 4, 64), (128, 8, 24))


def choose(interpret, choice, from_one=False):
    @jax.jit
    def run(x, norm, matrices, bias, is_token, choice_bias=None):
        router = Router(choice, EPS, from_one, norm, matrices, bias, choice_bias)
        with force_tpu_interpret_mode(interpret):
            return routing.tpu_choose(x, router, jnp.int32(1), is_token)

    return run


def sort(interpret, num_own):
    @jax.jit
    def run(experts, first):
        with force_tpu_interpret_mode(interpret):
            lines = routing.tpu_sort(experts, first, num_own)
        return lines.places, lines.group_sizes, lines.num_used

    return run


compiled_choose, compiled_sort = lru_cache(choose), lru_cache(sort)


def draw_tokens(num_experts, num_tokens, levels, seed, dtype=np.float32):
    """Hidden states as wide as experts are many; with few `levels` logits are equal.

    The second layer's router is the identity, so that logits are the normalised values.
    """
    rng = np.random.default_rng(seed)
    x = rng.integers(0, levels, (num_tokens, num_experts)).astype(dtype)
    matrices = np.stack([rng.normal(size=(num_experts,) * 2), np.eye(num_experts)]).astype(dtype)
    bias = rng.integers(0, 2, num_experts).astype(dtype)
    is_token = rng.random(num_tokens) < 0.8
    return x, np.full(num_experts, 2.0, dtype), matrices, bias, is_token


def check_choice(case, choice, run, from_one=False):
    found = simulate(run, *case)
    x, norm, matrices, bias, is_token, *choice_bias = map(jnp.array, case)
    router = Router(choice, EPS, from_one, norm, matrices, bias, *choice_bias)
    expected = xla_choose(x, router, jnp.int32(1), is_token)
    rtol = 1e-5 if case[0].dtype == np.float32 else 2.0**-7  # hidden states of 16 bits
    for own, other in zip(found[:2], expected[:2], strict=True):
        own, other = (np.asarray(part, np.float64) for part in (own, other))
        np.testing.assert_allclose(own, other, rtol=rtol, atol=1e-6)
    np.testing.assert_array_equal(found[2], expected[2])


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


@pytest.mark.parametrize("mode", ["lazy", *long("eager")])
@settings(max_examples=2, deadline=None)
@given(st.sampled_from(SIZES), st.sampled_from((2, 3, 10**6)), st.integers(0, 2**32 - 1))
def test_the_most_probable_experts_are_chosen(mode, size, levels, seed):
    num_experts, top_k, num_tokens = size
    # Every combination of both, in one size each: each rule is a program.
    choice, from_one = ExpertChoice(top_k, norm_topk_prob=top_k in (2, 4)), top_k in (3, 4)
    case = draw_tokens(num_experts, num_tokens, levels, seed)
    check_choice(case, choice, compiled_choose(MODES[mode], choice, from_one), from_one)


@pytest.mark.parametrize(
    "choice",
    [
        ExpertChoice(4, True, True, num_groups=4, top_groups=2, best_of_group=2, scale=2.5),
        ExpertChoice(6, False, num_groups=8, top_groups=3, best_of_group=1, scale=16.0),
        ExpertChoice(3, False, True),
    ],
    ids=["sigmoid in groups", "softmax in groups", "sigmoid"],
)
@settings(max_examples=2, deadline=None)
@given(st.sampled_from((3, 10**6)), st.integers(0, 2**32 - 1))
def test_experts_are_chosen_by_score_and_bias_within_the_best_groups(choice, levels, seed):
    case = draw_tokens(32, 40, levels, seed)
    rng = np.random.default_rng(seed)
    choice_bias = rng.normal(size=32).astype(np.float32)
    check_choice((*case, choice_bias), choice, compiled_choose(EAGER, choice))


def test_hidden_states_of_16_bits():
    case = draw_tokens(8, 40, 3, seed=7, dtype=jnp.bfloat16)
    check_choice(case, CHOICE, compiled_choose(EAGER, CHOICE))


def test_a_router_without_biases():
    *case, is_token = draw_tokens(8, 40, 10**6, seed=8)
    case[3] = None
    _, _, experts = simulate(compiled_choose(EAGER, CHOICE), *case, is_token)
    chosen = np.argsort(-case[0], axis=1, kind="stable")[:, : CHOICE.top_k].T
    np.testing.assert_array_equal(experts, np.where(is_token, chosen, 8))


@pytest.mark.parametrize("mode", ["eager", *long("lazy")])
@settings(max_examples=3, deadline=None)
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


def test_a_chip_may_have_all_experts_or_one_and_none_of_the_tokens():
    experts = draw_experts(8, 3, 40, one_for_all=False, seed=1)
    check_places(experts, 0, 8, compiled_sort(EAGER, 8))
    check_places(experts, 5, 1, compiled_sort(EAGER, 1))
    check_places(np.full((3, 40), 8, np.int32), 0, 8, compiled_sort(EAGER, 8))


def test_blocks_of_tokens_are_chosen_for_in_turn(monkeypatch):
    monkeypatch.setattr(routing, "_BLOCK_TOKENS", 128)
    check_choice(draw_tokens(8, 300, 3, seed=2), CHOICE, choose(EAGER, CHOICE))


def test_longer_steps_are_sorted_by_xla():
    experts = draw_experts(8, 3, 600, one_for_all=False, seed=3)
    lines = routing.tpu_sort(jnp.array(experts), jnp.int32(2), 4)
    expected = xla_sort(jnp.array(experts), 2, 4)
    np.testing.assert_array_equal(lines.tokens, expected.tokens)


@pytest.mark.parametrize("bad", [np.nan, *long(np.inf, -np.inf)])
def test_a_token_that_is_not_finite_leaves_the_others_alone(bad):
    case = draw_tokens(8, 40, 10**6, seed=4)
    expected = simulate(compiled_choose(EAGER, CHOICE), *case)
    case[0][7] = bad
    normalised, weights, experts = simulate(compiled_choose(EAGER, CHOICE), *case)
    others = np.arange(40) != 7
    np.testing.assert_array_equal(normalised[others], expected[0][others])
    np.testing.assert_array_equal(weights[:, others], expected[1][:, others])
    np.testing.assert_array_equal(experts[:, others], expected[2][:, others])
    assert np.all((experts >= 0) & (experts <= 8))
    assert np.all(np.isnan(weights[:, 7]))


def test_a_router_that_is_not_finite_spoils_the_weights_of_all_tokens():
    case = draw_tokens(8, 40, 10**6, seed=10)
    case[3][2] = np.nan
    _, weights, experts = simulate(compiled_choose(EAGER, CHOICE), *case)
    assert np.all(np.isnan(weights))
    np.testing.assert_array_equal(
        experts[:, case[4]], np.arange(3)[:, None] + 0 * experts[:, case[4]]
    )


def test_experts_of_equal_infinite_logits_are_unlike():
    x, norm, matrices, bias, is_token = draw_tokens(8, 5, 3, seed=9)
    case = x, norm, matrices, np.full_like(bias, -np.inf), np.ones_like(is_token)
    _, _, experts = simulate(compiled_choose(EAGER, CHOICE), *case)
    np.testing.assert_array_equal(experts, [[0] * 5, [1] * 5, [2] * 5])


def count_the_token_itself(monkeypatch):
    own = routing._earlier
    monkeypatch.setattr(
        routing, "_earlier", lambda size: own(size) + jnp.eye(size, dtype="bfloat16")
    )


def count_later_tokens(monkeypatch):
    own = routing._earlier
    monkeypatch.setattr(routing, "_earlier", lambda size: own(size).T)


@pytest.mark.parametrize("fault", [count_the_token_itself, *long(count_later_tokens)])
def test_a_seeded_fault_of_the_places_is_noticed(fault, monkeypatch):
    experts = draw_experts(8, 3, 40, one_for_all=False, seed=5)
    check_places(experts, 2, 4, sort(EAGER, 4))
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        check_places(experts, 2, 4, sort(EAGER, 4))


def choose_the_last_of_equals(monkeypatch):
    monkeypatch.setattr(routing.jnp, "min", jnp.max)  # type: ignore[attr-defined]


def leave_out_the_norm(monkeypatch):
    monkeypatch.setattr(routing, "_normalised", lambda x, weight, eps, from_one: x)


@pytest.mark.parametrize("fault", [choose_the_last_of_equals, *long(leave_out_the_norm)])
def test_a_seeded_fault_of_the_choice_is_noticed(fault, monkeypatch):
    case = draw_tokens(8, 40, 3, seed=6)
    check_choice(case, CHOICE, choose(EAGER, CHOICE))
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        check_choice(case, CHOICE, choose(EAGER, CHOICE))
