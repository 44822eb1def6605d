"""Chooses the number of decode steps of a plan, and reserves their slots.

A plan has several steps if it has only decode rows, none of them with a grammar or with a hidden
state to return, and no request waits. A row's tokens after the first count like drafts: they are
certain once the result is read.
"""

from collections.abc import Sequence

import numpy as np

from sgl_jax.core.step_plan import Int32Array
from sgl_jax.mem_cache.row_growth import grow_rows
from sgl_jax.scheduler.ranks import Ranks
from sgl_jax.scheduler.step_builder import StepBuilder


def reserve_steps(ranks: Ranks, builders: Sequence[StepBuilder], most: int) -> Int32Array | None:
    """Return the steps of each decode row, int32[n], rank by rank, in which at most `most` tokens
    are generated; None for one step.

    No row gets a step after its last permitted token. Rather than retract a request, all rows take
    one step if a rank lacks pages for more.
    """
    if any(builder.chunks for builder in builders):
        return None
    running, tables = ranks.running, ranks.tables
    rows, bounds = ranks.join([builder.decode_rows for builder in builders])
    if (running.has_grammar[rows] | running.returns_hidden[rows]).any():
        return None
    unread = running.unread_drafts[rows]
    num_steps = np.minimum(running.max_len[rows] - running.planned_len[rows] - unread, most)
    if num_steps.max() == 1:
        return None
    ends = tables.kv_committed_len[rows] + unread + num_steps
    return num_steps if all(grow_rows(tables, ranks.memories, rows, ends, bounds)) else None
