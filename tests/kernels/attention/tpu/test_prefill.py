"""Prefill attention for TPU, simulated on the CPU, against float64."""

from functools import lru_cache
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings

from sgl_jax.kernels.attention.tpu import prefill, query_blocks
from sgl_jax.kernels.attention.tpu.prefill import prefill_attention
from sgl_jax.kernels.attention.tpu.shared import Pages
from sgl_jax.kernels.attention.tpu.tuned import PrefillBlocks
from sgl_jax.kernels.pallas_tpu import wait
from tests.kernels.attention.problems import (
    Case,
    Program,
    build,
    cases,
    expected,
    simulated,
    with_new_tokens,
)
from tests.kernels.simulation import MODES, NoWait, assert_close, simulate
from tests.support.long import long

MAX_CHUNK = 80  # more than a block of queries
PLAIN = Program(page_size=16, kv_heads=2, group=4, tokens=256, max_len=280)
PROGRAMS = (
    PLAIN,
    # A row may have fewer pages than a block of keys.
    Program(
        page_size=64,
        kv_heads=1,
        group=3,
        head_dim=64,
        sliding_window=50,
        soft_cap=2.0,
        tokens=256,
        max_len=128,
    ),
    Program(
        page_size=16,
        kv_heads=4,
        group=1,
        head_dim=256,
        sinks=True,
        sliding_window=150,
        dtype=jnp.bfloat16,
        tokens=256,
        max_len=280,
    ),
)
MORE_PROGRAMS = (
    Program(page_size=256, kv_heads=1, group=16, tokens=256, max_len=600),
    Program(page_size=128, kv_heads=2, group=7, soft_cap=5.0, tokens=256, max_len=400),
    Program(page_size=16, kv_heads=8, group=1, dtype=jnp.bfloat16, tokens=256, max_len=300),
    Program(page_size=64, kv_heads=2, group=2, sliding_window=1, tokens=256, max_len=300),
    Program(sliding_window=48, is_chunked=True, tokens=256, max_len=300),
    Program(page_size=64, group=2, sliding_window=64, is_chunked=True, tokens=256, max_len=300),
    Program(page_size=16, kv_heads=1, group=1, sinks=True, tokens=256, max_len=300, head_dim=64),
)

# Products in the type of the queries.
EIGHT_BITS = (
    Program(page_size=32, kv_heads=2, group=4, cache_dtype=jnp.int8, tokens=256, max_len=280),
    Program(
        page_size=64,
        kv_heads=4,
        group=1,
        dtype=jnp.bfloat16,
        cache_dtype=jnp.int8,
        sliding_window=150,
        tokens=256,
        max_len=280,
    ),
)


def blocks_of(program):
    """Small blocks, so that short rows have many."""
    part = max(128, program.page_size)
    return PrefillBlocks(64, 16, 2 * part, part, heads=2 - program.kv_heads % 2)


def attend(program, interpret):
    return simulated(prefill_attention, program, interpret, blocks_of(program))


compiled = lru_cache(attend)


def check(case, run):
    """Prefill rows as float64 says, all others untouched."""
    problem, program = build(case), case.program
    out = np.asarray(simulate(run, problem, with_new_tokens(problem, program)))
    want, _ = expected(problem, program)
    begin = problem.q_lens[: problem.num_decode].sum()
    end = problem.q_lens.sum()
    assert_close(out[begin:end], want[begin:end], program.dtype)
    np.testing.assert_array_equal(out[:begin], problem.q[:begin])
    np.testing.assert_array_equal(out[end:], problem.q[end:])


# By default in one mode: a fixed case is tried in both.
@pytest.mark.parametrize("mode", ["lazy", *long("eager")])
@settings(max_examples=2, deadline=None)
@given(case=cases(PROGRAMS, max_prefills=3, max_chunk=MAX_CHUNK))
@example(Case(PLAIN, [], [], 0, 0))
@example(Case(PLAIN, [(9, 1)], [(0, 0), (128, 64), (0, 0), (64, 65)], 2, 1))
@example(Case(PLAIN, [], [(0, 1), (127, 1), (128, 1), (111, 17), (0, 80)], 0, 2))
def test_prefill_rows_agree_with_float64_without_races(mode, case):
    check(case, compiled(case.program, MODES[mode]))


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=80, deadline=None)
@given(case=cases(PROGRAMS + MORE_PROGRAMS + EIGHT_BITS, max_prefills=3, max_chunk=MAX_CHUNK))
def test_many_more_batches_agree_with_float64_without_races(mode, case):
    check(case, compiled(case.program, MODES[mode]))


SPANS = (
    Program(page_size=16, kv_heads=1, group=2, rows=4, tokens=256, max_len=280, num_spans=4),
    Program(
        *(64, 1, 3, 64),
        sliding_window=50,
        rows=4,
        tokens=256,
        max_len=280,
        num_spans=3,
    ),
)


@pytest.mark.parametrize("program", [SPANS[1], *long(SPANS[0])])
@pytest.mark.parametrize("mode", ["lazy", *long("eager")])
def test_queries_see_the_later_keys_of_their_spans(program, mode):
    """Of several chunks, one with the end of a span that began in its cached tokens."""
    run = compiled(program, MODES[mode])
    for seed in range(2):
        check(Case(program, [(9, 1)], [(190, 70), (0, 80), (130, 3)], 0, seed), run)


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=60, deadline=None)
@given(case=cases(SPANS, max_decodes=1, max_prefills=3, max_chunk=MAX_CHUNK))
def test_spans_of_many_more_batches_are_seen(mode, case):
    check(case, compiled(case.program, MODES[mode]))


@pytest.mark.parametrize(
    ("program", "mode"),
    [(EIGHT_BITS[1], "eager"), pytest.param(EIGHT_BITS[0], "lazy", marks=pytest.mark.long)],
)
def test_a_cache_of_8_bits_gives_what_float64_makes_of_what_it_holds(program, mode):
    case = Case(program, [(9, 1)], [(190, 70), (0, 20)], 0, seed=3)
    check(case, compiled(program, MODES[mode]))


# A row of several blocks of queries and of keys, and a second one: what goes wrong shows.
TWO_ROWS = Case(
    Program(page_size=16, kv_heads=1, group=2, rows=4, tokens=128, max_len=280),
    [(20, 1)],
    [(190, 70), (0, 20)],
    0,
    seed=7,
)


@pytest.mark.parametrize("mode", ["eager", *long("lazy")])
def test_two_rows_are_right_where_no_bug_was_seeded(mode):
    check(TWO_ROWS, attend(TWO_ROWS.program, MODES[mode]))


def no_wait_for_keys(pages, block):
    """Compute on what the buffer holds, arrived or not."""


def keys_of_the_other_buffer(kernel, work, attend_heads=query_blocks.attend_heads):
    attend_heads(kernel, work._replace(buffer=1 - work.buffer))


def a_mask_off_by_one(kernel, work, seen=query_blocks.seen_keys):
    return seen(kernel, work._replace(first=work.first + 1))


class PageBefore(NamedTuple):
    """Page ids of a row, each in the place of the next."""

    table: Any

    def __getitem__(self, at):
        table, zero, page = at
        return self.table[table, zero, jnp.maximum(page - 1, 0)]


def the_page_before(pages, block, i, page_copy=Pages.page_copy):
    table = PageBefore(pages.buffers.table)
    return page_copy(pages._replace(buffers=pages.buffers._replace(table=table)), block, i)


def values_of_unused_slots(kernel, block, keys, buffer):
    """Leave NaN where no token lies."""


def results_not_waited_for(kernel, block, do, out_copies=prefill.out_copies):  # type: ignore[attr-defined]
    out_copies(kernel, block, lambda copy: None if do is wait else do(copy))


def queries_not_waited_for(kernel, block, do, q_copies=prefill.q_copies):  # type: ignore[attr-defined]
    q_copies(kernel, block, lambda copy: do(NoWait(copy)))


def page_ids_not_waited_for(pages, row, table, table_copy=Pages.table_copy):
    return NoWait(table_copy(pages, row, table))


def more_queries_than_the_row_has(kernel, block, do, runs=query_blocks.block_runs):
    tokens = jnp.minimum(block.num_tokens + 1, kernel.blocks.queries)
    runs(kernel, block._replace(num_tokens=jnp.where(block.num_tokens > 0, tokens, 0)), do)


def masked_blocks_taken_for_clear(kernel, work, attend_heads=query_blocks.attend_heads):
    attend_heads(kernel, work._replace(position=None))


def never_the_first_keys(kernel, work, attend_heads=query_blocks.attend_heads):
    attend_heads(kernel, work._replace(is_first=jnp.bool(False)))


@pytest.mark.parametrize(
    ("module", "part", "bug", "mode"),
    [
        (Pages, "wait", no_wait_for_keys, "eager"),
        pytest.param(
            prefill, "out_copies", results_not_waited_for, "eager", marks=pytest.mark.long
        ),
        *(
            pytest.param(*own, "lazy", marks=pytest.mark.long)
            for own in (
                (Pages, "wait", no_wait_for_keys),
                (query_blocks, "seen_keys", a_mask_off_by_one),
                (query_blocks, "attend_heads", keys_of_the_other_buffer),
                (Pages, "page_copy", the_page_before),
                (query_blocks, "block_runs", more_queries_than_the_row_has),
                (prefill, "clear_unseen_values", values_of_unused_slots),
                (prefill, "q_copies", queries_not_waited_for),
                (Pages, "table_copy", page_ids_not_waited_for),
                (query_blocks, "attend_heads", masked_blocks_taken_for_clear),
                (query_blocks, "attend_heads", never_the_first_keys),
            )
        ),
    ],
)
def test_a_seeded_bug_is_noticed(module, part, bug, mode, monkeypatch):
    monkeypatch.setattr(module, part, bug)
    with pytest.raises(AssertionError):
        check(TWO_ROWS, attend(TWO_ROWS.program, MODES[mode]))
