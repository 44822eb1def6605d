"""Selects the running requests that need tokens from the next step; reserves slots for decode rows.

This is the first part of planning a step, done for the rows of all ranks at once. On a rank with
too little memory, nothing is reserved here: `step_builder.py` chooses the rows to retract.
"""

from itertools import pairwise
from typing import NamedTuple, TypeAlias

import numpy as np

from sgl_jax.core.compiled import compiled
from sgl_jax.core.step_plan import Int32Array, IntpArray, RowIndex
from sgl_jax.mem_cache.pages.req_to_token_pool import RowTables
from sgl_jax.mem_cache.release import free_passed_window_pages
from sgl_jax.mem_cache.row_growth import grow_rows
from sgl_jax.scheduler.in_flight_rows import ROW, Records
from sgl_jax.scheduler.kept_states import keep_up_with_rows
from sgl_jax.scheduler.ranks import Ranks
from sgl_jax.scheduler.running_rows import RowColumns

# Of a row that needs more than one token, or is scored: the tokens that it needs, in this step or
# later, the number of them before the first scored position, and its priority.
Need: TypeAlias = tuple[int, int, int]


class Runnable(NamedTuple):
    """The rows that need tokens, rank by rank, oldest first, by their index on their rank."""

    decoding: RowIndex  # need one token, without drafts
    bounds: list[int]  # rank k's are decoding[bounds[k] : bounds[k + 1]]
    has_slots: list[bool]  # by rank: whether every decode row has a slot; otherwise none has
    prefilling: dict[int, dict[int, Need]]  # by rank that has any, then by row


def choose_runnable(ranks: Ranks) -> Runnable:
    """Select each rank's rows; take pages for the tokens of decode rows if possible."""
    running, tables = ranks.running, ranks.tables
    rows, bounds = ranks.active()
    if ranks.has_windows:
        lens = np.minimum(tables.kv_committed_len[rows], running.known_len[rows])
        free_passed_window_pages(tables, ranks.memories, rows, lens)
        if ranks.has_states:
            keep_up_with_rows(ranks, rows, lens)
    decoding, own_decoding, decode_bounds, prefilling, prefill_bounds = _find_needs(
        rows, bounds, running.records, tables.kv_committed_len
    )
    fits = grow_rows(tables, ranks.memories, decoding["row"], decoding["end"], decode_bounds)
    needs: dict[int, dict[int, Need]] = {}
    if len(prefilling):  # in most steps, most ranks only decode
        wanted, unscored = prefilling["num_wanted"].tolist(), prefilling["num_unscored"].tolist()
        priorities = running.priority[prefilling["row"]].tolist()
        each = zip(wanted, unscored, priorities, strict=True)
        by_row = list(zip(prefilling["own_row"].tolist(), each, strict=True))
        for dp_rank, (first, end) in enumerate(pairwise(prefill_bounds.tolist())):
            if first < end:
                needs[dp_rank] = dict(by_row[first:end])
    return Runnable(own_decoding, decode_bounds.tolist(), fits.tolist(), needs)


# A row that needs tokens.
_NEED = np.dtype(
    [
        ("row", np.int64),  # joint
        ("own_row", np.int64),  # index on its rank
        ("end", np.int32),  # `decode_ends` of a decode row
        ("num_wanted", np.int32),  # tokens
        ("num_unscored", np.int32),  # of these, before the first scored position
    ],
    align=True,
)


@compiled("(int64[::1], int64[::1], row[::1], int32[::1])", row=ROW)
def _find_needs(
    rows: RowIndex, bounds: IntpArray, records: Records, committed_len: Int32Array
) -> tuple[Records, RowIndex, IntpArray, Records, IntpArray]:
    """Select the rows that need tokens: decode rows, which need one without a score, and prefill
    rows.

    Returns `_NEED` records of both, each with the bounds of the ranks' parts, and the `own_row` of
    the first apart, since compiled loops take contiguous rows. `rows` are joint; rank k's are in
    [bounds[k], bounds[k + 1]). `records` ROW and `committed_len` are of all joint rows. A row needs
    no token if its last permitted token was, or may have been, sampled.
    """
    num_ranks = len(bounds) - 1
    rows_per_rank = len(records) // num_ranks
    decoding, prefilling = np.empty(len(rows), _NEED), np.empty(len(rows), _NEED)
    own_decoding = np.empty(len(rows), np.int64)
    decode_bounds, prefill_bounds = np.zeros_like(bounds), np.zeros_like(bounds)
    num_decoding = num_prefilling = 0
    assert bounds[num_ranks] == len(rows)
    assert len(records) == len(committed_len)
    for rank in range(num_ranks):
        for i in range(bounds[rank], bounds[rank + 1]):
            assert 0 <= rows[i] < len(records)
            row, committed = records[rows[i]], committed_len[rows[i]]
            if row.planned_len + row.unread_drafts >= row.max_len:
                continue
            num_wanted = row.planned_len - committed
            num_unscored = max(row.score_start - committed, 0)
            if num_wanted == 1 and num_unscored > 0:
                need = decoding[num_decoding]
                own_decoding[num_decoding] = rows[i] - rank * rows_per_rank
                num_decoding += 1
            else:
                need = prefilling[num_prefilling]
                num_prefilling += 1
            need.row, need.own_row = rows[i], rows[i] - rank * rows_per_rank
            need.end = committed + row.unread_drafts + 1
            need.num_wanted, need.num_unscored = num_wanted, num_unscored
        decode_bounds[rank + 1], prefill_bounds[rank + 1] = num_decoding, num_prefilling
    return (
        decoding[:num_decoding],
        own_decoding[:num_decoding],
        decode_bounds,
        prefilling[:num_prefilling],
        prefill_bounds,
    )


def decode_ends(tables: RowTables, running: RowColumns, rows: RowIndex) -> Int32Array:
    """Return int32[n], slots that each row needs for one token, if all its drafts were accepted."""
    ends: Int32Array = tables.kv_committed_len[rows] + running.unread_drafts[rows] + np.int32(1)
    return ends
