"""Selects the running requests that need tokens from the next step, and reserves slots for decode
rows.

The first part of planning a step, done for the rows of all ranks at once. On a rank with too little
memory, nothing is reserved here: `step_builder.py` chooses the rows that give way.
"""

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from sgl_jax.core.compiled import compiled
from sgl_jax.core.step_plan import Int32Array, IntpArray, RowIndex
from sgl_jax.mem_cache.pages.req_to_token_pool import RowTables
from sgl_jax.mem_cache.pages.row_growth import grow_rows
from sgl_jax.mem_cache.release import let_go_windows
from sgl_jax.scheduler.kept_states import keep_up_with_rows
from sgl_jax.scheduler.ranks import Ranks
from sgl_jax.scheduler.running_rows import NOT_SCORED, RowColumns


class Runnable(NamedTuple):
    """The rows of one rank that need tokens, oldest first."""

    decoding: RowIndex  # need one token, without drafts
    has_slots: bool  # whether every decode row has a slot; else none has
    # By each row that needs more or is scored: the tokens that it needs, in this step or later, and
    # the number of them before the first scored position.
    prefilling: dict[int, tuple[int, int]]
    num_prefill_tokens: int  # that they need together


def choose_runnable(ranks: Ranks) -> list[Runnable]:
    """Select each rank's rows; take pages for the tokens of decode rows if possible."""
    running, tables = ranks.running, ranks.tables
    rows, bounds = ranks.active()
    if ranks.has_windows:
        lens = np.minimum(tables.kv_committed_len[rows], running.known_len[rows])
        let_go_windows(tables, ranks.memories, rows, lens)
        if ranks.has_states:
            keep_up_with_rows(ranks, rows, lens)
    to_compute = _RowsToCompute(
        *_rows_to_compute(
            rows,
            bounds,
            ranks.num_rows,
            running.planned_len,
            running.unread_drafts,
            running.max_len,
            running.score_start,
            tables.kv_committed_len,
        )
    )
    decode_bounds = to_compute.decode_bounds.tolist()
    fits = grow_rows(
        tables, ranks.memories, to_compute.decoding, to_compute.decode_ends, decode_bounds
    )
    own_prefilling, prefill_bounds = (
        to_compute.own_prefilling.tolist(),
        to_compute.prefill_bounds.tolist(),
    )
    needs = list(zip(to_compute.num_wanted.tolist(), to_compute.num_unscored.tolist(), strict=True))
    return [
        Runnable(
            decoding=to_compute.own_decoding[decode_bounds[k] : decode_bounds[k + 1]],
            has_slots=fit,
            prefilling=dict(zip(own_prefilling[first:end], needs[first:end], strict=True)),
            num_prefill_tokens=num_tokens,
        )
        for k, (fit, num_tokens, (first, end)) in enumerate(
            zip(fits, to_compute.num_prefill_tokens.tolist(), pairwise(prefill_bounds), strict=True)
        )
    ]


class _RowsToCompute(NamedTuple):
    """Rows that need tokens, rank by rank: rank k's rows lie in [bounds[k], bounds[k + 1])."""

    decoding: RowIndex  # joint rows that need one token
    own_decoding: RowIndex  # the same, as rows of their ranks
    decode_ends: Int32Array  # `decode_ends` of these
    decode_bounds: IntpArray
    own_prefilling: RowIndex  # that need more, or are scored, as rows of their ranks
    prefill_bounds: IntpArray
    num_wanted: Int32Array  # tokens that each of these needs
    num_unscored: Int32Array  # of these, before the first scored position
    num_prefill_tokens: IntpArray  # [ranks] that these need


@compiled(
    "(int64[::1], int64[::1], int64, int32[::1], int32[::1], int32[::1], int32[::1], int32[::1])"
)
def _rows_to_compute(
    rows: RowIndex,
    bounds: IntpArray,
    num_rows: int,
    planned_len: Int32Array,
    unread_drafts: Int32Array,
    max_len: Int32Array,
    score_start: Int32Array,
    committed_len: Int32Array,
) -> tuple[Any, ...]:
    """The fields of `_RowsToCompute`, for the joint `rows` of ranks of `num_rows` rows each.

    A row whose last permitted token was sampled, or may have been, waits for its result: it needs
    no token.
    """
    num_ranks = len(bounds) - 1
    decoding = np.empty(len(rows), np.int64)
    own_decoding = np.empty(len(rows), np.int64)
    ends = np.empty(len(rows), np.int32)
    own_prefilling = np.empty(len(rows), np.int64)
    num_wanted = np.empty(len(rows), np.int32)
    num_unscored = np.empty(len(rows), np.int32)
    decode_bounds = np.zeros(num_ranks + 1, np.int64)
    prefill_bounds = np.zeros(num_ranks + 1, np.int64)
    num_prefill_tokens = np.zeros(num_ranks, np.int64)
    num_decoding = num_prefilling = 0
    assert bounds[num_ranks] == len(rows)
    for rank in range(num_ranks):
        for i in range(bounds[rank], bounds[rank + 1]):
            row = rows[i]
            assert 0 <= row < len(planned_len)
            if planned_len[row] + unread_drafts[row] >= max_len[row]:
                continue
            wanted = planned_len[row] - committed_len[row]
            if wanted == 1 and score_start[row] == NOT_SCORED:
                decoding[num_decoding] = row
                own_decoding[num_decoding] = row - rank * num_rows
                ends[num_decoding] = committed_len[row] + unread_drafts[row] + 1
                num_decoding += 1
            else:
                own_prefilling[num_prefilling] = row - rank * num_rows
                num_wanted[num_prefilling] = wanted
                num_unscored[num_prefilling] = max(score_start[row] - committed_len[row], 0)
                num_prefilling += 1
                num_prefill_tokens[rank] += wanted
        decode_bounds[rank + 1] = num_decoding
        prefill_bounds[rank + 1] = num_prefilling
    return (
        decoding[:num_decoding],
        own_decoding[:num_decoding],
        ends[:num_decoding],
        decode_bounds,
        own_prefilling[:num_prefilling],
        prefill_bounds,
        num_wanted[:num_prefilling],
        num_unscored[:num_prefilling],
        num_prefill_tokens,
    )


def decode_ends(tables: RowTables, running: RowColumns, rows: RowIndex) -> Int32Array:
    """Slots each row needs to decode one token, if all its unread drafts were accepted."""
    ends: Int32Array = tables.kv_committed_len[rows] + running.unread_drafts[rows] + np.int32(1)
    return ends
