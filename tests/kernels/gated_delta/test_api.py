"""Who computes gated delta nets where; and the kernels of a TPU one after the other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sgl_jax.kernels.gated_delta import tpu, xla
from sgl_jax.kernels.gated_delta.api import gated_delta_implementation
from sgl_jax.kernels.gated_delta.batch import check_heads
from tests.kernels.gated_delta.problems import (
    LAYER,
    Case,
    Program,
    build,
    expected_delta,
    num_tokens,
)
from tests.kernels.simulation import simulate


def test_each_backend_has_its_own():
    assert gated_delta_implementation("xla") == (xla.gated_delta, xla.causal_conv)
    kernels = (tpu.gated_delta, tpu.causal_conv)
    assert gated_delta_implementation("pallas") == kernels
    simulated = gated_delta_implementation("pallas", simulate=True)
    assert tuple(call.__wrapped__ for call in simulated) == kernels


def test_an_unknown_backend_is_refused():
    with pytest.raises(ValueError, match="must be one of pallas, xla, got 'cuda'"):
        gated_delta_implementation("cuda")


@pytest.mark.parametrize("heads", [(32, 64, 128), (32, 128, 256), (129, 128, 128)])
def test_heads_that_the_kernels_do_not_compute_are_refused(heads):
    with pytest.raises(ValueError, match=f"got {heads[0]} of {heads[1]} and {heads[2]}"):
        check_heads(*heads)


def test_decode_and_prefill_follow_each_other():
    program = Program(key_dim=128, value_dim=128, tokens=200, max_drafts=2, key_heads=1)
    prefills = [(30, 130), (0, 40), (7, 1)]
    case = Case(program, [(4, 1), (8, 3)], prefills, [(2, 0.3), (3, 1.0)], seed=1)
    problem, call = build(case), gated_delta_implementation("pallas", simulate=True).gated_delta

    @jax.jit
    def run(problem):
        return call(problem.tokens, problem.states, jnp.int32(LAYER), problem.make_batch(program))

    out, states = simulate(run, problem)
    want, want_states = expected_delta(problem)
    used = num_tokens(problem)
    np.testing.assert_allclose(out[:used], want[:used], rtol=0, atol=1e-5)
    np.testing.assert_allclose(states, want_states, rtol=0, atol=1e-5)
    assert np.isfinite(out).all()
