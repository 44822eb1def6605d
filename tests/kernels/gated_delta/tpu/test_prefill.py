"""The TPU's gated delta rule of prefill rows, simulated on the CPU, against float64."""

from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from jax.experimental.pallas.tpu import force_tpu_interpret_mode

from sgl_jax.kernels.gated_delta.tpu import by_channel, by_head, inverse, pairs
from sgl_jax.kernels.gated_delta.tpu import prefill as module
from tests.kernels.gated_delta.problems import (
    LAYER,
    Case,
    Program,
    build,
    cases,
    expected_delta,
)
from tests.kernels.simulation import EAGER, MODES, NoWait, simulate
from tests.support.long import long

SHAPE = {"key_dim": 128, "value_dim": 128, "tokens": 200, "rows": 5, "max_snapshots": 3}
PROGRAMS = (
    Program(**SHAPE, key_heads=2, group=2),
    Program(**SHAPE, key_heads=1, group=3, max_drafts=2),
    Program(**SHAPE, key_heads=2, group=1, dtype=jnp.bfloat16, max_drafts=1),
)
# An odd number of heads, and several of a key; roundings.
CHANNELS = (
    Program(**SHAPE, key_heads=1, group=3, by_channel=True),
    Program(**SHAPE, key_heads=2, group=1, by_channel=True, dtype=jnp.bfloat16, max_drafts=1),
)
BFLOAT16_STATES = PROGRAMS[2]._replace(state_dtype=jnp.bfloat16)
TOLERANCE = {jnp.float32: 1e-5, jnp.bfloat16: 2e-2}


def prefill(program, interpret):
    @jax.jit
    def run(problem):
        batch = problem.make_batch(program)
        with force_tpu_interpret_mode(interpret):
            return module.prefill_gated_delta(
                problem.tokens, problem.states, jnp.int32(LAYER), batch
            )

    return run


compiled = lru_cache(prefill)


def check(case, run):
    """Outputs of prefill rows, and every slot; other tokens are left as they were."""
    check_problem(build(case), case.program, run)


def check_problem(problem, program, run):
    out, states = simulate(run, problem)
    step = problem.step
    decoded, used = int(step.q_lens[: step.num_decode].sum()), int(step.q_lens.sum())
    want, want_states = expected_delta(problem)
    for row in range(step.num_decode):  # which another kernel computes
        slots = step.slots_out[row] + np.arange(step.q_lens[row])
        want_states[LAYER, slots] = problem.states[LAYER, slots]
    tolerance = TOLERANCE[program.dtype]
    out, states = np.asarray(out, np.float64), np.asarray(states, np.float64)
    np.testing.assert_allclose(out[decoded:used], want[decoded:used], rtol=0, atol=tolerance)
    others = np.r_[:decoded, used : len(out)]
    np.testing.assert_array_equal(out[others], np.asarray(problem.v, np.float64)[others])
    np.testing.assert_allclose(states, want_states, rtol=0, atol=tolerance)


def check_in_both_modes(case):
    """Trace anew, as a fault that was just seeded needs."""
    for mode in MODES.values():
        check(case, prefill(case.program, mode))


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=200, deadline=None)
@given(case=cases((*PROGRAMS, *CHANNELS, BFLOAT16_STATES)))
def test_prefill_rows_agree_with_the_reference(mode, case):
    check(case, compiled(case.program, MODES[mode]))


MIXED = Case(PROGRAMS[0], [(4, 1)], [(30, 130), (0, 40), (7, 1)], [(1, 0.3), (2, 1.0)], seed=1)


MIXED_CASES = {
    "some": MIXED,
    "channels": MIXED._replace(program=CHANNELS[0]),
    "the same keys": MIXED._replace(same_keys=True),
    "none": MIXED._replace(prefills=[]),
}
# A mode each.
MIXED_BY_DEFAULT = {("some", "eager"), ("channels", "lazy"), ("none", "eager")}


@pytest.mark.parametrize(
    ("case", "mode"),
    [
        pytest.param(
            *(case, mode),
            id=f"{name}-{mode}",
            marks=() if (name, mode) in MIXED_BY_DEFAULT else pytest.mark.long,
        )
        for name, case in MIXED_CASES.items()
        for mode in MODES
    ],
)
def test_prompts_beside_decode_rows(case, mode):
    check(case, compiled(case.program, MODES[mode]))


@pytest.mark.long
@pytest.mark.parametrize("program", [PROGRAMS[2], *long(BFLOAT16_STATES, CHANNELS[1])])
def test_bfloat16(program):
    check(MIXED._replace(program=program, same_keys=True), compiled(program, EAGER))


@pytest.mark.long
def test_a_step_of_less_than_a_chunk():
    program = PROGRAMS[0]._replace(tokens=8)
    check(Case(program, [(4, 1)], [(0, 7)], [], seed=1), compiled(program, EAGER))


PROMPT = Case(PROGRAMS[0], [], [(0, 190)], [], seed=3)


@pytest.mark.parametrize("program", [PROGRAMS[0], *long(PROGRAMS[2])])
@pytest.mark.parametrize("beta", [0.0, 1e-6, 1.0])
def test_a_beta_at_its_ends(beta, program):
    problem = build(PROMPT._replace(program=program))
    problem.beta[:, 0] = beta
    check_problem(problem, program, compiled(program, EAGER))


@pytest.mark.parametrize("program", [PROGRAMS[0], *long(PROGRAMS[2], CHANNELS[0])])
def test_much_is_forgotten_and_then_little(program):
    problem = build(PROMPT._replace(program=program, same_keys=True))
    problem.log_decay[:, 0] = -1e-5
    problem.log_decay[::7, 0, 0] = np.resize([-120.3, -1000, -1e-7, -90.7], len(problem.q[::7]))
    problem.log_decay[:, 1, 0] = np.where(
        np.arange(len(problem.log_decay)) % 64 < 40, -101.7, -2e-4
    )
    check_problem(problem, program, compiled(program, EAGER))


def forget_a_wait(name):
    def seed(monkeypatch):
        for_each = getattr(module, name)

        def without(kernel, chunk, do):
            for_each(kernel, chunk, lambda copy: do(NoWait(copy)))

        monkeypatch.setattr(module, name, without)

    seed.__name__ = f"forget_to_wait_in{name}"
    return seed


def go_on_from_another_buffer(monkeypatch):
    before = module.state_before
    monkeypatch.setattr(
        module, "state_before", lambda kernel, chunk: before(kernel, jnp.maximum(chunk - 1, 0))
    )


def see_one_token_less(monkeypatch):
    monkeypatch.setattr(pairs, "_is_seen", lambda row, column: column < row)


def see_one_token_more(monkeypatch):
    monkeypatch.setattr(pairs, "_is_seen", lambda row, column: column <= row + 1)


def take_the_decay_of_other_blocks(monkeypatch):
    sizes = by_channel._SIZES
    monkeypatch.setattr(by_channel, "_SIZES", [*sizes[:3], sizes[2], *sizes[4:]])


def write_another_slot(monkeypatch):
    kernel_of = module.ChunkKernel

    def wrong(chunks, *others):
        return kernel_of(chunks._replace(targets=chunks.snapshots), *others)

    monkeypatch.setattr(module, "ChunkKernel", wrong)


def take_a_chunk_for_full(monkeypatch):
    monkeypatch.setattr(module._Chunks, "length", lambda chunks, chunk: jnp.int32(64))


def solve_one_size_less(monkeypatch):
    below = inverse._below
    monkeypatch.setattr(inverse, "_below", lambda pair, size: below(pair, size) * (size < 32))


def solve_one_row_less(monkeypatch):
    substituted = inverse._substituted
    monkeypatch.setattr(
        inverse, "_substituted", lambda pairs: [x.at[-1].set(0) for x in substituted(pairs)]
    )


def forget_the_fine_part(monkeypatch):
    parts = by_head.coarse_and_fine
    monkeypatch.setattr(by_head, "coarse_and_fine", lambda decay: (parts(decay)[0], 0 * decay))


FAULTS = (
    *map(forget_a_wait, ("_for_inputs", "_for_results")),
    go_on_from_another_buffer,
    see_one_token_less,
    see_one_token_more,
    write_another_slot,
    take_a_chunk_for_full,
    solve_one_size_less,
    solve_one_row_less,
    forget_the_fine_part,
)


# Each traces and compiles the kernel anew.
@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS)
def test_a_seeded_fault_is_noticed(fault, monkeypatch):
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        check_in_both_modes(MIXED)


@pytest.mark.long
@pytest.mark.parametrize(
    "fault", [take_the_decay_of_other_blocks, see_one_token_less, see_one_token_more]
)
def test_a_seeded_fault_of_channels_is_noticed(fault, monkeypatch):
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        check_in_both_modes(MIXED._replace(program=CHANNELS[0]))
