"""The TPU's kernels of state space models, simulated on the CPU, against float64."""

from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from jax.experimental.pallas.tpu import force_tpu_interpret_mode

from sgl_jax.kernels.gated_delta.tpu import by_head
from sgl_jax.kernels.state_space import tpu
from sgl_jax.kernels.state_space.api import check_state_space
from tests.kernels.gated_delta.problems import LAYER, Case, Program, cases
from tests.kernels.simulation import MODES, simulate
from tests.kernels.state_space.problems import Lines
from tests.support.long import long

SHAPE = {"key_dim": 128, "value_dim": 128, "tokens": 200, "rows": 5, "max_snapshots": 3}
PROGRAMS = (
    Program(**SHAPE, key_heads=1, group=2, max_drafts=2),
    Program(**SHAPE, key_heads=2, group=3),
    Program(**SHAPE, key_heads=2, group=1, dtype=jnp.bfloat16, max_drafts=1),
)
TOLERANCE = {jnp.float32: 2e-5, jnp.bfloat16: 5e-2}


@lru_cache
def compiled(program, interpret):
    @jax.jit
    def run(lines):
        batch, layer = lines.problem.make_batch(program), jnp.int32(LAYER)
        with force_tpu_interpret_mode(interpret):
            return tpu.state_space(lines.tokens, lines.problem.states, layer, batch)

    return run


def check(case, mode):
    lines = Lines.of(case, 2)
    out, states = simulate(compiled(case.program, MODES[mode]), lines)
    want, want_states = lines.expected()
    tolerance, used = TOLERANCE[case.program.dtype], int(lines.problem.step.q_lens.sum())
    out = np.asarray(out, np.float64)
    np.testing.assert_allclose(out[:used], want[:used], rtol=0, atol=tolerance)
    # Slots that are not written are as they were, be it NaN.
    np.testing.assert_allclose(states, want_states, rtol=0, atol=tolerance)
    assert np.isfinite(out).all()


STEPS = {
    "drafts, a prompt of three chunks and snapshots": (
        [(4, 1), (8, 3)],
        [(30, 130), (0, 40), (7, 1)],
        [(2, 0.3), (3, 1.0)],
    ),
    "decode rows alone": ([(9, 1), (0, 1), (77, 2)], [], []),
}


@pytest.mark.parametrize(
    "case",
    [
        (next(iter(STEPS)), PROGRAMS[0], "eager"),
        *long(
            *((name, PROGRAMS[0], mode) for name in STEPS for mode in MODES),
            *((next(iter(STEPS)), own._replace(max_drafts=2), "lazy") for own in PROGRAMS[1:]),
        ),
    ],
    ids=str,
)
def test_steps_agree_with_token_by_token(case):
    name, program, mode = case
    check(Case(program, *STEPS[name], seed=1), mode)


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=15, deadline=None)
@given(case=cases(PROGRAMS))
def test_any_step_agrees_with_token_by_token(mode, case):
    check(case, mode)


@pytest.mark.long
def test_a_fault_in_the_order_of_two_heads_of_a_line_is_found(monkeypatch):
    spread = by_head.HeadDecays.spread

    def exchanged(self, log_decay, heads_each):
        spread(self, log_decay[:, ::-1], heads_each)

    monkeypatch.setattr(by_head.HeadDecays, "spread", exchanged)
    compiled.cache_clear()
    program = PROGRAMS[0]._replace(tokens=70, max_drafts=0)
    with pytest.raises(AssertionError, match="Mismatched"):
        check(Case(program, [], [(0, 66)], [], seed=1), "lazy")
    compiled.cache_clear()


@pytest.mark.parametrize("sizes", [(48, 64, 128), (48, 128, 160), (130, 128, 128), (3, 128, 128)])
def test_heads_that_the_kernels_do_not_compute_are_refused(sizes):
    with pytest.raises(ValueError, match=f"got {sizes[0]} heads, and pairs of {sizes[2]}"):
        check_state_space(*sizes)
