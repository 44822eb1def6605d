"""All KV memory of one data-parallel rank: rows, pages, prefix cache, and the leases on them.

Layers that need the same tokens form a cache group. Each row has a page table per group, and the
group's pages belong to one pool. Admission counts pages of the first pool: any other pool holds
only windows, and has enough pages for all rows at once.

The scheduler holds one `RankMemory` per rank; no method takes a rank. Leases begin here
(`open_lease`), grow here, and end only in `release.py`. `row_growth.py` grows and commits the rows
of all ranks at once; `grow_rows` and `commit_rows` here do so for one rank.
"""

import numpy as np

from sgl_jax.core.step_plan import Int32Array, RowIndex
from sgl_jax.mem_cache.lease import KVLease, first_page_of
from sgl_jax.mem_cache.memory_view import PAGE_COUNTS, MemoryView, PoolView
from sgl_jax.mem_cache.rank_records import RankRecords
from sgl_jax.mem_cache.row_growth import commit_rows, grow_rows, pages_held_and_lacking
from sgl_jax.mem_cache.row_states import resumable_len
from sgl_jax.mem_cache.tree.prefix_cursor import PrefixCursor
from sgl_jax.mem_cache.tree_node import TreeNode


class RankMemory(RankRecords):
    """The memory of a rank, with the arguments of `RankRecords`."""

    @property
    def num_session_pages(self) -> int:
        """Count the pages of the first pool that only idle sessions hold, each once."""
        return self.session_held[0] + self.locked[0].num_idle

    @property
    def num_reclaimable_pages(self) -> int:
        """Return the pages available if every idle session were evicted, in O(1)."""
        num_idle = self.cache.num_protected[0] - self.locked[0].num_running
        return self.num_available_pages + num_idle + self.session_held[0]

    @property
    def can_keep_state(self) -> bool:
        """Return whether one more recurrent state can be stored; True without recurrent layers."""
        pool = self.state_pool
        return (
            pool is None or self.allocators[pool].num_free > 0 or self.cache.num_evictable[pool] > 0
        )

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

    def can_go_back(self, lease: KVLease, length: int) -> bool:
        """Return whether `lease` can resume from its first `length` tokens or, with recurrent
        layers, from the last state within them."""
        if self.state_group is not None:
            return resumable_len(self, lease, length) >= 0
        return self.sees_windows(lease, length)

    def open_lease(self, prefix: Int32Array, namespace: str = "") -> KVLease:
        """Take a row with the longest prefix of `prefix` cached under `namespace`.

        `prefix` must leave out at least the request's last token, because its logits are always
        recomputed. Raise `LeaseError` if no row is free.
        """
        row = self.rows.alloc()
        lease = KVLease(self.dp_rank, row, self.rows, namespace)
        match = self.cache.match_prefix(prefix, namespace)
        if self.watcher is not None and match.length:
            self.watcher.used(prefix[: match.length], namespace)
        lease.node = match.node
        self.lock(match.pages)
        self.rows.list_pages(row, 0, match.pages)
        self.set_first_pages(lease, match.length)
        lease.set_lengths(protected=match.length, committed=match.length, allocated=match.length)
        self.leases[row] = lease
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
        pages: Int32Array = self.cache.pages_to(node)[0, : length // self.page_size]
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

    def mark_idle(self, lease: KVLease) -> None:
        """Count `lease` as an idle session's instead of a running request's."""
        for locked, listed in zip(self.locked, self._locked_pages(lease), strict=True):
            locked.mark_idle(listed)
        self._count_held(lease, 1)

    def mark_running(self, lease: KVLease) -> None:
        """Count `lease` as a running request's instead of an idle session's."""
        for locked, listed in zip(self.locked, self._locked_pages(lease), strict=True):
            locked.mark_running(listed)
        self._count_held(lease, -1)

    def _locked_pages(self, lease: KVLease) -> list[Int32Array]:
        return self.by_pool(lease.pages(self.page_size, 0, lease.cache_protected_len))

    def _count_held(self, lease: KVLease, sign: int) -> None:
        own = self.by_pool(lease.pages(self.page_size, lease.cache_protected_len))
        for pool, listed in enumerate(own):
            self.session_held[pool] += sign * len(listed)

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
        return (held + self.num_available_pages // self._num_tables[0]) * self.page_size

    def grow_rows(self, rows: RowIndex, allocated_lens: Int32Array) -> bool:
        """Grow rows of this rank; return whether memory was sufficient."""
        rows, lens = np.asarray(rows, np.intp), np.asarray(allocated_lens, np.int32)
        return grow_rows(self.rows, [self], rows, lens, [0, len(rows)])[0]

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
            free_rows=self.rows.num_free,
            session_rows=self.sessions.num_idle,
            pools=pools,
        )

    def _pool_view(self, pool: int) -> PoolView:
        allocator, session_held = self.allocators[pool], self.session_held[pool]
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
            protected_pages=self.cache.num_protected[pool],
            session_held_pages=session_held,
            reserved_pages=allocator.num_reserved,
        )
