"""The TPU's moves of lines, simulated on the CPU, against numpy."""

from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas.tpu import force_tpu_interpret_mode

from sgl_jax.kernels.expert_dispatch.tpu import moves
from sgl_jax.kernels.expert_dispatch.xla import xla_add, xla_sort
from sgl_jax.layers.moe import silu_gated
from tests.kernels.not_finite import BAD, assert_same_bits
from tests.kernels.simulation import EAGER, MODES, assert_close, simulate
from tests.support.long import long, long_but

TOP_K, EXPERTS = 3, 5
SIZES = ((1, 16), (40, 16), (64, 200))  # tokens and columns
DTYPES = (jnp.float32, jnp.bfloat16)


def move(interpret):
    @jax.jit
    def run(x, weights, experts):
        """Lines, their gates, and the weighted sums of lines times 2."""
        lines = xla_sort(experts, 0, EXPERTS)
        with force_tpu_interpret_mode(interpret):
            gathered = moves.tpu_gather(x, lines)
            gates = moves.tpu_gate(silu_gated, gathered, gathered, lines)
            return gathered, gates, moves.tpu_add(gathered * 2, weights, lines)

    return run


compiled = lru_cache(move)


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    monkeypatch.setattr(moves, "TILE_LINES", 16)
    monkeypatch.setattr(moves, "MAX_WIDTH", 128)


def draw_case(num_tokens, width, dtype, share, seed):
    """Tokens, weights and experts: `share` of the choices are this chip's experts."""
    rng = np.random.default_rng(seed)
    experts = np.argsort(rng.random((EXPERTS, num_tokens)), axis=0)[:TOP_K]
    experts = np.where(rng.random(experts.shape) < share, experts, EXPERTS).astype(np.int32)
    x = rng.normal(size=(num_tokens, width)).astype(dtype)
    return x, rng.random((TOP_K, num_tokens)).astype(np.float32), experts


def check(case, run):
    x, weights, experts = case
    gathered, gates, sums = simulate(run, *case)
    flat = experts.reshape(-1)
    order = np.argsort(flat, kind="stable")[: (flat < EXPERTS).sum()]
    values = np.asarray(x, np.float64)
    lines = values[order % len(x)]
    dtype = x.dtype
    assert_close(gathered[: len(lines)], lines, dtype)
    expected = lines / (1 + np.exp(-lines)) * lines
    # Two results in turn are rounded to the type.
    rtol = 2.0**-7 if dtype == jnp.bfloat16 else 1e-5
    np.testing.assert_allclose(
        np.asarray(gates[: len(lines)], np.float64), expected, rtol=rtol, atol=1e-5
    )
    shares = np.where(experts < EXPERTS, np.asarray(weights, np.float64), 0).sum(axis=0)
    np.testing.assert_allclose(
        np.asarray(sums, np.float64), 2 * values * shares[:, None], rtol=rtol, atol=1e-2 * rtol
    )


@pytest.mark.parametrize("mode", ["lazy", *long("eager")])
@settings(max_examples=2, deadline=None)
@given(
    st.sampled_from(SIZES),
    st.sampled_from(DTYPES),
    st.sampled_from((0.0, 0.1, 0.5, 1.0)),
    st.integers(0, 2**32 - 1),
)
def test_tokens_reach_their_lines_and_come_back(mode, size, dtype, share, seed):
    check(draw_case(*size, dtype, share, seed), compiled(MODES[mode]))


@pytest.mark.parametrize("bad", long_but(BAD, BAD[0]))
def test_a_token_that_is_not_finite_leaves_the_others_alone(bad):
    x, weights, experts = draw_case(40, 16, jnp.float32, 1.0, seed=1)
    _, _, expected = simulate(compiled(EAGER), x, weights, experts)
    x[7] = bad
    _, _, sums = simulate(compiled(EAGER), x, weights, experts)
    others = np.arange(40) != 7
    assert_same_bits(sums[others], expected[others])


@pytest.mark.parametrize("bad", long_but(BAD, BAD[0]))
@pytest.mark.parametrize("add", [xla_add, moves.tpu_add])
def test_a_result_that_is_not_finite_spoils_its_own_token_alone(add, bad):
    """Its token gets no finite sum, however small the weight is: it would look like a result."""
    _, weights, experts = draw_case(40, 200, jnp.float32, 1.0, seed=2)
    weights[0, 7] = 1e-30
    lines = xla_sort(jnp.array(experts), 0, EXPERTS)
    results = np.ones((lines.tokens.size, 200), np.float32)
    with force_tpu_interpret_mode(EAGER):
        clean = add(jnp.array(results), jnp.array(weights), lines)
        results[lines.places[0, 7], 3] = bad
        sums = add(jnp.array(results), jnp.array(weights), lines)
    others = np.arange(40) != 7
    assert_same_bits(sums[others], clean[others])
    assert not np.isfinite(sums[7, 3])


def skip_the_last_tile(monkeypatch):
    """Not the tile whose first line is the last in use."""
    monkeypatch.setattr(moves, "_first_line", lambda tile: moves.pl.program_id(1) * tile + tile)  # type: ignore[attr-defined]


def fetch_the_first_tile_only(monkeypatch):
    monkeypatch.setattr(moves, "_used_tile", lambda column, number, count, tile: (0, column))


@pytest.mark.parametrize("fault", [skip_the_last_tile, *long(fetch_the_first_tile_only)])
def test_a_seeded_fault_is_noticed(fault, monkeypatch):
    case = draw_case(40, 16, jnp.float32, 0.5, seed=3)
    check(case, move(EAGER))
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        check(case, move(EAGER))
