"""Costs of retracting running requests, and the requests that are spared.

A retracted request computes its tokens again, unless the tree still has them. Its own pages are
soon evicted, since memory is short; pages that other leases have locked too stay. A retracted
request is spared until it has gained as many new tokens as it lost, so at most every second
computed token of an engine is computed again.
"""

import numpy as np

from sgl_jax.core.step_plan import BoolArray, Int32Array, IntpArray, RowIndex
from sgl_jax.mem_cache.rank_memory import RankMemory
from sgl_jax.scheduler.running_rows import RunningRows


def recompute_cost(memory: RankMemory, rows: RowIndex) -> Int32Array:
    """Tokens that each of `rows` would compute again after a retract: int32[n]."""
    tables = memory.rows
    committed: Int32Array = tables.kv_committed_len[rows]
    if memory.groups[0].sliding_window is not None:
        # Windows are locked page by page, so no whole prefix is shared.
        return np.asarray(committed)
    protected = tables.cache_protected_len[rows] // np.int32(memory.page_size)
    shared = memory.locked[0].num_shared(tables.pages, rows, protected)
    cost: Int32Array = committed - shared * np.int32(memory.page_size)
    return cost


def is_protected(running: RunningRows, rows: RowIndex) -> BoolArray:
    """Return which `rows` have gained fewer tokens than they had lost when they started:
    bool[n]."""
    spared: BoolArray = running.known_len[rows] < running.regained_len[rows]
    return spared


def by_cost(memory: RankMemory, running: RunningRows, rows: RowIndex) -> IntpArray:
    """Indices of `rows`, oldest first, in the order of retracting.

    Protected rows come last, then the cost counts; among equals the youngest comes first.
    """
    costs, spared = recompute_cost(memory, rows), is_protected(running, rows)
    order: IntpArray = np.lexsort((-np.arange(len(rows)), costs, spared))
    return order
