"""All KV memory of one data-parallel rank: rows, pages, prefix cache, and the leases on them.

The scheduler holds one `RankMemory` per rank and never says "rank r" to any of its methods.
Leases begin here (`open_lease`), grow here, and end in `release.py`, nowhere else. `grow_rows` and
`commit_rows` do for the rows of all ranks at once what the methods of that name do for one rank's.
"""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from sgl_jax.core.compiled import compiled
from sgl_jax.core.engine_sizes import EngineSizes
from sgl_jax.core.step_plan import BoolArray, Int32Array, IntpArray, RowIndex
from sgl_jax.mem_cache.errors import LeaseError
from sgl_jax.mem_cache.lease import KVLease
from sgl_jax.mem_cache.locked_pages import LockedPages
from sgl_jax.mem_cache.page_allocator import PageAllocator, alloc_each
from sgl_jax.mem_cache.prefix_cursor import PrefixCursor
from sgl_jax.mem_cache.radix_cache import ChunkCache, RadixCache
from sgl_jax.mem_cache.req_to_token_pool import ReqToTokenPool, RowTables
from sgl_jax.mem_cache.session_leases import SessionLeases
from sgl_jax.mem_cache.tree_node import TreeNode

# Of so many pages one is evicted ahead of need, where pages must be evicted, and so many at most.
_PAGES_PER_EVICTED = 512
_MAX_EVICTED_AHEAD = 256


class MemoryView(NamedTuple):
    """Where every page and row of a rank is. Pages: total = free + leased + cached + session_held
    + reserved; `protected_pages` are those of the cached that live leases have locked, those of
    idle sessions included. A row is free, a running request's, or an idle session's."""

    dp_rank: int
    page_size: int
    total_pages: int
    free_pages: int
    leased_pages: int
    cached_pages: int
    protected_pages: int
    session_held_pages: int
    reserved_pages: int
    total_rows: int
    free_rows: int
    session_rows: int


class RankMemory:
    """The memory of rank `dp_rank`, of the given sizes; `eviction_policy` is `RadixCache`'s.

    `tables`, if given, hold the rows' columns: views of those of all ranks.
    """

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
        self.page_size = sizes.page_size
        self.rows = ReqToTokenPool(tables or RowTables.empty(sizes.num_rows, sizes.pages_per_row))
        self.allocator = PageAllocator(sizes.num_pages, f"rank {dp_rank}")
        self._make_cache = partial(
            RadixCache if use_radix_cache else ChunkCache,
            self.allocator,
            sizes.page_size,
            eviction_policy=eviction_policy if use_radix_cache else "lru",
        )
        self.cache = self._make_cache()
        self.sessions = SessionLeases()
        self.leases: dict[int, KVLease] = {}  # by row
        self.locked = LockedPages(sizes.num_pages)
        self._num_evicted_ahead = min(sizes.num_pages // _PAGES_PER_EVICTED, _MAX_EVICTED_AHEAD)
        # Pages of their own that idle sessions hold: those the tree owns are not among them.
        self.num_session_held_pages = 0

    def rebuild(self) -> None:
        """Reset all memory records without freeing one by one, since they may be inconsistent.

        Every page and row is free afterwards and every lease released; the old records are not
        read. No step that was launched before may still run on the device.
        """
        for lease in self.leases.values():
            lease.released, lease.node = True, None
        self.leases.clear()
        self.rows.reset()
        self.allocator.reset()
        self.cache = self._make_cache(num_evicted=self.cache.num_evicted)
        self.sessions = SessionLeases()
        self.locked = LockedPages(self.allocator.num_pages)
        self.num_session_held_pages = 0

    @property
    def num_session_pages(self) -> int:
        """Pages that idle sessions keep from other use, each counted once: O(1)."""
        return self.num_session_held_pages + self.locked.num_idle

    @property
    def num_available_pages(self) -> int:
        """Pages that are free or can be made free by eviction."""
        return self.allocator.num_free + self.cache.num_evictable

    @property
    def num_reclaimable_pages(self) -> int:
        """Pages that would be available, were every idle session evicted: O(1)."""
        num_parked = self.cache.num_protected - self.locked.num_running
        return self.num_available_pages + num_parked + self.num_session_held_pages

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def open_lease(self, prefix: Int32Array, namespace: str = "") -> KVLease:
        """Take a row, with as much of `prefix` as the cache has under `namespace`.

        `prefix` must leave out at least the request's last token: its logits are always
        recomputed. Raises `LeaseError` if no row is free.
        """
        row = self.rows.alloc()
        lease = KVLease(self.dp_rank, row, self.rows, namespace)
        match = self.cache.match_prefix(prefix, namespace)
        lease.node = match.node
        self.locked.lock(match.pages)
        self.rows.list_pages(row, 0, match.pages)
        lease.set_lengths(protected=match.length, committed=match.length, allocated=match.length)
        self.leases[row] = lease
        return lease

    def num_pages_in_use(self, cursor: PrefixCursor) -> int:
        """Pages of the cursor's prefix that running requests have locked, too.

        A request that starts on the prefix takes all pages but these from the reclaimable ones.
        Locks begin at the root and hold whole edges, so this is O(edges that have none).
        """
        return min(cursor.length, self.in_use_len(cursor.node)) // self.page_size

    def in_use_len(self, node: TreeNode | None) -> int:
        """Tokens of the path to `node` that running requests have locked."""
        while node is not None and node.parent is not None:
            if self.locked.is_running(int(node.values[0][0])):
                return node.end
            node = node.parent
        return 0

    def park(self, lease: KVLease) -> None:
        """The holder of `lease` is an idle session now, no more a running request."""
        self.locked.park(self.locked_pages_of(lease))
        self.num_session_held_pages += self._num_own_pages(lease)

    def unpark(self, lease: KVLease) -> None:
        """The holder of `lease` is no idle session any more."""
        self.locked.unpark(self.locked_pages_of(lease))
        self.num_session_held_pages -= self._num_own_pages(lease)

    def locked_pages_of(self, lease: KVLease) -> Int32Array:
        """The pages of the tree that `lease` has locked, in token order."""
        return lease.pages(self.page_size, 0, lease.cache_protected_len)

    def _num_own_pages(self, lease: KVLease) -> int:
        return self.pages_for(lease.kv_allocated_len) - lease.cache_protected_len // self.page_size

    def make_room(self, num_pages: int) -> bool:
        """Evict until `num_pages` are free; False, having evicted nothing, if that cannot be.

        If it must evict, it evicts a few more: a decode step takes a few pages, and many at once
        cost the host little more than few.
        """
        deficit = num_pages - self.allocator.num_free
        if deficit <= 0:
            return True
        if deficit > self.cache.num_evictable:
            return False
        self.cache.evict(deficit + self._num_evicted_ahead)
        return True

    def pages_to_grow(self, rows: RowIndex, allocated_lens: Int32Array) -> Int32Array:
        """Pages each row lacks to hold `allocated_lens` tokens; int32[len(rows)]."""
        rows, lens = np.asarray(rows, np.intp), np.asarray(allocated_lens, np.int32)
        return _pages_beyond(rows, lens, self.rows.kv_allocated_len, self.page_size)

    def grow_rows(self, rows: RowIndex, allocated_lens: Int32Array) -> bool:
        """`grow_rows` of this rank's rows alone; whether there was enough memory."""
        rows, lens = np.asarray(rows, np.intp), np.asarray(allocated_lens, np.int32)
        return grow_rows(self.rows, [self], rows, lens, [0, len(rows)])[0]

    def grow_row(self, row: int, allocated_len: int) -> bool:
        """`grow_rows` of one row, without the cost of arrays of one."""
        held_len = int(self.rows.kv_allocated_len[row])
        held, wanted = self.pages_for(held_len), self.pages_for(allocated_len)
        if wanted > held:
            if not self.make_room(wanted - held):
                return False
            self.rows.list_pages(row, held, self.allocator.alloc(wanted - held, row))
        self.rows.kv_allocated_len[row] = max(held_len, allocated_len)
        return True

    def commit_rows(self, rows: RowIndex, committed_lens: Int32Array) -> None:
        """`commit_rows` of this rank's rows alone."""
        rows, lens = np.asarray(rows, np.intp), np.asarray(committed_lens, np.int32)
        commit_rows(self.rows, [self], rows, lens)

    def view(self) -> MemoryView:
        """The memory view of this rank."""
        session_held = self.num_session_held_pages
        return MemoryView(
            dp_rank=self.dp_rank,
            page_size=self.page_size,
            total_pages=self.allocator.num_pages,
            free_pages=self.allocator.num_free,
            leased_pages=self.allocator.num_leased - session_held,
            cached_pages=self.allocator.num_tree,
            protected_pages=self.cache.num_protected,
            session_held_pages=session_held,
            reserved_pages=self.allocator.num_reserved,
            total_rows=self.rows.num_rows - 1,
            free_rows=self.rows.num_free,
            session_rows=self.sessions.num_idle,
        )


def grow_rows(
    tables: RowTables,
    memories: Sequence[RankMemory],
    rows: RowIndex,
    allocated_lens: Int32Array,
    bounds: Sequence[int] | IntpArray,
) -> list[bool]:
    """Reserve slots so that row i holds `allocated_lens[i]` tokens, evicting as needed.

    Args:
        tables: the columns of all `memories`, one after another.
        memories: of the ranks, each with as many rows.
        rows: indices into `tables`, distinct and leased, rank by rank.
        allocated_lens: int32[len(rows)].
        bounds: those of rank i are `rows[bounds[i] : bounds[i + 1]]`.

    Returns whether each rank's rows fit. All or nothing: where they do not, even after eviction,
    the rank is as it was.
    """
    page_size, num_rows = memories[0].page_size, memories[0].rows.num_rows
    bounds = np.asarray(bounds)
    allocated_len = tables.kv_allocated_len
    growing, owners, columns, page_bounds = _lacking_pages(
        rows, allocated_lens, bounds, allocated_len, page_size, num_rows
    )
    if not len(growing):
        _reserve(rows, allocated_lens, bounds, np.ones(len(memories), np.bool_), allocated_len)
        return [True] * len(memories)
    fits = [
        memory.make_room(end - first)
        for memory, (first, end) in zip(memories, pairwise(page_bounds.tolist()), strict=True)
    ]
    if not all(fits):
        counts = np.diff(page_bounds)
        has_room = np.repeat(fits, counts)
        growing, owners, columns = growing[has_room], owners[has_room], columns[has_room]
        page_bounds = np.concatenate(([0], np.cumsum(counts * fits)))
    taken = alloc_each([memory.allocator for memory in memories], owners, page_bounds.tolist())
    tables.list_page_each(growing, columns, taken)
    _reserve(rows, allocated_lens, bounds, np.array(fits), allocated_len)
    return fits


@compiled("(int64[::1], int32[::1], int64[::1], int32[::1], int32, int64)")
def _lacking_pages(
    rows: RowIndex,
    lens: Int32Array,
    bounds: IntpArray,
    allocated_len: Int32Array,
    page_size: int,
    num_rows: int,
) -> tuple[RowIndex, Int32Array, Int32Array, IntpArray]:
    """The pages that `rows` lack to hold `lens` tokens, row by row.

    Answers of each page its row, the same as a row of its rank (of `num_rows` rows each), and the
    column where the row is to list it; and where the pages of each rank begin, whose rows are
    between its `bounds`. `allocated_len` is of the rows of all ranks.
    """
    assert len(rows) == len(lens) == bounds[len(bounds) - 1]
    lacking = np.empty(len(rows), np.int64)  # indices of rows that lack any
    lacking_bounds = np.zeros(len(bounds), np.int64)
    num_lacking = num_pages = 0
    for rank in range(len(bounds) - 1):
        for i in range(bounds[rank], bounds[rank + 1]):
            assert 0 <= rows[i] < len(allocated_len)
            held_len = allocated_len[rows[i]]
            num_left = -held_len % page_size  # slots of its last page
            if lens[i] - held_len > num_left:
                lacking[num_lacking] = i
                num_lacking += 1
                num_pages += (lens[i] - held_len - num_left + page_size - 1) // page_size
        lacking_bounds[rank + 1] = num_lacking
    growing = np.empty(num_pages, np.int64)
    owners = np.empty(num_pages, np.int32)
    columns = np.empty(num_pages, np.int32)
    page_bounds = np.zeros(len(bounds), np.int64)
    count = 0
    for rank in range(len(bounds) - 1):
        for i in lacking[lacking_bounds[rank] : lacking_bounds[rank + 1]]:
            held = (allocated_len[rows[i]] + page_size - 1) // page_size
            for column in range(held, (lens[i] + page_size - 1) // page_size):
                growing[count] = rows[i]
                owners[count] = rows[i] - rank * num_rows
                columns[count] = column
                count += 1
        page_bounds[rank + 1] = count
    return growing, owners, columns, page_bounds


@compiled("(int64[::1], int32[::1], int64[::1], boolean[::1], int32[::1])")
def _reserve(
    rows: RowIndex,
    lens: Int32Array,
    bounds: IntpArray,
    fits: BoolArray,
    allocated_len: Int32Array,
) -> None:
    """Rows of the ranks that `fits` hold `lens` tokens, or more if they did before."""
    assert len(rows) == len(lens) == bounds[len(bounds) - 1]
    assert len(fits) == len(bounds) - 1
    for rank in range(len(fits)):
        if fits[rank]:
            for i in range(bounds[rank], bounds[rank + 1]):
                assert 0 <= rows[i] < len(allocated_len)
                allocated_len[rows[i]] = max(allocated_len[rows[i]], lens[i])


def commit_rows(
    tables: RowTables, memories: Sequence[RankMemory], rows: RowIndex, committed_lens: Int32Array
) -> None:
    """A step was launched that writes rows' KV up to `committed_lens` tokens.

    `rows` are indices into `tables`, the columns of all `memories`. Raises `LeaseError`, changing
    nothing, if a row has not so many slots.
    """
    beyond = _commit(rows, committed_lens, tables.kv_allocated_len, tables.kv_committed_len)
    if beyond >= 0:
        rank, row = divmod(int(rows[beyond]), memories[0].rows.num_rows)
        raise LeaseError(
            f"rank {memories[rank].dp_rank}: row {row} would commit "
            f"{committed_lens[beyond]} tokens of {tables.kv_allocated_len[rows[beyond]]}"
        )


@compiled("(int64[::1], int32[::1], int32[::1], int32[::1])")
def _commit(
    rows: RowIndex, lens: Int32Array, allocated_len: Int32Array, committed_len: Int32Array
) -> int:
    """Set the committed lengths of `rows`. If one has not so many slots, answers the index of the
    first such row, having set none; else -1."""
    assert len(rows) == len(lens)
    assert len(allocated_len) == len(committed_len)
    for i in range(len(rows)):
        assert 0 <= rows[i] < len(allocated_len)
        if lens[i] > allocated_len[rows[i]]:
            return i
    for i in range(len(rows)):
        committed_len[rows[i]] = lens[i]
    return -1


@compiled("(int64[::1], int32[::1], int32[::1], int32)")
def _pages_beyond(
    rows: RowIndex, lens: Int32Array, allocated_len: Int32Array, page_size: int
) -> Int32Array:
    """Pages that `lens` tokens take beyond those that each of `rows` holds, or none: int32[n]."""
    lacking = np.zeros(len(rows), np.int32)
    assert len(rows) == len(lens)
    for i in range(len(rows)):
        assert 0 <= rows[i] < len(allocated_len)
        held_len = allocated_len[rows[i]]
        num_left = -held_len % page_size  # slots of its last page
        if lens[i] - held_len > num_left:
            lacking[i] = (lens[i] - held_len - num_left + page_size - 1) // page_size
    return lacking
