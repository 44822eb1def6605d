"""The TPU's convolution of gated delta nets, simulated on the CPU, against float64."""

from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from jax.experimental.pallas.tpu import force_tpu_interpret_mode

from sgl_jax.kernels.gated_delta.tpu import conv as module
from tests.kernels.gated_delta.problems import (
    LAYER,
    Case,
    Program,
    build,
    cases,
    expected_conv,
    num_tokens,
)
from tests.kernels.simulation import EAGER, MODES, NoWait, simulate
from tests.support.long import long, long_but

PROGRAMS = (
    Program(key_heads=1, group=2, key_dim=128, value_dim=128, tokens=150, max_drafts=1, rows=12),
    Program(key_heads=1, group=1, key_dim=64, value_dim=128, tokens=64, width=3),
    Program(key_heads=1, group=1, key_dim=64, value_dim=128, tokens=70, dtype=jnp.bfloat16),
)
TOLERANCE = {jnp.float32: 1e-5, jnp.bfloat16: 2e-2}


def conv(program, interpret):
    @jax.jit
    def run(problem):
        batch = problem.make_batch(program)
        with force_tpu_interpret_mode(interpret):
            return module.causal_conv(*problem.conv, jnp.int32(LAYER), batch)

    return run


compiled = lru_cache(conv)


def check(case, run):
    problem, used = build(case), num_tokens(build(case))
    out, states = (np.asarray(x, np.float64) for x in simulate(run, problem))
    want, want_states = expected_conv(problem)
    np.testing.assert_allclose(out[:used], want[:used], rtol=0, atol=TOLERANCE[case.program.dtype])
    assert not out[used:].any()
    # States are inputs as they were.
    np.testing.assert_array_equal(states, want_states)


def check_in_both_modes(case):
    """Trace anew, as a fault that was just seeded needs."""
    for mode in MODES.values():
        check(case, conv(case.program, mode))


# By default in one mode: a fixed case is tried in both.
@pytest.mark.parametrize("mode", ["lazy", *long("eager")])
@settings(max_examples=2, deadline=None)
@given(case=cases(PROGRAMS, max_prefills=4))
def test_any_step_agrees_with_the_reference(mode, case):
    check(case, compiled(case.program, MODES[mode]))


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=100, deadline=None)
@given(case=cases(PROGRAMS, max_decodes=9, max_prefills=3))
def test_any_step_agrees_with_the_reference_however_often_it_is_tried(mode, case):
    check(case, compiled(case.program, MODES[mode]))


MIXED = Case(
    PROGRAMS[0],
    [(4, 1), (0, 2), (9, 2), (1, 1), (2, 1), (30, 2), (8, 1)],
    [(30, 70), (3, 0), (0, 40), (7, 1)],
    [(7, 0.3), (7, 0.5), (9, 1.0)],
    seed=1,
)


@pytest.mark.parametrize("mode", ["eager", *long("lazy")])
@pytest.mark.parametrize(
    "case", [MIXED, MIXED._replace(decodes=[], prefills=[])], ids=["some", "nothing"]
)
def test_more_rows_than_buffers(case, mode):
    check(case, compiled(case.program, MODES[mode]))


def test_channels_that_do_not_fill_lanes_are_refused():
    case = Case(Program(), [(4, 1)], [], [], seed=1)
    with pytest.raises(ValueError, match="rows of 128, got 96 channels"):
        conv(case.program, EAGER)(build(case))


def forget_a_wait(name):
    def seed(monkeypatch):
        copy = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args: NoWait(copy(*args)))

    seed.__name__ = f"forget_to_wait_for{name}"
    return seed


def see_the_token_before(monkeypatch):
    lines = module._lines

    def wrong(kernel, token, count):
        return lines(kernel, jnp.maximum(token - 1, 0) if count == 1 else token, count)

    monkeypatch.setattr(module, "_lines", wrong)


def keep_the_state_before(monkeypatch):
    keep = module._keep
    monkeypatch.setattr(module, "_keep", lambda kernel, i, slot: keep(kernel, i - 1, slot))


def write_the_next_slot(monkeypatch):
    write = module._write
    monkeypatch.setattr(module, "_write", lambda kernel, n, slot: write(kernel, n, slot + 1))


def begin_every_row_from_nothing(monkeypatch):
    monkeypatch.setattr(module, "_begin_row", lambda *_: None)


FAULTS = (
    *map(forget_a_wait, ("_read", "_write")),
    see_the_token_before,
    keep_the_state_before,
    write_the_next_slot,
    begin_every_row_from_nothing,
)


# Each traces and compiles the kernel anew.
@pytest.mark.parametrize("fault", long_but(FAULTS, FAULTS[0]))
def test_a_seeded_fault_is_noticed(fault, monkeypatch):
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        check_in_both_modes(MIXED)
