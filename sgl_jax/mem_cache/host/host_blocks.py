"""The blocks of one rank in the host's memory: their owners, and the prefixes that they hold.

A block holds the contents of a page, or of a state's slot. A `RadixCache` over the blocks keeps the
prefixes: so lookbacks, namespaces, locks, eviction and healing follow the rules of the device's.

    free -> arriving (owned by a copy from the device) -> cached (owned by the tree) -> free

A fetch to the device, or a put into the store, locks the cached blocks that it reads: they are
leaving. Nothing else locks them, except that a copy locks the prefix which it continues. A load
from the store fills blocks as a copy from the device does.
"""

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from sgl_jax.core.engine_sizes import EngineSizes
from sgl_jax.core.step_plan import BoolArray, Int32Array
from sgl_jax.mem_cache.pages.page_allocator import PageAllocator
from sgl_jax.mem_cache.tree.radix_cache import RadixCache
from sgl_jax.mem_cache.tree.tree_component import LeaseOffer
from sgl_jax.mem_cache.tree_node import TreeNode


class HostCopy(NamedTuple):
    """A prefix whose end is on its way from the device or store. Its number owns the blocks."""

    tokens: Int32Array  # whole pages
    namespace: str
    node: TreeNode | None  # locked: the prefix's part that was there before
    num_before: int  # pages of that part
    blocks: Int32Array  # [groups, pages of the prefix]; 0 for values that are not copied
    is_wanted: bool = True  # False if it was given up


class HostBlocks:
    """The blocks of rank `dp_rank`, of the pools in `sizes.host_blocks`.

    Attributes:
        cache: the prefixes that are there.
        copies: on their way from the device or the store, by number.
        leaving: the ends of the prefixes that fetches and puts read, by number: locked.
    """

    def __init__(self, dp_rank: int, sizes: EngineSizes, eviction_policy: str) -> None:
        self.dp_rank = dp_rank
        self.page_size = sizes.page_size
        num_pools = len(sizes.host_blocks)
        self.groups_of = [
            [number for number, group in enumerate(sizes.groups) if group.pool == pool]
            for pool in range(num_pools)
        ]
        self.allocators = tuple(
            PageAllocator(num_blocks, f"rank {dp_rank}, host pool {pool}")
            for pool, num_blocks in enumerate(sizes.host_blocks)
        )
        self.cache = RadixCache(
            sizes.groups, self.allocators, sizes.page_size, eviction_policy=eviction_policy
        )
        self.copies: dict[int, HostCopy] = {}
        self.leaving: dict[int, TreeNode] = {}

    def by_pool(self, values: Int32Array) -> tuple[Int32Array, ...]:
        """The values above 0 of `values` int32[groups, n], for each pool."""
        if len(values) == 1:
            return (values[values > 0],)
        in_pools = [values[numbers].reshape(-1) for numbers in self.groups_of]
        return tuple(listed[listed > 0] for listed in in_pools)

    def num_locks(self, pool: int) -> Int32Array:
        """The locks on each block of a pool but the null block, int32[num_blocks]."""
        counts = np.zeros(self.allocators[pool].num_pages, np.int32)
        tree = self.cache.tree
        ends = (*self.leaving.values(), *(copy.node for copy in self.copies.values()))
        for node in chain.from_iterable(tree.path_to(end) for end in ends if end is not None):
            for component in tree.components:
                if component.pool == pool:
                    counts[node.values[component.index]] = node.locks[component.index]
        return counts

    def begin_copy(
        self, number: int, tokens: Int32Array, namespace: str, is_offered: BoolArray
    ) -> Int32Array | None:
        """Take blocks for the offered values of a prefix behind the part that is here.

        Args:
            number: of the copy, at least 1 and never used before.
            tokens: of the prefix, whole pages.
            namespace: of the prefix.
            is_offered: bool[groups, pages], the values to copy.

        Returns the blocks int32[groups, pages], 0 for values that are not copied; None, changing
        nothing but ages, if the whole prefix is here or room lacks.
        """
        node = self.cache.tree.match(tokens, namespace)
        self.cache.tree.settle()
        num_before = 0 if node is None else node.end // self.page_size
        is_copied = is_offered.copy()
        is_copied[:, :num_before] = False
        counts = is_copied.sum(axis=1).tolist()
        if num_before * self.page_size == len(tokens) or not self._make_room(counts):
            if node is not None:
                self.cache.unlock(node)
            return None
        blocks = np.zeros(is_copied.shape, np.int32)
        for allocator, numbers in zip(self.allocators, self.groups_of, strict=True):
            for group in numbers:
                blocks[group, is_copied[group]] = allocator.alloc(counts[group], number)
        self.copies[number] = HostCopy(tokens, namespace, node, num_before, blocks)
        return blocks

    def _make_room(self, counts: Sequence[int]) -> bool:
        """Free blocks for so many values of each group."""
        for pool, allocator in enumerate(self.allocators):
            count = sum(counts[group] for group in self.groups_of[pool])
            deficit = count - allocator.num_free
            if deficit > self.cache.num_evictable[pool]:
                return False
            if deficit > 0:
                # More than it takes, since each eviction has its own cost on the host.
                self.cache.evict(max(deficit, allocator.num_pages // 64), pool)
            if count > allocator.num_free:
                return False
        return True

    def end_copy(
        self,
        number: int,
        *,
        succeeded: bool,
        is_found: BoolArray | None = None,
        lock_for: int | None = None,
    ) -> Int32Array:
        """The blocks of a copy hold their values now, or never will.

        Args:
            number: of the copy.
            succeeded: they hold them.
            is_found: of a load, bool[groups, n]: the values that the next n pages have got, which
                alone are kept; by default, all pages have got all.
            lock_for: the prefix then stays locked as `leaving` under this number.

        Returns the blocks int32[groups, n] of the new pages, 0 for missing values, and for values
        that are not locked; none if nothing was kept, and nothing is locked.
        """
        copy = self.copies.pop(number)
        node, before, unused = copy.node, copy.num_before, copy.blocks
        added = np.zeros((len(unused), 0), np.int32)
        if succeeded and copy.is_wanted:
            blocks = copy.blocks
            if is_found is not None:
                blocks = blocks[:, : before + is_found.shape[1]].copy()
                blocks[:, before:][~is_found] = 0
            tokens = copy.tokens[: blocks.shape[1] * self.page_size]
            offer = LeaseOffer(number, before * self.page_size, blocks, copy.node, copy.namespace)
            kept = self.cache.accept(tokens, offer)
            if kept is not None:
                node, added = kept.node, kept.pages
                unused = unused.copy()
                held = unused[:, before : before + added.shape[1]]
                held[held == added] = 0
        for allocator, listed in zip(self.allocators, self.by_pool(unused), strict=True):
            if len(listed):
                allocator.free(listed, number)
        if node is not None and lock_for is not None and added.size:
            self.leaving[lock_for] = node
            self.cache.drop_unread(added)
        elif node is not None:
            self.cache.unlock(node)
        return added

    def reset(self) -> None:
        """Keep no prefix, and none of the copies in flight; their blocks are free once they end.

        No fetch may hold a lock.
        """
        for number in self.copies:
            self.give_up_copy(number)
        self.cache.reset()

    def give_up_copy(self, number: int) -> None:
        """Keep nothing of a copy in flight; its blocks are free once it ends."""
        copy = self.copies[number]
        if copy.node is not None:
            self.cache.unlock(copy.node)
        self.copies[number] = copy._replace(node=None, is_wanted=False)

    def begin_fetch(self, number: int, tokens: Int32Array, namespace: str) -> Int32Array:
        """Lock the prefix `tokens`, as long as `cache.peek` finds it, until `end_fetch`.

        Returns the blocks int32[groups, pages], 0 for values that its next token does not read.
        """
        match = self.cache.match_prefix(tokens, namespace)
        assert match.node is not None
        self.leaving[number] = match.node
        return match.pages

    def end_fetch(self, number: int) -> None:
        """Undo the lock of `begin_fetch`, or of `end_copy`."""
        self.cache.unlock(self.leaving.pop(number))
