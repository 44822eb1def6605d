"""How a step's prompts are cut into chunks, against plain Python."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings

from sgl_jax.kernels.gated_delta.batch import CHUNK_TOKENS, NO_SLOT, StateBatch
from tests.kernels.gated_delta.problems import Case, Program, cases, make_step

PROGRAMS = (
    Program(),
    Program(max_drafts=3, rows=7, tokens=130, max_snapshots=6),
    Program(rows=3, tokens=3, max_snapshots=0),
)


@jax.jit
def build_arrays(step):
    return StateBatch.build(*step, PROGRAMS[0].tokens)


def build(case):
    program = case.program
    return StateBatch.build(*make_step(case), program.tokens, program.max_drafts)


def expected_chunks(step):
    """(first token, end, row, source, target, snapshot) of each chunk, token by token."""
    chunks, token = [], int(step.q_lens[: step.num_decode].sum())
    for row in range(step.num_decode, len(step.q_lens)):
        start = token
        kept = {n: int(s) for r, n, s in step.snapshots if r == row and s > 0}
        source = int(step.slots_in[row])
        for i in range(step.q_lens[row]):
            token += 1
            length, is_last = step.kv_starts[row] + i + 1, i + 1 == step.q_lens[row]
            if (i + 1) % CHUNK_TOKENS == 0 or length in kept or is_last:
                target = int(step.slots_out[row]) if is_last else NO_SLOT
                chunks.append((start, token, row, source, target, kept.get(length, NO_SLOT)))
                start, source = token, NO_SLOT
    return chunks


def check(case):
    step, batch = make_step(case), build(case)
    want = expected_chunks(step)
    n = int(batch.num_chunks)
    assert n == len(want)
    starts, ends = batch.chunk_starts[:-1], batch.chunk_starts[1:]
    slots = (batch.chunk_sources, batch.chunk_targets, batch.chunk_snapshots)
    got = np.stack([starts, ends, batch.chunk_rows, *slots], axis=1)
    assert [tuple(map(int, chunk)) for chunk in got[:n]] == want
    # Beyond them there is nothing to compute and nothing to write.
    assert (np.stack(slots)[:, n:] == NO_SLOT).all()
    total = int(step.q_lens.sum())
    assert (np.asarray(batch.chunk_starts)[n:] == total).all()
    rows = np.repeat(np.arange(len(step.q_lens)), step.q_lens)
    np.testing.assert_array_equal(batch.token_rows[:total], rows)
    np.testing.assert_array_equal(batch.valid, np.arange(case.program.tokens) < total)
    np.testing.assert_array_equal(batch.q_offsets, [0, *np.cumsum(step.q_lens)])
    used = np.flatnonzero(step.q_lens)
    assert batch.num_rows == (used[-1] + 1 if len(used) else 0)


@settings(max_examples=8, deadline=None)
@given(case=cases(PROGRAMS))
def test_chunks_of_any_step_are_those_of_plain_python(case):
    check(case)


@pytest.mark.long
@settings(max_examples=150, deadline=None)
@given(case=cases(PROGRAMS))
def test_chunks_of_any_step_are_right_however_often_it_is_tried(case):
    check(case)


STEPS = {
    "nothing": ([], [], []),
    "decode rows alone": ([(9, 1), (1, 1)], [], [(0, 1.0)]),
    "a prompt of two chunks and a snapshot at its end": ([], [(0, 128)], [(0, 1.0)]),
    "snapshots within a chunk, at its start and where the row began": (
        [(5, 1)],
        [(70, 100), (0, 30)],
        [(1, 0.64), (1, 0.1), (1, 0.0), (2, 0.5)],
    ),
    "an empty row between others": ([], [(0, 65), (3, 0), (0, 1)], [(1, 0.5)]),
    "a full step": ([(4, 1)] * 4, [(0, 126), (64, 126)], []),
}


@pytest.mark.parametrize("name", STEPS)
def test_chunks(name):
    check(Case(PROGRAMS[0], *STEPS[name], seed=3))


def test_there_is_room_for_the_most_chunks_that_a_step_can_have():
    """Rows of one token behind rows of whole chunks, and each snapshot cuts one more."""
    program = Program(rows=4, tokens=4 * CHUNK_TOKENS, max_snapshots=3)
    case = Case(
        program, [], [(0, 65), (0, 65), (0, 65), (0, 61)], [(0, 0.5), (1, 0.5), (3, 0.5)], 0
    )
    assert int(build(case).num_chunks) == 10
    check(case)


def test_a_batch_is_built_by_a_traced_program():
    case = Case(PROGRAMS[0], *STEPS["an empty row between others"], seed=3)
    for traced, eager in zip(
        jax.tree.leaves(build_arrays(make_step(case))), jax.tree.leaves(build(case)), strict=True
    ):
        np.testing.assert_array_equal(traced, eager)
