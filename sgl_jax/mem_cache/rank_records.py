"""The records of one data-parallel rank: rows, pages, prefix cache, leases, and locks.

`rank_memory.py` begins and grows leases on them, and `release.py` ends leases. `row_growth.py` and
`row_states.py` work on these records too.
"""

from functools import partial
from typing import Protocol

import numpy as np

from sgl_jax.core.engine_sizes import EngineSizes
from sgl_jax.core.step_plan import Int32Array
from sgl_jax.mem_cache.lease import KVLease, first_page_of
from sgl_jax.mem_cache.pages.locked_pages import LockedPages
from sgl_jax.mem_cache.pages.page_allocator import PageAllocator
from sgl_jax.mem_cache.pages.req_to_token_pool import ReqToTokenPool, RowTables
from sgl_jax.mem_cache.session_leases import SessionLeases
from sgl_jax.mem_cache.tree.block_log import BlockLog
from sgl_jax.mem_cache.tree.radix_cache import ChunkCache, RadixCache

# When pages must be evicted, further pages are evicted ahead of need: one per this many pages of
# the pool, and at most this many.
_PAGES_PER_EVICTED = 512
_MAX_EVICTED_AHEAD = 256


class CacheWatcher(Protocol):
    """Receives the prefixes that a rank's cache gains and that its requests find there."""

    def gained(self, tokens: Int32Array, namespace: str) -> None: ...

    def used(self, tokens: Int32Array, namespace: str) -> None: ...


class RankRecords:
    """The records of rank `dp_rank`, with the given sizes and eviction policy (of `RadixCache`). If
    given, `tables` holds the rows' columns: views of all ranks' columns."""

    def __init__(
        self,
        dp_rank: int,
        sizes: EngineSizes,
        *,
        use_radix_cache: bool = True,
        eviction_policy: str = "adaptive",
        tables: RowTables | None = None,
    ) -> None:
        self.dp_rank = dp_rank
        self.sizes = sizes
        self.page_size = sizes.page_size
        self.groups = sizes.groups
        # True if every row lists every page up to its allocated length.
        self.lists_all = len(sizes.groups) == 1 and sizes.groups[0].sliding_window is None
        # The numbers of the recurrent group and of its pool of states; None without recurrent
        # layers.
        self.state_group = sizes.state_group
        self.state_pool = None if self.state_group is None else sizes.groups[self.state_group].pool
        if self.state_pool == 0:
            raise ValueError("states need a pool of their own, after the first pool of pages")
        num_groups, num_pools = len(sizes.groups), len(sizes.pool_pages)
        self.rows = ReqToTokenPool(
            tables or RowTables.empty(sizes.num_rows, num_groups, sizes.pages_per_row)
        )
        # The numbers of each pool's groups.
        self.groups_of = [
            [number for number, group in enumerate(sizes.groups) if group.pool == pool]
            for pool in range(num_pools)
        ]
        self._paged_groups = [
            number for number, group in enumerate(sizes.groups) if not group.is_recurrent
        ]
        # The first pool's groups, and how many pages of each a row may list.
        first = self.groups_of[0]
        most = [sizes.row_pages(sizes.groups[number]) for number in first]
        self.first_tables = np.array(first, np.intp), np.array(most, np.intp)
        # By pool: the pages that a row takes per page of tokens.
        self._num_tables = [
            sum(not sizes.groups[number].is_recurrent for number in numbers)
            for numbers in self.groups_of
        ]
        self.allocators = tuple(
            PageAllocator(num_pages, self._pool_name(pool))
            for pool, num_pages in enumerate(sizes.pool_pages)
        )
        self.allocator = self.allocators[0]  # the pool that limits admission
        self._make_cache = partial(
            RadixCache if use_radix_cache else ChunkCache,
            sizes.groups,
            self.allocators,
            sizes.page_size,
            eviction_policy=eviction_policy if use_radix_cache else "lru",
        )
        self.cache = self._make_cache()
        self.watcher: CacheWatcher | None = None
        self.sessions = SessionLeases()
        self.leases: dict[int, KVLease] = {}  # by row
        self.locked = self._no_locks()
        self._num_evicted_ahead = [
            min(num_pages // _PAGES_PER_EVICTED, _MAX_EVICTED_AHEAD)
            for num_pages in sizes.pool_pages
        ]
        # By pool: pages that idle sessions own, excluding the tree's pages.
        self.session_held = [0] * num_pools

    def _pool_name(self, pool: int) -> str:
        if len(self.groups) == 1:
            return f"rank {self.dp_rank}"
        if pool == self.state_pool:
            return f"rank {self.dp_rank}, states"
        windows = [self.groups[number].sliding_window for number in self.groups_of[pool]]
        kinds = ["full" if window is None else f"window {window}" for window in windows]
        return f"rank {self.dp_rank}, {' and '.join(kinds)}"

    def _no_locks(self) -> tuple[LockedPages, ...]:
        return tuple(LockedPages(num_pages) for num_pages in self.sizes.pool_pages)

    def rebuild(self) -> None:
        """Reset all memory records without reading them, since they may be inconsistent.

        Afterwards every page and row is free and every lease released. No step launched before may
        still run on the device.
        """
        for lease in self.leases.values():
            lease.released, lease.node = True, None
        self.leases.clear()
        self.rows.reset()
        for allocator in self.allocators:
            allocator.reset()
        block_log = self.cache.tree.block_log
        self.cache = self._make_cache(num_evicted=self.cache.num_evicted)
        self.cache.tree.block_log = block_log
        if block_log is not None:
            block_log.cleared()
        self.sessions = SessionLeases()
        self.locked = self._no_locks()
        self.session_held = [0] * len(self.allocators)

    def log_blocks(self) -> BlockLog:
        """Log all pages that enter or leave the cache; call this before the first lease."""
        log = self.cache.tree.block_log = BlockLog()
        return log

    @property
    def num_available_pages(self) -> int:
        """Return the first pool's free pages plus the pages that eviction can free."""
        return self.allocator.num_free + self.cache.num_evictable[0]

    def pages_for(self, num_tokens: int) -> int:
        """Return the pages of a group that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def sees_windows(self, lease: KVLease, length: int) -> bool:
        """Return whether no window has passed the pages that the token after `length` reads."""
        return self.lists_all or all(
            group.sliding_window is None
            or group.is_recurrent
            or self.rows.first_pages[number, lease.row]
            <= first_page_of(group.sliding_window, self.page_size, length)
            for number, group in enumerate(self.groups)
        )

    def by_pool(self, pages: Int32Array) -> list[Int32Array]:
        """Return the listed pages of `pages` int32[groups, n], for each pool."""
        if self.lists_all:
            return [pages[0]]
        in_pools = [pages[numbers].reshape(-1) for numbers in self.groups_of]
        return [listed[listed != 0] for listed in in_pools]

    def lock(self, pages: Int32Array) -> None:
        """Lock `pages` int32[groups, n] of the tree for a running request."""
        for locked, listed in zip(self.locked, self.by_pool(pages), strict=True):
            locked.lock(listed)

    def unlock(self, pages: Int32Array) -> None:
        for locked, listed in zip(self.locked, self.by_pool(pages), strict=True):
            locked.unlock(listed)

    def make_room(self, num_pages: int) -> bool:
        """Evict until `num_pages` pages are free for each group; return False, evicting nothing, if
        impossible.

        A few pages more than needed are evicted: a decode step takes a few pages, and evicting many
        at once costs the host little more than evicting few.
        """
        for num_tables, allocator in zip(self._num_tables, self.allocators, strict=True):
            if num_pages * num_tables > allocator.num_free:
                return self._evict_for(num_pages)
        return True

    def _evict_for(self, num_pages: int) -> bool:
        deficits = [
            num_pages * num_tables - allocator.num_free
            for num_tables, allocator in zip(self._num_tables, self.allocators, strict=True)
        ]
        if deficits[0] > self.cache.num_evictable[0]:
            return False
        for pool, deficit in enumerate(deficits):
            if deficit > 0:
                self.cache.evict(deficit + self._num_evicted_ahead[pool], pool)
        return True
