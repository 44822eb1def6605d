"""The gated delta rule and its convolution in XLA, against float64 token by token."""

import re
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from jax import lax

from sgl_jax.kernels.gated_delta import xla
from sgl_jax.kernels.gated_delta.batch import CHUNK_TOKENS, DeltaInputs, StateBatch
from sgl_jax.kernels.gated_delta.by_token import recur_by_token
from sgl_jax.kernels.row_blocks import RowBlocks, invariant_rows
from tests.kernels.gated_delta.problems import (
    LAYER,
    Case,
    Program,
    build,
    cases,
    expected_conv,
    expected_delta,
    num_tokens,
)
from tests.support.long import long

PROGRAMS = (
    Program(),
    Program(max_drafts=3, rows=11, tokens=140, key_heads=1),
    Program(group=1, key_dim=8, width=2, rows=5, tokens=200),
    Program(by_channel=True, max_drafts=1),
)
BFLOAT16 = Program(dtype=jnp.bfloat16, state_dtype=jnp.bfloat16, max_drafts=2)
TOLERANCE = {jnp.float32: 1e-5, jnp.bfloat16: 2e-2}


BY_TOKEN = partial(recur_by_token, xla.DELTA_RULE)


@lru_cache
def compiled(program, recur):
    """Both calls of one layer: (out, states) of each."""

    @jax.jit
    def run(problem):
        batch = problem.make_batch(program)
        layer = jnp.int32(LAYER)
        delta = recur(problem.tokens, problem.states, layer, batch)
        return delta, xla.causal_conv(*problem.conv, layer, batch)

    return run


def check(case, recur=xla.gated_delta):
    problem, program = build(case), case.program
    used = num_tokens(problem)
    tolerance = TOLERANCE[program.dtype]
    results = compiled(program, recur)(problem)
    for got, want in zip(results, (expected_delta(problem), expected_conv(problem)), strict=True):
        (out, states), (want_out, want_states) = got, want
        assert out.dtype == program.dtype
        out, states = (np.asarray(x, np.float64) for x in (out, states))
        np.testing.assert_allclose(out[:used], want_out[:used], rtol=0, atol=tolerance)
        assert np.isfinite(out).all()
        # Slots that are not written are as they were, be it NaN.
        np.testing.assert_allclose(states, want_states, rtol=0, atol=tolerance)


@settings(max_examples=8, deadline=None)
@given(case=cases((*PROGRAMS, BFLOAT16)))
def test_any_step_agrees_with_token_by_token(case):
    check(case)


@pytest.mark.long
@settings(max_examples=400, deadline=None)
@given(case=cases((*PROGRAMS, BFLOAT16)))
def test_any_step_agrees_with_token_by_token_however_often_it_is_tried(case):
    check(case)


@pytest.mark.parametrize("program", [PROGRAMS[0], PROGRAMS[3]], ids=["heads", "channels"])
def test_much_is_forgotten_before_little(program):
    """Sums of decays are then large, and differences of them would be those of rounding."""
    check(Case(program, [], [(0, 128)], [], seed=0))


STEPS = {
    "nothing": ([], [], []),
    "more decode rows than are computed at once": ([(i, 1 + i % 4) for i in range(10)], [], []),
    "a prompt, two snapshots": ([(5, 2)], [(0, 130)], [(1, 0.4), (1, 1.0)]),
    "the same key again and again": ([(5, 4)], [(0, 64), (7, 64)], [(1, 0.7)]),
}


@pytest.mark.parametrize("recur", [xla.gated_delta, BY_TOKEN], ids=["chunks", "tokens"])
@pytest.mark.parametrize("name", STEPS)
def test_a_step(name, recur):
    case = Case(PROGRAMS[1], *STEPS[name], seed=1, same_keys="same" in name)
    check(case, recur)


def run_row(
    problem, program, first, end, kv_start, slots, snapshots=(), *, recur=xla.gated_delta, decodes=0
):
    """Tokens [first, end) of the problem as a row's; read and write such slots."""
    arrays = [np.zeros_like(x) for x in problem[:5]]
    for array, source in zip(arrays, problem[:5], strict=True):
        array[: end - first] = source[first:end]
    kept = np.zeros((4, 3), np.int32)
    for i, (length, slot) in enumerate(snapshots):
        kept[i] = 0, length, slot
    row = (np.array([x], np.int32) for x in (*slots,))
    lengths = (np.array([x], np.int32) for x in (kv_start, end - first))
    batch = StateBatch.build(*row, jnp.asarray(kept), *lengths, jnp.int32(decodes), program.tokens)
    inputs = DeltaInputs(*arrays)
    return jax.jit(recur)(inputs, problem.states, jnp.int32(LAYER), batch)


@pytest.mark.parametrize("cut", [63, *long(1, 64, 100, 192)])
def test_a_snapshot_is_the_state_of_a_run_that_stops_there(cut):
    problem = build(Case(PROGRAMS[0], [], [(0, 200)], [], seed=2))
    out, going_on = run_row(problem, PROGRAMS[0], 0, 200, 0, (0, 8), [(cut, 9)])
    some, stopped = run_row(problem, PROGRAMS[0], 0, cut, 0, (0, 9))
    np.testing.assert_allclose(going_on[LAYER, 9], stopped[LAYER, 9], rtol=0, atol=1e-6)
    rest, resumed = run_row(problem._replace(states=going_on), PROGRAMS[0], cut, 200, cut, (9, 10))
    np.testing.assert_allclose(resumed[LAYER, 10], going_on[LAYER, 8], rtol=0, atol=1e-5)
    both = np.concatenate([some[:cut], rest[: 200 - cut]])
    np.testing.assert_allclose(both, out[:200], rtol=0, atol=1e-5)


def test_token_by_token_a_state_does_not_depend_on_how_a_prompt_is_cut():
    program = BFLOAT16._replace(max_drafts=0)
    problem = build(Case(program, [], [(0, 100)], [], seed=2))
    recur = BY_TOKEN
    with invariant_rows(RowBlocks()):
        out, whole = run_row(problem, program, 0, 100, 0, (0, 8), [(70, 9)], recur=recur)
        some, states = run_row(problem, program, 0, 70, 0, (0, 10), recur=recur)
        assert (states[LAYER, 10] == whole[LAYER, 9]).all()
        assert (some[:70] == out[:70]).all()
        for token in range(70, 100):
            given, slots = problem._replace(states=states), (10, 10)
            own, states = run_row(
                given, program, token, token + 1, token, slots, recur=recur, decodes=1
            )
            assert (own[0] == out[token]).all()
    assert (states[LAYER, 10] == whole[LAYER, 8]).all()


LARGE = Program(key_heads=4, key_dim=128, value_dim=128, rows=8, tokens=128, max_snapshots=8)


@pytest.mark.parametrize("call", ["delta", "conv"])
@pytest.mark.parametrize("tokens", [128, *long(8)])
def test_donated_states_are_changed_in_place(call, tokens):
    """A copy of them would be in the program's temporary memory."""
    problem = build(Case(LARGE._replace(tokens=tokens), [(3, 1)], [], [], seed=0))
    arrays = problem[:6] if call == "delta" else problem.conv

    def run(arrays, states, step):
        batch = StateBatch.build(*step, tokens)
        layer = jnp.int32(LAYER)
        if call == "delta":
            return xla.gated_delta(DeltaInputs(*arrays), states, layer, batch)
        return xla.causal_conv(*arrays, states, layer, batch)

    *inputs, states = arrays
    slots = 64 * CHUNK_TOKENS if call == "conv" else 256
    states = jax.ShapeDtypeStruct((LAYER + 1, slots, *states.shape[2:]), states.dtype)
    program = jax.jit(run, donate_argnums=1).lower(inputs, states, problem.step).compile()
    memory = program.memory_analysis()
    num_bytes = states.size * states.dtype.itemsize
    assert memory.alias_size_in_bytes >= num_bytes
    assert memory.temp_size_in_bytes < num_bytes / 4


def test_layers_of_a_loop_write_some_states_and_copy_none():
    program = Program(max_drafts=3, rows=1, tokens=4, max_snapshots=1)
    built = build(Case(program, [(4, 3)], [], [], seed=0))
    problem = jax.tree.map(jnp.asarray, built)
    states = problem.conv[2]

    def run(states, of_delta, problem):
        batch = problem.make_batch(program)

        def layer(number, carry):
            x, states, of_delta = carry
            x, states = xla.causal_conv(x, problem.weight, states, number, batch)
            out, of_delta = xla.gated_delta(problem.tokens, of_delta, number, batch)
            return x * jnp.sum(out), states, of_delta

        return lax.fori_loop(0, len(states), layer, (problem.u, states, of_delta))

    # As users' programs are compiled: tests go without most optimisations.
    options = {"xla_cpu_use_fusion_emitters": True, "xla_backend_optimization_level": 3}
    lowered = jax.jit(run, donate_argnums=(0, 1)).lower(states, problem.states, problem)
    compiled = lowered.compile(compiler_options=options)
    for kept in (states, problem.states):
        shape = ",".join(map(str, kept.shape))
        assert f"f32[{shape}]" in compiled.as_text()
        assert not re.search(rf"f32\[{shape}\]\S* copy\(", compiled.as_text())
