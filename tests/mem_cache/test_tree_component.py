"""A second kind of KV can live on the tree: state snapshots at node ends, as linear attention has.

The component here is the smallest that is honest: at most one snapshot slot at a node's end,
internal nodes too; a lock holds its node alone; a prefix is usable up to its deepest snapshot.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sgl_jax.mem_cache.errors import LedgerError
from sgl_jax.mem_cache.eviction_policy import LruPolicy
from sgl_jax.mem_cache.eviction_queue import EvictionQueue
from sgl_jax.mem_cache.full_component import FullComponent
from sgl_jax.mem_cache.page_allocator import TREE, PageAllocator
from sgl_jax.mem_cache.radix_tree import RadixTree
from sgl_jax.mem_cache.tree_component import PathStep
from sgl_jax.mem_cache.tree_node import TreeNode
from tests.mem_cache.tree_model import (
    PrefixModel,
    Tokens,
    cached_pages,
    check_shape,
    shape_of,
    token_lists,
    tokens_to,
)

ROW = 1


class SnapshotOffer(NamedTuple):
    """A `LeaseOffer` that also brings snapshots, by the length of their prefix."""

    owner: int
    owned_from: int
    pages: np.ndarray
    snapshots: dict[int, int]
    namespace: str = ""


class SnapshotComponent:
    """State snapshots; a unit is a slot of `slots`. Implements `TreeComponent`."""

    def __init__(self, index: int, slots: PageAllocator) -> None:
        self.index = index
        self.slots = slots
        self.queue: EvictionQueue[TreeNode] = EvictionQueue()
        self.num_evictable = 0
        self.num_protected = 0
        self.dropped: list[int] = []

    def usable_len(self, path: Sequence[PathStep], length: int) -> int:
        ends = (
            step.node.end
            for step in path
            if step.num_matched == len(step.node.key)
            and step.node.end <= length
            and step.node.values[self.index] is not None
        )
        return max(ends, default=0)

    def absorb(self, node: TreeNode, offer: SnapshotOffer) -> None:
        slot = offer.snapshots.get(node.end)
        if slot is None or node.values[self.index] is not None:
            return
        self.slots.give_to_tree(np.array([slot], np.int32), offer.owner)
        node.values[self.index] = slot
        if node.locks[self.index]:
            self.num_protected += 1
        else:
            self.num_evictable += 1
        self.refresh(node)

    def split(self, upper: TreeNode, lower: TreeNode) -> None:
        upper.values[self.index] = None

    def may_merge(self, upper: TreeNode, lower: TreeNode) -> bool:
        return upper.values[self.index] is None and upper.locks[self.index] == 0

    def merge(self, upper: TreeNode, lower: TreeNode) -> None:
        """A snapshot is of the lower end, which stays where it is."""

    def lock(self, node: TreeNode) -> None:
        node.locks[self.index] += 1
        if node.locks[self.index] == 1 and node.values[self.index] is not None:
            self.num_evictable -= 1
            self.num_protected += 1
        self.refresh(node)

    def unlock(self, node: TreeNode) -> None:
        if node.locks[self.index] <= 0:
            raise LedgerError(f"{node!r} is unlocked more often than it was locked")
        node.locks[self.index] -= 1
        if node.locks[self.index] == 0 and node.values[self.index] is not None:
            self.num_evictable += 1
            self.num_protected -= 1
        self.refresh(node)

    def move_lock(self, old: TreeNode, new: TreeNode) -> None:
        self.lock(new)
        self.unlock(old)

    def is_evictable(self, node: TreeNode) -> bool:
        return node.values[self.index] is not None and node.locks[self.index] == 0

    def refresh(self, node: TreeNode) -> None:
        if self.is_evictable(node):
            self.queue.add(node)
        else:
            self.queue.discard(node)

    def drop(self, node: TreeNode, keep_tokens: int) -> None:
        self.tombstone(node)

    def tombstone(self, node: TreeNode) -> None:
        if node.values[self.index] is None:
            return
        assert node.locks[self.index] == 0
        self.dropped.append(node.values[self.index])
        node.values[self.index] = None
        self.num_evictable -= 1
        self.refresh(node)

    def flush_dropped(self) -> None:
        self.slots.free(np.array(self.dropped, np.int32), TREE)
        self.dropped.clear()

    def next_victim(self, num_units: int, now: int) -> tuple[TreeNode, int] | None:
        node = self.queue.oldest()
        return None if node is None else (node, len(node.key))

    def audit(self, nodes: Sequence[TreeNode], leaves_of_leases: Sequence[TreeNode]) -> None:
        locks = Counter(node.node_id for node in leaves_of_leases)
        having = [node for node in nodes if node.values[self.index] is not None]
        assert all(node.locks[self.index] == locks[node.node_id] for node in nodes)
        assert all((node in self.queue) == self.is_evictable(node) for node in nodes)
        assert len(self.queue) == sum(self.is_evictable(node) for node in nodes)
        assert self.num_evictable == sum(node.locks[self.index] == 0 for node in having)
        assert self.num_evictable + self.num_protected == len(having) == self.slots.num_tree


class HybridTreeMachine(RuleBasedStateMachine):
    """FULL and snapshots together; the model keeps pages by prefix and snapshots by prefix."""

    page_size = 2

    @initialize()
    def start(self) -> None:
        self.allocator = PageAllocator(300)
        self.slots = PageAllocator(100, "snapshots")
        policy = LruPolicy()
        self.full = FullComponent(0, self.allocator, self.page_size, policy)
        self.states = SnapshotComponent(1, self.slots)
        self.tree = RadixTree(self.page_size, [self.full, self.states], policy)
        self.model = PrefixModel(self.page_size)
        self.snapshots: dict[Tokens, int] = {}
        self.locks: list[TreeNode] = []

    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        """As a prefill does: insert boundary by boundary, a snapshot at some of them."""
        tokens = data.draw(token_lists(self.page_size))
        boundaries = data.draw(st.sets(st.sampled_from(self.model.prefixes(tokens)), max_size=2))
        for prefix in sorted({*boundaries, tokens}, key=len):
            self.insert(prefix, with_snapshot=prefix in boundaries)

    def insert(self, tokens: Tokens, *, with_snapshot: bool) -> None:
        offered = self.allocator.alloc(len(tokens) // self.page_size, ROW)
        slots = self.slots.alloc(int(with_snapshot), ROW)
        snapshots = {len(tokens): int(slot) for slot in slots}
        offer = SnapshotOffer(ROW, 0, offered, snapshots)
        node = self.tree.insert(np.array(tokens, np.int32), offer)
        assert tokens_to(node) == tokens
        kept = self.full.pages_of(self.tree.path_to(node))
        self.allocator.free(offered[offered != kept], ROW)
        self.slots.free(slots[slots != node.values[1]], ROW)
        for prefix, page in zip(self.model.prefixes(tokens), offered.tolist(), strict=True):
            self.model.pages.setdefault(prefix, page)
        if with_snapshot:
            self.snapshots.setdefault(tokens, int(slots[0]))
        self.model.touch(tokens)
        self.model.use(tokens)

    @rule(data=st.data())
    def match(self, data: st.DataObject) -> None:
        tokens = data.draw(token_lists(self.page_size, ragged=True))
        expected = self.longest_usable(tokens)
        node = self.tree.match(np.array(tokens, np.int32))
        assert (tokens_to(node) if node else ()) == expected
        if node is not None:
            self.model.touch(expected)
            self.model.use(expected)
            self.model.locked.append(expected)
            self.locks.append(node)

    @rule(data=st.data())
    def peek_changes_nothing(self, data: st.DataObject) -> None:
        tokens = data.draw(token_lists(self.page_size, ragged=True))
        before = shape_of(self.tree)
        path, length = self.tree.peek(np.array(tokens, np.int32))
        assert length == sum(step.num_matched for step in path) == len(self.longest_usable(tokens))
        assert shape_of(self.tree) == before

    def longest_usable(self, tokens: Tokens) -> Tokens:
        prefixes = self.model.prefixes(self.model.longest_match(tokens))
        return max((p for p in prefixes if p in self.snapshots), key=len, default=())

    @precondition(lambda self: self.locks)
    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        i = data.draw(st.integers(0, len(self.locks) - 1))
        self.tree.unlock(self.locks.pop(i))
        self.model.locked.pop(i)

    @rule(num_pages=st.integers(1, 8))
    def evict_pages(self, num_pages: int) -> None:
        expected = min(num_pages, len(self.model.evictable()))
        assert self.tree.evict(self.full, num_pages) == expected
        self.model.remove_evicted(cached_pages(self.tree))
        self.snapshots = {p: s for p, s in self.snapshots.items() if p in self.model.pages}

    @rule(num_slots=st.integers(1, 3))
    def evict_snapshots(self, num_slots: int) -> None:
        unlocked = [prefix for prefix in self.snapshots if prefix not in self.model.locked]
        expected = min(num_slots, len(unlocked))
        assert self.tree.evict(self.states, num_slots) == expected
        kept = {tokens_to(n): n.values[1] for n in self.tree.nodes() if n.values[1] is not None}
        gone = self.snapshots.keys() - kept.keys()
        assert len(gone) == expected
        assert gone <= set(unlocked)
        self.snapshots = {p: s for p, s in self.snapshots.items() if p not in gone}

    @invariant()
    def agrees_with_the_model(self) -> None:
        check_shape(self.tree)
        nodes = list(self.tree.nodes())
        self.full.audit(nodes, self.locks)
        self.states.audit(nodes, self.locks)
        assert cached_pages(self.tree) == self.model.pages
        kept = {tokens_to(node): node.values[1] for node in nodes if node.values[1] is not None}
        assert kept == self.snapshots
        assert self.slots.num_leased == self.allocator.num_leased == 0

    def teardown(self) -> None:
        if not hasattr(self, "tree"):
            return
        for node in self.locks:
            self.tree.unlock(node)
        self.tree.evict(self.full, self.full.num_evictable)
        assert not self.tree.root.children
        assert self.slots.num_free == self.slots.num_pages - 1


TestHybridTree = HybridTreeMachine.TestCase
TestHybridTree.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
