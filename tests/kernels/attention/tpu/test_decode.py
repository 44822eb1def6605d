"""Decode attention for TPU, simulated on the CPU, against float64."""

from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from sgl_jax.kernels.attention.tpu import decode, stacks
from sgl_jax.kernels.attention.tpu.decode import decode_attention
from sgl_jax.kernels.attention.tpu.shared import Pages
from sgl_jax.kernels.attention.tpu.tuned import DecodeBlocks
from tests.kernels.attention.problems import (
    Case,
    Program,
    build,
    cases,
    expected,
    simulated,
    with_new_tokens,
)
from tests.kernels.simulation import (
    EAGER,
    LAZY,
    MODES,
    NoWait,
    SimulationError,
    assert_close,
    simulate,
)
from tests.support.long import long, long_but

PROGRAMS = (
    Program(page_size=16, kv_heads=2, group=4),
    Program(page_size=64, kv_heads=1, group=3, max_drafts=2, sliding_window=40),
    Program(page_size=16, kv_heads=4, group=1, soft_cap=2.0, sinks=True, dtype=jnp.bfloat16),
)
# Every way that heads can share registers, and every combination of options.
SHAPES = (
    Program(page_size=16, kv_heads=8, group=4, dtype=jnp.bfloat16, sinks=True, rows=3, tokens=16),
    Program(page_size=16, kv_heads=8, group=1, max_drafts=3, rows=3, tokens=16),
    Program(page_size=128, kv_heads=2, group=8, max_drafts=1, soft_cap=3.0, rows=3, tokens=16),
    Program(page_size=64, kv_heads=2, group=6, head_dim=256, sliding_window=64, rows=3, tokens=16),
    Program(max_drafts=2, sliding_window=48, is_chunked=True, rows=3, tokens=16),
    Program(page_size=32, sliding_window=64, is_chunked=True, rows=3, tokens=16),
)
# Products in the type of the queries.
EIGHT_BITS = (
    Program(page_size=32, kv_heads=2, group=4, cache_dtype=jnp.int8),
    Program(
        page_size=32,
        kv_heads=4,
        group=2,
        dtype=jnp.bfloat16,
        cache_dtype=jnp.int8,
        sliding_window=75,
        sinks=True,
    ),
)
BLOCKS = DecodeBlocks(block_keys=64, part_keys=32)  # small, so that rows have several


@pytest.fixture(autouse=True)
def several_turns(monkeypatch):
    """Blocks without masks are computed on in several turns."""
    monkeypatch.setattr(stacks, "TURN_KEYS", 32)


def attend(program, interpret, blocks=BLOCKS):
    return simulated(decode_attention, program, interpret, blocks)


compiled = lru_cache(attend)


def check(case, run):
    problem, program = build(case), case.program
    out = simulate(run, problem, with_new_tokens(problem, program))
    want, _ = expected(problem, program)
    decode_tokens = problem.q_lens[: problem.num_decode].sum()
    assert_close(out[:decode_tokens], want[:decode_tokens], program.dtype)
    np.testing.assert_array_equal(out[decode_tokens:], problem.q[decode_tokens:])


decode_cases = partial(cases, max_prefills=1, max_chunk=4)


@pytest.mark.parametrize("mode", ["lazy", *long("eager")])
@settings(max_examples=3, deadline=None)
@given(case=decode_cases(PROGRAMS))
def test_decode_rows_agree_with_float64_without_races(mode, case):
    check(case, compiled(case.program, MODES[mode]))


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=100, deadline=None)
@given(case=decode_cases(PROGRAMS + SHAPES + EIGHT_BITS))
def test_decode_rows_agree_with_float64_however_often_it_is_tried(mode, case):
    check(case, compiled(case.program, MODES[mode]))


@pytest.mark.parametrize("program", long_but(SHAPES, SHAPES[0], SHAPES[3]))
def test_heads_of_every_shape_share_registers(program):
    case = Case(program, [(150, 1), (31, 1 + program.max_drafts)], [], 0, seed=2)
    check(case, compiled(program, EAGER))


@pytest.mark.parametrize("mode", ["eager", *long("lazy")])
def test_rows_longer_than_the_blocks_that_chips_get(mode, monkeypatch):
    monkeypatch.setattr(stacks, "TURN_KEYS", 1024)
    program = Program(page_size=128, kv_heads=8, group=4, rows=2, tokens=8, max_len=1280)
    case = Case(program, [(1150, 1), (1023, 1)], [], 2, seed=4)
    check(case, compiled(program, MODES[mode], DecodeBlocks(block_keys=1024, part_keys=256)))


@pytest.mark.parametrize(
    ("program", "mode"),
    [(EIGHT_BITS[1], "eager"), pytest.param(EIGHT_BITS[0], "lazy", marks=pytest.mark.long)],
)
def test_a_cache_of_8_bits_gives_what_float64_makes_of_what_it_holds(program, mode):
    case = Case(program, [(150, 1), (47, 1), (100, 1)], [(3, 1)], 0, seed=5)
    check(case, compiled(program, MODES[mode]))


def test_a_chip_that_converts_8_bits_by_itself_gives_the_same(monkeypatch):
    monkeypatch.setattr(decode, "should_move_bits", lambda *_: False)
    case = Case(EIGHT_BITS[1], [(150, 1), (47, 1), (100, 1)], [(3, 1)], 0, seed=5)
    check(case, attend(case.program, LAZY))


def test_an_empty_row_among_decode_rows_is_passed_over():
    program = PROGRAMS[0]
    case = Case(program, [(70, 1), (33, 0), (0, 0), (20, 1), (5, 0)], [], 0, seed=3)
    for mode in MODES.values():
        check(case, compiled(program, mode))


SEVERAL_BLOCKS = Case(
    PROGRAMS[0]._replace(sliding_window=75), [(150, 1), (47, 1), (100, 1)], [], 0, seed=1
)
DRAFTED = Case(PROGRAMS[0]._replace(max_drafts=2), [(150, 3), (47, 1), (100, 2)], [], 0, seed=1)


def forget_to_wait_for_pages(monkeypatch):
    monkeypatch.setattr(Pages, "wait", lambda *_: None)


def forget_to_wait_for(name):
    def seed(monkeypatch):
        copy = getattr(decode, name)
        monkeypatch.setattr(decode, name, lambda *args: NoWait(copy(*args)))

    seed.__name__ = f"forget_to_wait_for_{name}"
    return seed


def forget_to_wait_for_results(monkeypatch):
    monkeypatch.setattr(decode, "wait_out", lambda *_: None)


def read_the_other_buffer(monkeypatch):
    attend_block = stacks.attend_block

    def wrong(kernel, row, block):
        attend_block(kernel, row, block._replace(buffer=1 - block.buffer))

    monkeypatch.setattr(decode, "attend_block", wrong)


def fetch_another_page(monkeypatch):
    copy = Pages.page_copy
    monkeypatch.setattr(Pages, "page_copy", lambda pages, block, i: copy(pages, block, i ^ 1))


def see_a_key_too_many(monkeypatch):
    seen = stacks.seen_keys
    monkeypatch.setattr(
        stacks, "seen_keys", lambda kernel, row, position: seen(kernel, row, position - 1)
    )


def see_a_key_too_few(monkeypatch):
    seen = stacks.seen_keys
    monkeypatch.setattr(
        stacks, "seen_keys", lambda kernel, row, position: seen(kernel, row, position + 1)
    )


def leave_values_of_unused_slots(monkeypatch):
    monkeypatch.setattr(Pages, "clear_values", lambda *_: None)


def take_the_scores_of_another_turn(monkeypatch):
    monkeypatch.setattr(stacks, "with_following", lambda turns: [(turn, turn) for turn in turns])


def give_rows_of_a_stack_to_its_first_head(monkeypatch):
    monkeypatch.setattr(stacks, "own_columns", lambda _, x, width: x[:, :width])


MISSING_WAITS = (
    forget_to_wait_for_pages,
    forget_to_wait_for("q_copy"),
    forget_to_wait_for("table_copy"),
    forget_to_wait_for_results,
)
FAULTS = (
    *MISSING_WAITS,
    read_the_other_buffer,
    fetch_another_page,
    see_a_key_too_many,
    see_a_key_too_few,
    leave_values_of_unused_slots,
    give_rows_of_a_stack_to_its_first_head,
)


@pytest.mark.long
def test_keys_taken_in_another_order_than_masks_are_noticed(monkeypatch):
    """An 8-bit cache gives its even keys first."""
    monkeypatch.setattr(
        stacks, "positions", lambda tile: jax.lax.broadcasted_iota(jnp.int32, tile, 1)
    )
    program = EIGHT_BITS[1]
    with pytest.raises(AssertionError):
        check(Case(program, [(150, 1), (47, 1)], [], 0, seed=5), attend(program, LAZY))


def name_of(parameter):
    return parameter.__name__


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(SEVERAL_BLOCKS, id="window"),
        pytest.param(DRAFTED, id="drafts", marks=pytest.mark.long),
    ],
)
def test_without_a_fault_the_cases_of_the_faults_pass(case):
    check(case, compiled(case.program, LAZY))


# Each traces and compiles the kernel anew.


@pytest.mark.parametrize("fault", long_but(FAULTS, fetch_another_page), ids=name_of)
def test_a_seeded_fault_gives_wrong_results(fault, monkeypatch):
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        check(SEVERAL_BLOCKS, attend(SEVERAL_BLOCKS.program, LAZY))


@pytest.mark.parametrize(
    "fault", [forget_to_wait_for_pages, *long(forget_to_wait_for_results)], ids=name_of
)
def test_a_missing_wait_is_a_race(fault, monkeypatch):
    fault(monkeypatch)
    with pytest.raises(SimulationError, match="race"):
        check(SEVERAL_BLOCKS, attend(SEVERAL_BLOCKS.program, EAGER))


@pytest.mark.long
@pytest.mark.parametrize(
    "fault", [see_a_key_too_many, take_the_scores_of_another_turn], ids=name_of
)
def test_a_fault_where_all_keys_are_seen_or_drafts_see_fewer_is_noticed(fault, monkeypatch):
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        check(DRAFTED, attend(DRAFTED.program, LAZY))
