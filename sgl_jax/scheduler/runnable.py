"""Which running requests want tokens from the next step, and slots for those that decode.

The first part of planning a step, done for the rows of all ranks at once. On a rank where memory
does not suffice, nothing is reserved here: what gives way is decided in `step_builder.py`.
"""

from typing import NamedTuple

import numpy as np

from sgl_jax.core.step_plan import Int32Array, RowIndex
from sgl_jax.mem_cache.rank_memory import grow_rows
from sgl_jax.mem_cache.release import let_go_windows
from sgl_jax.mem_cache.req_to_token_pool import RowTables
from sgl_jax.scheduler.ranks import Ranks
from sgl_jax.scheduler.running_rows import NOT_SCORED, RowColumns


class Runnable(NamedTuple):
    """The rows of one rank that want tokens, oldest first."""

    decoding: RowIndex  # want one token, without drafts
    has_slots: bool  # whether a slot is reserved for each of these; else for none
    prefilling: list[int]  # want more, or are scored
    num_prefill_tokens: int  # that these want, in this step or later


def choose_runnable(ranks: Ranks) -> list[Runnable]:
    """What runs on each rank; takes pages for the tokens of decode rows where it can."""
    running, tables = ranks.running, ranks.tables
    rows, bounds = ranks.active()
    if ranks.has_windows:
        lens = np.minimum(tables.kv_committed_len[rows], running.known_len[rows])
        let_go_windows(tables, ranks.memories, rows, lens)
    wants_any = running.may_run(rows)
    wanted = running.planned_len[rows] - tables.kv_committed_len[rows]
    wants_one = wants_any & (wanted == 1) & (running.score_start[rows] == NOT_SCORED)
    num_ones = np.count_nonzero(wants_one)
    decoding = rows
    if num_ones < len(rows):
        decoding = rows[wants_one]
        bounds = ranks.bounds(decoding)
    ends = decode_ends(tables, running, decoding)
    fits = grow_rows(tables, ranks.memories, decoding, ends, bounds)
    by_rank = ranks.split(decoding, bounds)
    wants_more = wants_any & ~wants_one
    if num_ones == len(rows) or not np.count_nonzero(wants_more):
        return [Runnable(own_rows, fit, [], 0) for own_rows, fit in zip(by_rank, fits, strict=True)]
    prefilling, num_tokens = rows[wants_more], wanted[wants_more]
    bounds = ranks.bounds(prefilling)
    return [
        Runnable(
            decoding=by_rank[k],
            has_slots=fits[k],
            prefilling=own_rows.tolist(),
            num_prefill_tokens=int(num_tokens[bounds[k] : bounds[k + 1]].sum()),
        )
        for k, own_rows in enumerate(ranks.split(prefilling, bounds))
    ]


def decode_ends(tables: RowTables, running: RowColumns, rows: RowIndex) -> Int32Array:
    """Slots each row needs to decode one token, if all its unread drafts were accepted."""
    ends: Int32Array = tables.kv_committed_len[rows] + running.unread_drafts[rows] + np.int32(1)
    return ends
