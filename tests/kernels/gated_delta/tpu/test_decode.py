"""The TPU's gated delta rule of decode rows, simulated on the CPU, against float64."""

from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from jax.experimental.pallas.tpu import force_tpu_interpret_mode

from sgl_jax.kernels.gated_delta.tpu import decode as module
from sgl_jax.kernels.gated_delta.tpu import shared
from tests.kernels.gated_delta.problems import (
    LAYER,
    Case,
    Program,
    build,
    cases,
    expected_delta,
)
from tests.kernels.simulation import EAGER, MODES, NoWait, simulate
from tests.support.long import long, long_but

SHAPE = {"key_dim": 128, "value_dim": 128, "tokens": 24, "rows": 7, "max_snapshots": 1}
PROGRAMS = (
    Program(**SHAPE, key_heads=1, group=2),
    Program(**SHAPE, key_heads=2, group=1, max_drafts=2),
    Program(**SHAPE, key_heads=1, group=2, dtype=jnp.bfloat16, max_drafts=1),
)
CHANNELS = Program(**SHAPE, key_heads=1, group=2, by_channel=True, max_drafts=2)
BFLOAT16_STATES = PROGRAMS[2]._replace(state_dtype=jnp.bfloat16)
TOLERANCE = {jnp.float32: 1e-5, jnp.bfloat16: 1e-2}


def decode(program, interpret):
    @jax.jit
    def run(problem):
        batch = problem.make_batch(program)
        with force_tpu_interpret_mode(interpret):
            return module.decode_gated_delta(
                problem.tokens, problem.states, jnp.int32(LAYER), batch
            )

    return run


compiled = lru_cache(decode)


def check(case, run):
    """Outputs of decode rows, and every slot; other tokens are left as they were."""
    problem, program = build(case), case.program
    out, states = simulate(run, problem)
    decoded = int(problem.step.q_lens[: problem.step.num_decode].sum())
    only_decodes = case._replace(prefills=[], snapshots=[])
    step = build(only_decodes).step
    want, want_states = expected_delta(problem._replace(step=step))
    tolerance = TOLERANCE[program.dtype]
    out, states = np.asarray(out, np.float64), np.asarray(states, np.float64)
    np.testing.assert_allclose(out[:decoded], want[:decoded], rtol=0, atol=tolerance)
    np.testing.assert_array_equal(out[decoded:], np.asarray(problem.v, np.float64)[decoded:])
    tolerance = TOLERANCE[program.state_dtype]
    np.testing.assert_allclose(states, want_states, rtol=0, atol=tolerance)


def check_in_both_modes(case):
    """Trace anew, as a fault that was just seeded needs."""
    for mode in MODES.values():
        check(case, decode(case.program, mode))


@pytest.mark.parametrize("mode", ["lazy", *long("eager")])
@settings(max_examples=3, deadline=None)
@given(case=cases(PROGRAMS))
def test_decode_rows_agree_with_the_reference(mode, case):
    check(case, compiled(case.program, MODES[mode]))


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=150, deadline=None)
@given(case=cases((*PROGRAMS, CHANNELS, BFLOAT16_STATES)))
def test_decode_rows_agree_with_the_reference_however_often_it_is_tried(mode, case):
    check(case, compiled(case.program, MODES[mode]))


DRAFTS = Case(PROGRAMS[1], [(4, 3), (0, 1), (9, 2), (7, 3), (8, 1)], [(3, 7)], [], seed=1)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "case",
    [DRAFTS, DRAFTS._replace(decodes=[]), DRAFTS._replace(program=CHANNELS)],
    ids=["some", "none", "channels"],
)
def test_drafts_beside_a_prompt(case, mode):
    check(case, compiled(case.program, MODES[mode]))


def test_states_in_bfloat16():
    case = Case(BFLOAT16_STATES, [(4, 2), (0, 1), (9, 2)], [], [], seed=1)
    check(case, compiled(case.program, EAGER))


def test_small_states_have_more_dmas_in_flight():
    assert [module.num_buffers(32 // tp * 128 * 128 * 4) for tp in (1, 2, 4, 8)] == [3, 4, 8, 8]


def forget_a_wait(name):
    def seed(monkeypatch):
        copy = getattr(module, name)

        def without(*args):
            copies = copy(*args)
            return [*map(NoWait, copies)] if isinstance(copies, list) else NoWait(copies)

        monkeypatch.setattr(module, name, without)

    seed.__name__ = f"forget_to_wait_for{name}"
    return seed


def use_another_buffer(monkeypatch):
    before = module._state_before
    monkeypatch.setattr(
        module, "_state_before", lambda kernel, token, first: before(kernel, token // 2, first)
    )


def write_the_next_slot(monkeypatch):
    slot = shared.StateRows.slot_written
    monkeypatch.setattr(shared.StateRows, "slot_written", lambda rows, token: slot(rows, token) + 1)


def go_on_from_the_row_of_the_next_token(monkeypatch):
    monkeypatch.setattr(
        shared.StateRows, "is_first", lambda rows, token: token == rows.token_rows[token]
    )


def scale_to_another_length(monkeypatch):
    monkeypatch.setattr(module, "unit", lambda x: shared.unit(x) * 1.01)


FAULTS = (
    *map(forget_a_wait, ("_token_copies", "_state_copy", "_result_copies")),
    use_another_buffer,
    write_the_next_slot,
    go_on_from_the_row_of_the_next_token,
    scale_to_another_length,
)


# Each traces and compiles the kernel anew.
@pytest.mark.parametrize("fault", long_but(FAULTS, FAULTS[0]))
def test_a_seeded_fault_is_noticed(fault, monkeypatch):
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        check_in_both_modes(DRAFTS)
