"""The kernels of a TPU for gated delta nets, one after the other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sgl_jax.kernels.gated_delta.batch import check_heads
from sgl_jax.layers.kernels import kernels_of
from tests.kernels.gated_delta.problems import (
    LAYER,
    Case,
    Program,
    build,
    expected_delta,
    num_tokens,
)
from tests.kernels.simulation import simulate


@pytest.mark.parametrize("heads", [(32, 64, 128), (32, 128, 256), (129, 128, 128)])
def test_heads_that_the_kernels_do_not_compute_are_refused(heads):
    with pytest.raises(ValueError, match=f"got {heads[0]} of {heads[1]} and {heads[2]}"):
        check_heads(*heads)


def test_decode_and_prefill_follow_each_other():
    program = Program(key_dim=128, value_dim=128, tokens=200, max_drafts=2, key_heads=1)
    prefills = [(30, 130), (0, 40), (7, 1)]
    case = Case(program, [(4, 1), (8, 3)], prefills, [(2, 0.3), (3, 1.0)], seed=1)
    problem, call = build(case), kernels_of("cpu", "pallas").gated_delta

    @jax.jit
    def run(problem):
        return call(problem.tokens, problem.states, jnp.int32(LAYER), problem.make_batch(program))

    out, states = simulate(run, problem)
    want, want_states = expected_delta(problem)
    used = num_tokens(problem)
    np.testing.assert_allclose(out[:used], want[:used], rtol=0, atol=1e-5)
    np.testing.assert_allclose(states, want_states, rtol=0, atol=1e-5)
    assert np.isfinite(out).all()
