"""The walk of `ledger.py` in slices, for an engine that is never idle. It changes nothing.

A slice compares records between two steps, so it is exact although steps run between slices. Each
slice is bounded in entries and takes a few milliseconds at most:

- once: the counts, the holders of rows and leases, the pages locked by leases, and, for each pool,
  the free list and the pages of rows (vectorized);
- some rows at a time: their columns;
- some leases at a time: their prefix, compared with the path that they have locked;
- some nodes at a time: `CacheWalk`.

Only `audit` checks the cursors of waiting requests, and the sums and order of the eviction sets.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain

from sgl_jax.mem_cache.ledger import defect_error, find_imbalance, find_suspects
from sgl_jax.mem_cache.ledger_walk import (
    Finding,
    check_holders,
    check_locked_pages,
    check_owners,
    check_prefix,
    check_rows,
    live_leases,
    locks_of,
    walk_failure,
)
from sgl_jax.mem_cache.rank_memory import RankMemory
from sgl_jax.mem_cache.tree.cache_walk import CacheWalk

# Entries per slice.
_LEASES = 16
_ROW_CELLS = 1 << 17


def audit_slices(memory: RankMemory, num_running: Callable[[], int]) -> Iterator[None]:
    """Walk the memory of a rank, and pause after each slice. The memory may change in between.

    `num_running` returns the number of requests with a lease. A slice that finds a defect raises
    `LedgerError` with the findings of a full walk. The walk ends early if the memory is rebuilt.
    """
    cache = memory.cache
    for findings in _slices(memory, num_running):
        try:
            found = list(findings)
        except Exception as error:
            found = [walk_failure(error)]
        if found:
            raise defect_error(memory, [*found, *find_suspects(memory)])
        yield
        if memory.cache is not cache:
            return


def _slices(memory: RankMemory, num_running: Callable[[], int]) -> Iterator[Iterable[Finding]]:
    """Yield the slices. Each is computed when its findings are taken."""
    yield _check_counts(memory, num_running)
    yield check_holders(memory)
    num_rows = memory.rows.num_rows
    rows_at_once = max(_ROW_CELLS // memory.rows.pages[0].size, 1)
    for first in range(0, num_rows, rows_at_once):
        yield check_rows(memory, first, min(first + rows_at_once, num_rows))
    leases = live_leases(memory)
    for first in range(0, len(leases), _LEASES):
        some = leases[first : first + _LEASES]
        yield chain.from_iterable(
            check_prefix(memory, lease) for lease in some if not lease.released
        )
    yield check_locked_pages(memory, live_leases(memory))
    walk = CacheWalk(memory.cache)
    for pool in range(len(memory.allocators)):
        yield check_owners(memory, live_leases(memory), pool)
    while walk.has_nodes:
        yield _check_nodes(walk, memory)
    for pool in range(len(memory.allocators)):
        yield _check_rest(walk, pool)


def _check_counts(memory: RankMemory, num_running: Callable[[], int]) -> Iterator[Finding]:
    imbalance = find_imbalance(memory, num_running())
    if imbalance is not None:
        yield Finding(imbalance)


def _check_nodes(walk: CacheWalk, memory: RankMemory) -> Iterator[Finding]:
    walk.check_some(locks_of(memory))
    yield from ()


def _check_rest(walk: CacheWalk, pool: int) -> Iterator[Finding]:
    walk.check_rest(pool)
    yield from ()
