"""The blocks of one rank in CPU memory: their owners, and the prefixes that they hold.

A block holds the contents of a page or of a state slot. A `RadixCache` over the blocks keeps the
prefixes, so lookbacks, namespaces, locks, eviction and healing follow the same rules as on the
device.

    free -> arriving (owned by a copy from the device) -> cached (owned by the tree) -> free

A fetch to the device, or a write to the store, locks the cached blocks that it reads: they are
leaving. A copy locks the prefix that it continues. There are no further locks. A load from the
store fills blocks in the same way as a copy from the device.
"""

from itertools import chain
from typing import NamedTuple

import numpy as np

from sgl_jax.core.engine_sizes import EngineSizes
from sgl_jax.core.step_plan import BoolArray, Int32Array
from sgl_jax.mem_cache.memory_view import CpuPoolView
from sgl_jax.mem_cache.pages.page_allocator import PageAllocator
from sgl_jax.mem_cache.tree.radix_cache import RadixCache
from sgl_jax.mem_cache.tree.tree_component import LeaseOffer
from sgl_jax.mem_cache.tree_node import TreeNode


class CpuCopy(NamedTuple):
    """A prefix with an end in transit from the device or the store; its number owns the blocks."""

    tokens: Int32Array  # whole pages
    namespace: str
    node: TreeNode | None  # locked end of the part that was cached before
    num_before: int  # pages of that part
    blocks: Int32Array  # [groups, pages of the prefix]; 0 for values not copied
    is_wanted: bool = True  # False if the copy was given up


class CpuPool:
    """The blocks of rank `dp_rank`, in pools with the sizes `sizes.host_blocks`.

    Attributes:
        cache: the cached prefixes.
        copies: prefixes in transit from the device or the store, by transfer number.
        leaving: locked ends of the prefixes that fetches and writes read, by transfer number.
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
        # Each eviction on the host has a fixed cost.
        self._num_evicted_ahead = [allocator.num_pages // 64 for allocator in self.allocators]
        self.copies: dict[int, CpuCopy] = {}
        self.leaving: dict[int, TreeNode] = {}

    def by_pool(self, values: Int32Array) -> tuple[Int32Array, ...]:
        """Return the values above 0 of `values` int32[groups, n], for each pool."""
        if len(values) == 1:
            return (values[values > 0],)
        in_pools = [values[numbers].reshape(-1) for numbers in self.groups_of]
        return tuple(listed[listed > 0] for listed in in_pools)

    def num_locks(self, pool: int) -> Int32Array:
        """Return the locks on each block of a pool except the null block, int32[num_blocks]."""
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
        """Take blocks for the offered values of a prefix, after the part already cached.

        Args:
            number: new number of the copy, at least 1.
            tokens: whole pages.
            namespace: namespace of the prefix.
            is_offered: bool[groups, pages], the values that can be copied.

        Return the blocks int32[groups, pages], 0 for values not copied. Return None, changing only
        ages, if the whole prefix is cached or free blocks are short.
        """
        node = self.cache.match_prefix(tokens, namespace).node
        num_before = 0 if node is None else node.end // self.page_size
        is_copied = is_offered.copy()
        is_copied[:, :num_before] = False
        counts = is_copied.sum(axis=1).tolist()
        of_pools = [sum(counts[group] for group in numbers) for numbers in self.groups_of]
        if num_before * self.page_size == len(tokens) or not self.cache.make_room(
            of_pools, self._num_evicted_ahead
        ):
            if node is not None:
                self.cache.unlock(node)
            return None
        blocks = np.zeros(is_copied.shape, np.int32)
        for allocator, numbers in zip(self.allocators, self.groups_of, strict=True):
            for group in numbers:
                blocks[group, is_copied[group]] = allocator.alloc(counts[group], number)
        self.copies[number] = CpuCopy(tokens, namespace, node, num_before, blocks)
        return blocks

    def end_copy(
        self,
        number: int,
        *,
        succeeded: bool,
        is_found: BoolArray | None = None,
        lock_for: int | None = None,
    ) -> Int32Array:
        """End a copy: either its blocks hold their values now, or it failed.

        Args:
            number: number of the copy.
            succeeded: whether the blocks hold their values.
            is_found: bool[groups, n], for a load: the values that arrived for the next n pages.
                Only these are kept. None if all pages have all their values.
            lock_for: if given, the prefix stays locked in `leaving` under this number.

        Return the blocks int32[groups, n] of the new pages, 0 for missing or unlocked
        values. If nothing was kept, n is 0 and nothing is locked.
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
            offer = LeaseOffer(number, blocks, copy.node, copy.namespace)
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
        """Drop all prefixes and give up all copies. No fetch may hold a lock."""
        for number in self.copies:
            self.give_up_copy(number)
        self.cache.reset()

    def give_up_copy(self, number: int) -> None:
        """Discard a copy in flight. Its blocks are freed when it ends."""
        copy = self.copies[number]
        if copy.node is not None:
            self.cache.unlock(copy.node)
        self.copies[number] = copy._replace(node=None, is_wanted=False)

    def begin_fetch(self, number: int, tokens: Int32Array, namespace: str) -> Int32Array:
        """Lock the prefix `tokens`, exactly as long as `cache.peek` finds it, until `end_fetch`.
        Return the blocks int32[groups, pages], 0 for values that its next token does not read."""
        match = self.cache.match_prefix(tokens, namespace)
        assert match.node is not None
        self.leaving[number] = match.node
        return match.pages

    def end_fetch(self, number: int) -> None:
        """Undo the lock of `begin_fetch` or `end_copy`."""
        self.cache.unlock(self.leaving.pop(number))

    def views(self) -> list[CpuPoolView]:
        return [
            CpuPoolView(
                total_blocks=allocator.num_pages,
                free_blocks=allocator.num_free,
                arriving_blocks=allocator.num_leased,
                cached_blocks=allocator.num_tree,
                leaving_blocks=num_leaving,
                reserved_blocks=allocator.num_reserved,
            )
            for allocator, num_leaving in zip(
                self.allocators, self.cache.num_protected, strict=True
            )
        ]
