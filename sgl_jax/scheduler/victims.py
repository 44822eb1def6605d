"""Costs of retracting running requests, and the requests that are spared.

A retracted request recomputes its tokens, unless the tree still has them. Pages that only it held
are soon evicted, since memory is short; pages locked by other leases stay. A retracted request is
spared until it has gained as many new tokens as it lost, so at most half of all computed tokens are
recomputed.
"""

import numpy as np

from sgl_jax.core.step_plan import BoolArray, Int32Array, IntpArray, RowIndex
from sgl_jax.mem_cache.rank_memory import RankMemory
from sgl_jax.scheduler.running_rows import RunningRows


def recompute_cost(memory: RankMemory, rows: RowIndex) -> Int32Array:
    """Return the number of tokens that each of `rows` would recompute after a retract: int32[n]."""
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
    """Return which `rows` have gained fewer tokens than they had lost at their start: bool[n]."""
    spared: BoolArray = running.known_len[rows] < running.regained_len[rows]
    return spared


def by_cost(memory: RankMemory, running: RunningRows, rows: RowIndex) -> IntpArray:
    """Return the indices of `rows`, oldest first, in the order of retracting: protected rows last,
    then by cost; among equals the youngest first."""
    costs, spared = recompute_cost(memory, rows), is_protected(running, rows)
    order: IntpArray = np.lexsort((-np.arange(len(rows)), costs, spared))
    return order
