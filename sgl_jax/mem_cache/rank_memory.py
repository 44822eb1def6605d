"""All KV memory of one data-parallel rank: rows, pages, prefix cache, and the leases on them.

Layers that need the same tokens form a cache group. Each row has a page table per group, and the
group's pages belong to one pool. Admission counts pages of the first pool: any other pool holds
only windows, and has enough pages for all rows at once.

The scheduler holds one `RankMemory` per rank; no method takes a rank. Leases begin here
(`open_lease`) and end only in `release.py`. `row_growth.py` grows and commits the rows of all ranks
at once; `grow_rows` and `commit_rows` here do so for one rank.
"""

from collections.abc import Sequence
from functools import partial
from typing import Protocol

import numpy as np

from sgl_jax.core.engine_sizes import EngineSizes
from sgl_jax.core.step_plan import Int32Array, RowIndex
from sgl_jax.mem_cache.lease import KVLease, first_page_of
from sgl_jax.mem_cache.memory_view import PAGE_COUNTS, MemoryView, PoolView
from sgl_jax.mem_cache.pages.locked_pages import LockedPages
from sgl_jax.mem_cache.pages.page_allocator import PageAllocator
from sgl_jax.mem_cache.pages.pool_records import PoolRecords
from sgl_jax.mem_cache.pages.req_to_token_pool import ReqToTokenPool, RowTables
from sgl_jax.mem_cache.row_growth import commit_rows, grow_rows, pages_held_and_lacking
from sgl_jax.mem_cache.session_leases import SessionLeases
from sgl_jax.mem_cache.tree.block_log import BlockLog
from sgl_jax.mem_cache.tree.prefix_cursor import PrefixCursor
from sgl_jax.mem_cache.tree.prompt_tree import PromptTree, RankPrompts
from sgl_jax.mem_cache.tree.radix_cache import ChunkCache, RadixCache
from sgl_jax.mem_cache.tree_node import TreeNode

# When pages must be evicted, further pages are evicted ahead of need: one per this many pages of
# the pool, and at most this many.
_PAGES_PER_EVICTED = 512
_MAX_EVICTED_AHEAD = 256


class CacheWatcher(Protocol):
    """Receives the prefixes that a rank's cache gains and that its requests find there."""

    def gained(self, tokens: Int32Array, namespace: str) -> None: ...

    def used(self, tokens: Int32Array, namespace: str) -> None: ...


class RankMemory:
    """The memory of rank `dp_rank`, with the given sizes and eviction policy (of `RadixCache`). If
    given, `tables` holds the rows' columns, views of all ranks' columns, `waiting` the prompts that
    wait for all ranks, and `pools` the records of all ranks' pages."""

    def __init__(
        self,
        dp_rank: int,
        sizes: EngineSizes,
        *,
        use_radix_cache: bool = True,
        eviction_policy: str = "adaptive",
        tables: RowTables | None = None,
        waiting: PromptTree | None = None,
        pools: Sequence[PoolRecords] | None = None,
    ) -> None:
        self.dp_rank = dp_rank
        self.waiting = waiting or PromptTree(sizes.page_size, 1 + dp_rank)
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
        self.rows = tables or RowTables.empty(sizes.num_rows, num_groups, sizes.pages_per_row)
        self.row_pool = ReqToTokenPool(self.rows)
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
        self.num_tables = [
            sum(not sizes.groups[number].is_recurrent for number in numbers)
            for numbers in self.groups_of
        ]
        pools = pools or [PoolRecords.empty(1 + dp_rank, pages) for pages in sizes.pool_pages]
        self.allocators = tuple(
            PageAllocator(num_pages, self._pool_name(pool), pools[pool], dp_rank)
            for pool, num_pages in enumerate(sizes.pool_pages)
        )
        self.allocator = self.allocators[0]  # the pool that limits admission
        self._make_cache = partial(
            RadixCache if use_radix_cache else ChunkCache,
            sizes.groups,
            self.allocators,
            sizes.page_size,
            eviction_policy=eviction_policy if use_radix_cache else "lru",
            prompts=RankPrompts(self.waiting, dp_rank),
        )
        self.cache = self._make_cache()
        self.watcher: CacheWatcher | None = None
        self._start()
        self._num_evicted_ahead = [
            min(num_pages // _PAGES_PER_EVICTED, _MAX_EVICTED_AHEAD)
            for num_pages in sizes.pool_pages
        ]

    def _pool_name(self, pool: int) -> str:
        if len(self.groups) == 1:
            return f"rank {self.dp_rank}"
        if pool == self.state_pool:
            return f"rank {self.dp_rank}, states"
        windows = [self.groups[number].sliding_window for number in self.groups_of[pool]]
        kinds = ["full" if window is None else f"window {window}" for window in windows]
        return f"rank {self.dp_rank}, {' and '.join(kinds)}"

    def _start(self) -> None:
        self.leases: dict[int, KVLease] = {}  # by row
        self.sessions = SessionLeases()
        self.locked = tuple(LockedPages(num_pages) for num_pages in self.sizes.pool_pages)

    def rebuild(self) -> None:
        """Reset all memory records without reading them, since they may be inconsistent.

        Afterwards every page and row is free and every lease released. No step launched before may
        still run on the device.
        """
        for lease in self.leases.values():
            lease.released, lease.node = True, None
        self._start()
        self.row_pool.reset()
        for allocator in self.allocators:
            allocator.reset()
        block_log = self.cache.tree.block_log
        self.cache = self._make_cache(num_evicted=self.cache.num_evicted)
        self.cache.tree.block_log = block_log
        if block_log is not None:
            block_log.cleared()

    def log_blocks(self) -> BlockLog:
        """Log all pages that enter or leave the cache; call this before the first lease."""
        log = self.cache.tree.block_log = BlockLog()
        return log

    def tick(self, now_s: float) -> None:
        """Set the time, in seconds from any origin, by which the cache expects paths to return."""
        self.cache.tree.policy.now_s = now_s

    @property
    def num_available_pages(self) -> int:
        return self.allocator.num_free + self.cache.num_evictable[0]

    @property
    def num_session_pages(self) -> int:
        """Count the pages of the first pool that only idle sessions hold, each once."""
        return self.locked[0].num_idle

    @property
    def num_reclaimable_pages(self) -> int:
        """Return the pages available if every idle session were evicted, in O(1)."""
        locked = self.locked[0]
        num_idle = locked.num_locked - locked.num_running
        return self.allocator.num_free + self.cache.num_evictable[0] + num_idle

    @property
    def can_keep_state(self) -> bool:
        """Return whether one more recurrent state can be stored; True without recurrent layers."""
        pool = self.state_pool
        return (
            pool is None or self.allocators[pool].num_free > 0 or self.cache.num_evictable[pool] > 0
        )

    def pages_for(self, num_tokens: int) -> int:
        """Return the pages of a group that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def request_pages(self, num_tokens: int) -> int:
        """Return the maximum pages of the first pool that a request of `num_tokens` holds."""
        if self.lists_all:
            return self.pages_for(num_tokens)
        return self.sizes.request_pages(num_tokens)

    def num_held(self, lease: KVLease) -> int:
        """Count the pages of the first pool that `lease` lists, including the tree's."""
        num_pages = self.pages_for(lease.kv_allocated_len)
        if self.lists_all:
            return num_pages
        firsts = self.rows.first_pages[self.groups_of[0], lease.row]
        return int((num_pages - firsts).sum())

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

    def open_lease(self, prefix: Int32Array, namespace: str = "") -> KVLease:
        """Take a row with the longest prefix of `prefix` cached under `namespace`.

        `prefix` must leave out at least the request's last token, because its logits are always
        recomputed. Raise `LeaseError` if no row is free.
        """
        row = self.row_pool.alloc()
        lease = self.leases[row] = KVLease(self.dp_rank, row, self.rows, namespace)
        if len(prefix) < self.page_size:
            return lease
        match = self.cache.match_prefix(prefix, namespace)
        if length := match.length:
            if self.watcher is not None:
                self.watcher.used(prefix[:length], namespace)
            lease.node = match.node
            self.lock(match.pages)
            self.rows.list_pages(row, 0, match.pages)
            self.set_first_pages(lease, length)
            lease.set_lengths(protected=length, committed=length, allocated=length)
        return lease

    def set_first_pages(self, lease: KVLease, length: int) -> None:
        """Record, for each sliding window, the first page that the token at `length` reads."""
        for number, group in enumerate(self.groups):
            if group.sliding_window is not None:
                first = first_page_of(group.sliding_window, self.page_size, length)
                self.rows.first_pages[number, lease.row] = first

    def num_pages_in_use(self, cursor: PrefixCursor) -> int:
        """Count the pages of the cursor's prefix that running requests have locked too.

        A request that starts on the prefix takes its further pages from the reclaimable pages.
        Locks begin at the root and hold whole edges, so this is O(edges without locks).
        """
        return min(cursor.length, self.in_use_len(cursor.node)) // self.page_size

    def prefix_pages(self, cursor: PrefixCursor) -> Int32Array:
        """Return the tree's full-attention pages of the cursor's prefix, int32[n]."""
        node, length = cursor.node, cursor.length
        if self.groups[0].sliding_window is not None or node is None or not length:
            return np.zeros(0, np.int32)
        pages: Int32Array = self.cache.tree.pages_to(node)[0, : length // self.page_size]
        return pages

    def in_use_len(self, node: TreeNode | None) -> int:
        """Count the tokens from the root to `node` that running requests have locked."""
        if self.groups[0].sliding_window is not None:
            return 0  # windows are locked separately
        while node is not None and node.parent is not None:
            if self.locked[0].is_running(node.values[0].item(0)):
                return node.end
            node = node.parent
        return 0

    def lock(self, pages: Int32Array) -> None:
        for locked, listed in zip(self.locked, self.by_pool(pages), strict=True):
            locked.lock(listed)

    def unlock(self, pages: Int32Array) -> None:
        for locked, listed in zip(self.locked, self.by_pool(pages), strict=True):
            locked.unlock(listed)

    def mark_idle(self, lease: KVLease) -> None:
        """Move `lease` from the running requests to the idle sessions, and lock the pages that it
        owns."""
        self.lock(lease.pages(self.page_size, lease.cache_protected_len))
        for locked, listed in zip(self.locked, self._pages_of(lease), strict=True):
            locked.mark_idle(listed)

    def mark_running(self, lease: KVLease) -> None:
        """Count `lease` as a running request's instead of an idle session's."""
        for locked, listed in zip(self.locked, self._pages_of(lease), strict=True):
            locked.mark_running(listed)
        self.unlock(lease.pages(self.page_size, lease.cache_protected_len))

    def _pages_of(self, lease: KVLease) -> list[Int32Array]:
        return self.by_pool(lease.pages(self.page_size))

    def make_room(self, num_pages: int) -> bool:
        """Evict until `num_pages` pages are free for each group; return False, evicting nothing, if
        impossible.

        A few pages more than needed are evicted: a decode step takes a few pages, and evicting many
        at once costs the host little more than evicting few.
        """
        for num_tables, allocator in zip(self.num_tables, self.allocators, strict=True):
            if num_pages * num_tables > allocator.num_free:
                counts = [num_pages * num_tables for num_tables in self.num_tables]
                return self.cache.make_room(counts, self._num_evicted_ahead)
        return True

    def pages_to_grow(self, rows: RowIndex, allocated_lens: Int32Array) -> Int32Array:
        """Return the first pool's pages that each row lacks for these lengths, int32[len(rows)]."""
        rows = np.asarray(rows, np.intp)
        lens = np.empty((1, len(rows)), np.int32)
        lens[0] = allocated_lens
        lacking: Int32Array = pages_held_and_lacking(self, self.rows, rows, lens)[1]
        return lacking

    def tokens_that_fit(self, row: int) -> int:
        """Return how many tokens `row` could hold with all free and evictable pages."""
        held = self.pages_for(int(self.rows.kv_allocated_len[row]))
        return (held + self.num_available_pages // self.num_tables[0]) * self.page_size

    def grow_rows(self, rows: RowIndex, allocated_lens: Int32Array) -> bool:
        rows, lens = np.asarray(rows, np.intp), np.asarray(allocated_lens, np.int32)
        return bool(grow_rows(self.rows, [self], rows, lens, [0, len(rows)])[0])

    def grow_row(self, row: int, allocated_len: int) -> bool:
        """Grow one row, without the cost of arrays; return whether memory was sufficient."""
        held_len = int(self.rows.kv_allocated_len[row])
        held, wanted = self.pages_for(held_len), self.pages_for(allocated_len)
        if wanted > held:
            if not self.make_room(wanted - held):
                return False
            for group in self._paged_groups:
                taken = self.allocators[self.groups[group].pool].alloc(wanted - held, row)
                self.rows.list_pages_of(row, group, held, taken)
        self.rows.kv_allocated_len[row] = max(held_len, allocated_len)
        return True

    def commit_rows(self, rows: RowIndex, committed_lens: Int32Array) -> None:
        rows, lens = np.asarray(rows, np.intp), np.asarray(committed_lens, np.int32)
        commit_rows(self.rows, [self], rows, lens)

    def view(self) -> MemoryView:
        pools = tuple(self._pool_view(pool) for pool in range(len(self.allocators)))
        paged = [pool for pool in pools if pool.kind == "pages"]
        return MemoryView(
            dp_rank=self.dp_rank,
            page_size=self.page_size,
            **{name: sum(getattr(pool, name) for pool in paged) for name in PAGE_COUNTS},
            total_rows=self.rows.num_rows - 1,
            free_rows=self.row_pool.num_free,
            session_rows=self.sessions.num_idle,
            pools=pools,
        )

    def _pool_view(self, pool: int) -> PoolView:
        allocator, num_protected = self.allocators[pool], self.cache.num_protected[pool]
        session_held = self.locked[pool].num_locked - num_protected
        groups = [self.groups[number] for number in self.groups_of[pool]]
        has_states = pool == self.state_pool
        return PoolView(
            kind="states" if has_states else "pages",
            sliding_windows=tuple(each.sliding_window for each in groups if not each.is_recurrent),
            own_slots=self.sizes.num_state_slots - self.sizes.num_snapshots if has_states else 0,
            total_pages=allocator.num_pages,
            free_pages=allocator.num_free,
            leased_pages=allocator.num_leased - session_held,
            cached_pages=allocator.num_tree,
            protected_pages=num_protected,
            session_held_pages=session_held,
            reserved_pages=allocator.num_reserved,
        )
