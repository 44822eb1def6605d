"""State space models in XLA, against float64 token by token."""

from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_jax.kernels.gated_delta.by_token import recur_by_token
from sgl_jax.kernels.state_space import xla
from tests.kernels.gated_delta.problems import LAYER, Case, Program, cases, num_tokens
from tests.kernels.state_space.problems import Lines

PROGRAMS = (
    Program(rows=5, tokens=140),
    Program(max_drafts=3, rows=11, tokens=140, key_heads=1, dtype=jnp.bfloat16),
)
TOLERANCE = {jnp.float32: 2e-5, jnp.bfloat16: 5e-2}


@lru_cache
def compiled(program, recur):
    @jax.jit
    def run(lines):
        batch = lines.problem.make_batch(program)
        return recur(lines.tokens, lines.problem.states, jnp.int32(LAYER), batch)

    return run


def check(case, heads_each, recur=xla.state_space):
    lines, used = Lines.of(case, heads_each), num_tokens(Lines.of(case, heads_each).problem)
    out, states = compiled(case.program, recur)(lines)
    assert out.dtype == case.program.dtype
    want, want_states = lines.expected()
    tolerance = TOLERANCE[case.program.dtype]
    out, states = (np.asarray(x, np.float64) for x in (out, states))
    np.testing.assert_allclose(out[:used], want[:used], rtol=0, atol=tolerance)
    assert np.isfinite(out).all()
    # Slots that are not written are as they were, be it NaN.
    np.testing.assert_allclose(states, want_states, rtol=0, atol=tolerance)


@settings(max_examples=6, deadline=None)
@given(case=cases(PROGRAMS), heads_each=st.sampled_from((1, 2)))
def test_any_step_agrees_with_token_by_token(case, heads_each):
    check(case, heads_each)


def test_a_step_token_by_token():
    recur = partial(recur_by_token, xla.SPACE_RULE)
    check(Case(PROGRAMS[0], [(5, 1)], [(0, 70), (3, 20)], [(1, 0.4)], seed=1), 2, recur)


@pytest.mark.long
@settings(max_examples=200, deadline=None)
@given(case=cases(PROGRAMS), heads_each=st.sampled_from((1, 2)))
def test_any_step_agrees_with_token_by_token_however_often_it_is_tried(case, heads_each):
    check(case, heads_each)
