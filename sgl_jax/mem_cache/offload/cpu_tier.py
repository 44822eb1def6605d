"""Moves prefixes between a rank's pages on the device and its blocks in CPU memory.

Out: a prefix that the cache gains (or uses again, or is about to evict: the write policy) is copied
while steps run. In: a *fetch* takes pages under a separate lease, and gives them to the prefix
cache when their contents have arrived. A waiting request then finds them like any cached prefix.
So no request ever holds a page without contents.

This file holds the leases of fetches. They end, as all leases do, in `release_kv_cache`.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sgl_jax.core.step_plan import BoolArray, Int32Array, PageTransfer
from sgl_jax.core.transfers import TransferEnd, Transfers
from sgl_jax.mem_cache.lease import KVLease, first_page_of
from sgl_jax.mem_cache.offload.cpu_pool import CpuPool
from sgl_jax.mem_cache.offload.load_prices import LoadPrices
from sgl_jax.mem_cache.offload.remote_tier import RemoteTier
from sgl_jax.mem_cache.offload.saved_prefixes import SavedPrefix
from sgl_jax.mem_cache.rank_memory import RankMemory
from sgl_jax.mem_cache.release import free_passed_window_pages, release_kv_cache
from sgl_jax.mem_cache.tree.prefix_cursor import common_prefix_len
from sgl_jax.mem_cache.tree_node import TreeNode

# Prefixes that wait to be copied. If there are more, the oldest are dropped.
_MAX_OFFERS = 256
# A copy begins only while fewer pages than this are being copied.
_MAX_LEAVING_PAGES = 256
MAX_FETCHES = 4


class Fetch(NamedTuple):
    """A prefix in transit to the device. `lease` holds its pages, and the part already there."""

    tokens: Int32Array  # whole pages
    lease: KVLease
    num_tokens: int  # fetched tokens
    move: PageTransfer
    is_wanted: bool = True  # False if the prefix was withdrawn


class _Begins(NamedTuple):
    """The first fields of `Transfers`: moves that the next `take` returns."""

    placed: list[PageTransfer]
    dropped: list[PageTransfer]
    copies: list[PageTransfer]
    fetches: list[PageTransfer]


class CpuTier:
    """The CPU memory tier after the prefix cache of `memory`.

    Attributes:
        prices: rates of fetches, and of loads from the store.
        blocks: the blocks and the prefixes in them.
        store: the next tier; None if there is none.
        offers: prefixes that wait to be copied, oldest first.
        fetches: prefixes in transit to the device, by transfer number.
        num_copied_pages: pages of the first pool that were copied since the start.
        num_fetched_tokens, num_failed: tokens fetched and transfers failed since the start.
    """

    def __init__(
        self,
        memory: RankMemory,
        write_policy: str,
        eviction_policy: str,
        *,
        loads_all: bool = False,
        has_store: bool = False,
    ) -> None:
        """Create a tier with policies of `SchedulerArgs`. `loads_all` makes every load win."""
        self.prices = LoadPrices(loads_all=loads_all)
        self._has_store = has_store
        self._memory = memory
        self._eviction_policy = eviction_policy
        self.write_policy = write_policy
        self.fetches: dict[int, Fetch] = {}
        self.num_copied_pages = 0
        self.num_fetched_tokens = 0
        self.num_failed = 0
        self._num_transfers = 0
        self._start()

    def _start(self) -> None:
        memory = self._memory
        self.blocks = CpuPool(memory.dp_rank, memory.sizes, self._eviction_policy)
        self.store: RemoteTier | None = None
        if self._has_store:
            self.store = RemoteTier(self.blocks, memory.groups, self.prices, self._next_number)
        self.offers: deque[SavedPrefix] = deque(maxlen=_MAX_OFFERS)
        self._may_begin = False
        self._moves: dict[int, PageTransfer] = {}  # of copies, until they end
        self._begun: set[int] = set()  # fetches that the executor has begun
        self._dropped: dict[int, PageTransfer] = {}  # begun fetches with an ended lease
        self._begins = _Begins([], [], [], [])
        memory.watcher = self
        memory.cache.before_eviction = self.before_eviction

    # -- out --------------------------------------------------------------------------------

    def gained(self, tokens: Int32Array, namespace: str) -> None:
        """Offer a prefix (whole pages) after the device's cache has gained its last pages."""
        if self.write_policy == "write_through":
            self._offer(tokens, namespace)

    def used(self, tokens: Int32Array, namespace: str) -> None:
        """Offer a prefix (whole pages) that a request has found in the device's cache."""
        if self.write_policy == "write_through_selective":
            self._offer(tokens, namespace)

    def before_eviction(self, node: TreeNode, length: int) -> None:
        """Copy the first `length` tokens of the path to `node`, under write-back, before they are
        not resumable any more. The step being planned may overwrite their pages, so the copy
        precedes that step."""
        if self.write_policy == "write_back":
            path = self._memory.cache.tree.path_to(node)
            tokens = np.concatenate([each.key for each in path])[:length]
            # A second copy of a prefix in flight copies all of its pages again.
            if not (self._has_many_leaving and self._is_leaving(tokens, node.namespace)):
                self._begin_copy(tokens, node.namespace)

    def _offer(self, tokens: Int32Array, namespace: str) -> None:
        last = self.offers[-1] if self.offers else None
        if (
            last is not None
            and last.namespace == namespace
            and np.array_equal(last.tokens, tokens[: len(last.tokens)])
        ):
            self.offers.pop()
        self.offers.append(SavedPrefix(tokens.copy(), namespace))
        self._may_begin = True

    def _begin_copies(self) -> None:
        """Copy offered prefixes. A prefix waits while a copy of its beginning is in flight."""
        self._may_begin = False  # until a copy ends, or another prefix is offered
        for _ in range(len(self.offers)):
            if self._has_many_leaving:
                return
            offer = self.offers.popleft()
            if self._is_leaving(*offer):
                self.offers.append(offer)
            else:
                self._begin_copy(*offer)

    @property
    def _has_many_leaving(self) -> bool:
        return sum(len(move.pages[0]) for move in self._moves.values()) >= _MAX_LEAVING_PAGES

    def _is_leaving(self, tokens: Int32Array, namespace: str) -> bool:
        page_size = self._memory.page_size
        return any(
            copy.namespace == namespace
            and common_prefix_len(copy.tokens, tokens) >= (copy.num_before + 1) * page_size
            for copy in self.blocks.copies.values()
        )

    def _begin_copy(self, tokens: Int32Array, namespace: str) -> None:
        """Copy the part of the prefix that the device still has, unless a copy in flight has it."""
        memory = self._memory
        node, length = memory.cache.find(tokens, namespace)
        if length == 0:
            return
        tokens = tokens[:length]
        if self.store is not None and not self.store.is_suspended:
            self.store.writes.begin_left_out(tokens, namespace)
        pages = memory.cache.tree.pages_to(node)[:, : length // memory.page_size]
        is_offered = pages > 0
        for number, group in enumerate(memory.groups):
            if group.sliding_window is not None and not group.is_recurrent:
                # The same prompt again computes its last token: it may resume a page earlier.
                resumed = length - memory.page_size
                first = first_page_of(group.sliding_window, memory.page_size, resumed)
                is_offered[number, :first] = False
        if self._is_being_copied(tokens, namespace, is_offered):
            return
        number = self._next_number()
        blocks = self.blocks.begin_copy(number, tokens, namespace, is_offered)
        if blocks is not None:
            read = np.where(blocks > 0, pages, 0)
            move = self._move(number, read, blocks)
            self._moves[number] = move
            self._begins.copies.append(move)

    def _is_being_copied(self, tokens: Int32Array, namespace: str, is_offered: BoolArray) -> bool:
        """Return whether a copy in flight ends with or after the prefix and has all its offered
        values, bool[groups, pages], past the part that was in CPU memory when it began.

        Within that part, CPU memory may lack the values that the end of a shorter prefix needs.
        """
        copies, num_pages = (self.blocks.copies[each] for each in self._moves), is_offered.shape[1]
        return any(
            copy.is_wanted
            and copy.namespace == namespace
            and copy.num_before * self._memory.page_size < len(tokens)
            and common_prefix_len(copy.tokens, tokens) == len(tokens)
            and not np.any((is_offered & (copy.blocks[:, :num_pages] == 0))[:, copy.num_before :])
            for copy in copies
        )

    # -- in ---------------------------------------------------------------------------------

    def fetch_of(self, tokens: Int32Array, namespace: str, least: int) -> tuple[int, int] | None:
        """Find a fetch in flight with more than `least` tokens of the prefix. Return its row and
        how many tokens of the prefix it has; None if there is no such fetch."""
        page_size = self._memory.page_size
        for fetch in self.fetches.values():
            if fetch.lease.namespace == namespace:
                shared = common_prefix_len(fetch.tokens, tokens) // page_size * page_size
                # The device already had the lease's part before its committed length.
                if shared > max(least, fetch.lease.kv_committed_len):
                    return fetch.lease.row, shared
        return None

    def begin_fetch(self, tokens: Int32Array, namespace: str) -> Fetch | None:
        """Fetch the longest prefix of `tokens` in CPU memory. Return None, changing only ages, if
        the device has as much, `MAX_FETCHES` are in flight, or rows or pages are short."""
        memory = self._memory
        length = self.blocks.cache.peek(tokens, namespace)
        lacks_room = len(self.fetches) >= MAX_FETCHES or memory.row_pool.num_free == 0
        if lacks_room or length <= memory.cache.peek(tokens, namespace):
            return None
        tokens = tokens[:length].copy()
        lease = memory.open_lease(tokens, namespace)
        number = self._next_number()
        blocks = self.blocks.begin_fetch(number, tokens, namespace)
        num_held = lease.cache_protected_len // memory.page_size
        blocks[:, :num_held] = 0
        if not memory.cache.make_room(list(map(len, self.blocks.by_pool(blocks)))):
            self.blocks.end_fetch(number)
            release_kv_cache(memory, lease, tokens, insert=False)
            return None
        pages = self._take_pages(lease, blocks, length)
        move = self._move(number, pages, blocks)
        num_tokens = length - lease.kv_committed_len
        fetch = self.fetches[number] = Fetch(tokens, lease, num_tokens, move)
        self._begins.fetches.append(move)
        return fetch

    def _take_pages(self, lease: KVLease, blocks: Int32Array, length: int) -> Int32Array:
        """Allocate a page to `lease` for each of `blocks`; both are int32[groups, n]."""
        memory, row = self._memory, lease.row
        pages = np.zeros_like(blocks)
        for number, group in enumerate(memory.groups):
            columns = blocks[number].nonzero()[0]
            if len(columns):
                taken = memory.allocators[group.pool].alloc(len(columns), row)
                pages[number, columns] = taken
                memory.rows.list_page_each(
                    number, np.full(len(columns), row), columns.astype(np.int32), taken
                )
        protected = lease.cache_protected_len
        lease.set_lengths(protected=protected, committed=protected, allocated=length)
        free_passed_window_pages(memory.rows, [memory], np.array([row]), np.array([length]))
        return pages

    def drop_fetches(self) -> bool:
        """Free the pages of all fetches; return whether there were any."""
        had_any = bool(self.fetches)
        for number, fetch in list(self.fetches.items()):
            self._end_lease(number, insert=False)
            if number in self._begun:
                self._dropped[number] = fetch.move
            else:
                self._begins.fetches.remove(fetch.move)
        return had_any

    def _end_lease(self, number: int, *, insert: bool) -> None:
        fetch = self.fetches.pop(number)
        self.blocks.end_fetch(number)
        if insert:
            length, protected = len(fetch.tokens), fetch.lease.cache_protected_len
            fetch.lease.set_lengths(protected=protected, committed=length, allocated=length)
        release_kv_cache(self._memory, fetch.lease, fetch.tokens, insert=insert)

    def withdraw(self, tokens: Int32Array, namespace: str, length: int) -> None:
        """Withdraw the prefix from page `length // page_size` on: from cache, copies and fetches.

        A copy of pages that an unread step writes is still in flight when the step's result is
        read, so none of it reaches the store. The store keeps the pages that it has, but does not
        load them again.
        """
        first = length // self._memory.page_size
        num_shared = (first + 1) * self._memory.page_size
        for number, copy in list(self.blocks.copies.items()):
            if copy.namespace == namespace and common_prefix_len(copy.tokens, tokens) >= num_shared:
                self.blocks.give_up_copy(number)
        for number, fetch in self.fetches.items():
            is_shared = common_prefix_len(fetch.tokens, tokens) >= num_shared
            if is_shared and fetch.lease.namespace == namespace:
                self.fetches[number] = fetch._replace(is_wanted=False)
        self.blocks.cache.withdraw(tokens, namespace, length)
        if self.store is not None:
            self.store.withdraw(tokens, namespace, first)

    # -- transfers --------------------------------------------------------------------------

    def _next_number(self) -> int:
        self._num_transfers += 1
        return self._num_transfers

    def _move(self, number: int, pages: Int32Array, blocks: Int32Array) -> PageTransfer:
        by_pool = self.blocks.by_pool
        return PageTransfer(self._memory.dp_rank, number, by_pool(pages), by_pool(blocks))

    @property
    def waiting_fetches(self) -> Sequence[PageTransfer]:
        return self._begins.fetches

    @property
    def num_moving_tokens(self) -> int:
        return sum(fetch.num_tokens for fetch in self.fetches.values())

    @property
    def is_moving_out(self) -> bool:
        return bool(self.offers or self._moves or self.is_storing)

    @property
    def is_storing(self) -> bool:
        return self.store is not None and bool(self.store.writes.in_flight)

    @property
    def has_work(self) -> bool:
        return bool(
            (self.offers and self._may_begin)
            or any(self._begins)
            or (self.store is not None and self.store.has_work)
        )

    def take(self) -> Transfers:
        """Return the transfers to begin before the next step is planned."""
        self._begin_copies()
        begins, self._begins = self._begins, _Begins([], [], [], [])
        self._begun.update(move.number for move in begins.fetches)
        of_store = self.store.take() if self.store is not None else ()
        placed, dropped, copies, fetches = map(tuple, begins)
        return Transfers(placed, dropped, copies, fetches, *of_store)

    def take_saved(self) -> list[PageTransfer]:
        """Return the copies of evicted pages, which must precede the step being planned."""
        saved = self._begins.copies.copy()
        self._begins.copies.clear()
        return saved

    def ended(self, end: TransferEnd) -> None:
        """Handle the end of a transfer, unless it began before a reset of the device."""
        number = end.number
        self.num_failed += not end.succeeded
        self._may_begin = True  # a prefix may be waiting for the end of this copy or load
        if number in self._moves:
            move = self._moves.pop(number)
            self.num_copied_pages += len(move.pages[0]) * end.succeeded
            self._end_copy(move, succeeded=end.succeeded)
        elif number in self._begun:
            self._begun.remove(number)
            if number in self.fetches:
                fetch = self.fetches[number]
                is_placed = end.succeeded and fetch.is_wanted
                self._end_lease(number, insert=is_placed)
                self.num_fetched_tokens += fetch.num_tokens * is_placed
                if is_placed:
                    self.prices.fetch.add(end.seconds, fetch.num_tokens)
                begins = self._begins.placed if is_placed else self._begins.dropped
                begins.append(fetch.move)
            else:
                self._begins.dropped.append(self._dropped.pop(number))
        elif self.store is not None:
            self.store.ended(end)

    def _end_copy(self, move: PageTransfer, *, succeeded: bool) -> None:
        """Keep a copied prefix, and write its new pages to the store."""
        store, copy = self.store, self.blocks.copies[move.number]
        may_write = store is not None and store.may_write(sum(map(len, move.blocks)))
        put = self._next_number() if may_write else None
        added = self.blocks.end_copy(move.number, succeeded=succeeded, lock_for=put)
        if store is not None and added.size:
            store.writes.begin(put, copy.tokens, copy.namespace, added)

    # -- resets -----------------------------------------------------------------------------

    def reset(self) -> None:
        """Drop all prefixes; transfers in flight end as if they had failed. No write may run."""
        self.drop_fetches()
        if self.store is not None:
            self.store.drop_writes()
        self.blocks.reset()

    def forget(self) -> None:
        """Start again after a reset of the executor, without transfers or contents of blocks. The
        leases of fetches must have ended (`drop_fetches`), or all memory was dropped."""
        before = self.store
        self.fetches.clear()
        self._start()
        if self.store is not None and before is not None:
            self.store.inherit(before)
