"""The radix cache against a brute-force model, through everything that can happen to it."""

import random

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sgl_jax.core.engine_sizes import FULL_ATTENTION
from sgl_jax.mem_cache.errors import LedgerError
from sgl_jax.mem_cache.eviction.shadow_pages import NUM_CLASSES
from sgl_jax.mem_cache.pages.page_allocator import PageAllocator
from sgl_jax.mem_cache.tree.block_log import BlockLog, BlocksRemoved
from sgl_jax.mem_cache.tree.cache_walk import CacheWalk, audit_cache
from sgl_jax.mem_cache.tree.radix_cache import RadixCache
from sgl_jax.mem_cache.tree.tree_component import LeaseOffer
from sgl_jax.mem_cache.tree_node import TreeNode
from tests.mem_cache.tree_model import (
    NAMESPACES,
    PrefixModel,
    Tokens,
    array_of,
    cached_pages,
    check_shape,
    held_blocks,
    held_pages,
    in_namespace,
    namespace_of,
    shape_of,
    token_lists,
    uses_of_pages,
)

ROW = 1


class RadixCacheMachine(RuleBasedStateMachine):
    """Rules are what leases and evictions do; `locks` are the nodes that leases would hold."""

    page_size = 1
    eviction_policy = "lru"

    @initialize()
    def start(self) -> None:
        self.allocator = PageAllocator(400)
        self.cache = RadixCache(
            FULL_ATTENTION, [self.allocator], self.page_size, eviction_policy=self.eviction_policy
        )
        max_uses = 0 if self.eviction_policy == "lru" else NUM_CLASSES - 1
        self.model = PrefixModel(self.page_size, max_uses)
        self.locks: list[TreeNode] = []

    def accept(self, tokens: Tokens, owned_from: int, node: TreeNode | None = None) -> None:
        """Offer pages of a row for `tokens`; before `owned_from` they are the tree's already.

        `node` is what the lease has locked of them: that lock moves.
        """
        num_fresh = (len(tokens) - owned_from) // self.page_size
        own = self.allocator.alloc(num_fresh, ROW)
        shared = np.array(self.model.pages_of(tokens[:owned_from]), np.int32)
        offered = np.concatenate([shared, own])
        offer = LeaseOffer(ROW, offered[None], node, namespace_of(tokens))
        kept = self.cache.accept(array_of(tokens), offer)
        num_known = 0 if node is None else owned_from // self.page_size
        for prefix, page in zip(self.model.prefixes(tokens), offered.tolist(), strict=True):
            self.model.pages.setdefault(prefix, page)
        self.model.touch(tokens)
        self.model.use(tokens, num_known * self.page_size)
        assert kept.length == len(tokens)
        assert kept.pages[0].tolist() == self.model.pages_of(tokens)[num_known:]
        assert kept.node is not None
        own = offered[num_known:]
        self.allocator.free(own[own != kept.pages[0]], ROW)
        self.locks.append(kept.node)
        self.model.locked.append(tokens)

    @rule(data=st.data(), namespace=st.sampled_from(NAMESPACES))
    def accept_new(self, data: st.DataObject, namespace: str) -> None:
        tokens = data.draw(token_lists(self.page_size))
        self.accept(in_namespace(tokens, namespace), owned_from=0)

    @precondition(lambda self: self.locks)
    @rule(data=st.data())
    def extend_what_is_locked(self, data: st.DataObject) -> None:
        i = data.draw(st.integers(0, len(self.locks) - 1))
        self.extend(i, data.draw(token_lists(self.page_size)))

    def extend(self, i: int, added: Tokens) -> None:
        prefix = self.model.locked.pop(i)
        tokens = prefix + in_namespace(added, namespace_of(prefix))
        self.accept(tokens, len(prefix), self.locks.pop(i))

    @rule(data=st.data(), namespace=st.sampled_from(NAMESPACES))
    def match(self, data: st.DataObject, namespace: str) -> None:
        tokens = data.draw(token_lists(self.page_size, ragged=True))
        self.match_tokens(in_namespace(tokens, namespace), namespace)

    def match_tokens(self, tokens: Tokens, namespace: str) -> None:
        expected = self.model.longest_match(tokens)
        match = self.cache.match_prefix(array_of(tokens), namespace)
        assert match.length == len(expected)
        assert match.pages[0].tolist() == self.model.pages_of(expected)
        assert (match.node is None) == (not expected)
        if match.node is not None:
            self.model.touch(expected)
            self.model.use(expected)
            self.model.locked.append(expected)
            self.locks.append(match.node)

    @precondition(lambda self: self.locks)
    @rule(data=st.data())
    def match_more_than_is_locked(self, data: st.DataObject) -> None:
        """The lock moves to where the longer match ends."""
        i = data.draw(st.integers(0, len(self.locks) - 1))
        self.match_more(i, data.draw(token_lists(self.page_size, ragged=True)))

    def match_more(self, i: int, more: Tokens) -> None:
        prefix, namespace = self.model.locked[i], self.locks[i].namespace
        tokens = prefix + in_namespace(more, namespace)
        expected = self.model.longest_match(tokens)
        below = self.model.pages_of(expected)[len(prefix) // self.page_size :]
        found = self.cache.peek(array_of(tokens), namespace, self.locks[i])
        assert found == len(expected)
        match = self.cache.match_prefix(array_of(tokens), namespace, self.locks[i])
        assert (match.length, match.pages[0].tolist()) == (len(expected), below)
        assert match.node is not None
        assert match.node.end == len(expected)
        self.locks[i], self.model.locked[i] = match.node, expected
        if below:
            # What lies above the lock is as young as what it holds, but not used once more.
            self.model.touch(expected)
            self.model.use(expected, len(prefix))

    @rule(data=st.data(), namespace=st.sampled_from(NAMESPACES))
    def peek_changes_nothing(self, data: st.DataObject, namespace: str) -> None:
        tokens = in_namespace(data.draw(token_lists(self.page_size, ragged=True)), namespace)
        self.peek(tokens, namespace)

    def peek(self, tokens: Tokens, namespace: str) -> None:
        expected = self.model.longest_match(tokens)
        before = shape_of(self.cache.tree)
        assert self.cache.peek(array_of(tokens), namespace) == len(expected)
        assert shape_of(self.cache.tree) == before

    @precondition(lambda self: self.locks)
    @rule(data=st.data())
    def unlock_one(self, data: st.DataObject) -> None:
        self.unlock(data.draw(st.integers(0, len(self.locks) - 1)))

    def unlock(self, i: int) -> None:
        self.cache.unlock(self.locks.pop(i))
        self.model.locked.pop(i)

    @rule(num_pages=st.integers(0, 12))
    def evict_at_once(self, num_pages: int) -> None:
        self.evict(num_pages)

    def evict(self, num_pages: int) -> None:
        expected = min(num_pages, len(self.model.evictable()))
        num_free = self.allocator.num_free
        assert self.cache.evict(num_pages) == expected
        assert self.allocator.num_free == num_free + expected
        gone = self.model.remove_evicted(cached_pages(self.cache.tree))
        assert len(gone) == expected

    @rule(num_pages=st.integers(1, 6))
    def evict_one_by_one(self, num_pages: int) -> None:
        for _ in range(num_pages):
            self.evict(1)

    @rule()
    def reset(self) -> None:
        if self.model.locked:
            with pytest.raises(LedgerError, match="pages are locked"):
                self.cache.reset()
            return
        self.cache.reset()
        self.model.reset()
        assert not self.cache.tree.root.children

    def one_thing(self, rng: random.Random) -> None:
        dice, namespace = rng.randrange(12), rng.choice(["", "", "red"])
        pages = [rng.choice([(1,), (1,), (3,)]) * self.page_size for _ in range(rng.randint(1, 8))]
        plain = tuple(token for page in pages for token in page)
        tokens = in_namespace(plain, namespace)
        i = rng.randrange(len(self.locks)) if self.locks else None
        if len(self.locks) > 6:
            self.unlock(0)
        elif dice < 3:
            self.accept(tokens, 0)
        elif dice < 5:
            self.match_tokens(tokens[: len(tokens) - rng.randrange(self.page_size)], namespace)
        elif dice == 5:
            self.peek(tokens, namespace)
        elif dice == 6:
            self.evict(rng.randint(0, 12))
        elif dice == 7 or i is None:
            self.evict(1)
        elif dice == 8 and len(self.model.locked[i]) < 20 * self.page_size:
            self.extend(i, plain)
        elif dice == 9:
            self.match_more(i, plain)
        elif rng.random() < 0.03:
            self.reset()
        else:
            self.unlock(i)

    @invariant()
    def agrees_with_the_model(self) -> None:
        audit_cache(self.cache, [(node, None) for node in self.locks])
        assert self.cache.num_locks == len(self.locks)
        assert self.cache.num_locked_tokens == sum(map(len, self.model.locked))
        assert sorted(held_pages(self.cache).tolist()) == sorted(self.model.pages.values())
        assert cached_pages(self.cache.tree) == self.model.pages
        assert uses_of_pages(self.cache.tree) == self.model.uses
        num_evictable = len(self.model.evictable())
        assert self.cache.num_evictable == [num_evictable]
        assert self.cache.num_protected == [len(self.model.pages) - num_evictable]
        assert self.allocator.num_tree == len(self.model.pages)
        assert self.allocator.num_leased == 0
        check_shape(self.cache.tree)

    def teardown(self) -> None:
        """Drained and evicted, the pool is full and the tree is its root."""
        if not hasattr(self, "cache"):
            return
        while self.locks:
            self.unlock(0)
        self.cache.evict(self.cache.num_evictable[0])
        assert not self.cache.tree.root.children
        assert self.allocator.num_free == self.allocator.num_pages - 1


class PagedRadixCacheMachine(RadixCacheMachine):
    page_size = 4


class AdaptiveRadixCacheMachine(RadixCacheMachine):
    page_size = 2
    eviction_policy = "adaptive"


TestPageOfOneToken = RadixCacheMachine.TestCase
TestPageOfOneToken.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestPageOfFourTokens = PagedRadixCacheMachine.TestCase
TestPageOfFourTokens.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestAdaptiveEviction = AdaptiveRadixCacheMachine.TestCase
TestAdaptiveEviction.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def cache_with(*sequences: Tokens, allocator: PageAllocator | None = None) -> RadixCache:
    """Pages of one token; nothing is locked."""
    allocator = allocator or PageAllocator(100)
    cache = RadixCache(FULL_ATTENTION, [allocator], 1, eviction_policy="lru")
    for tokens in sequences:
        offered = allocator.alloc(len(tokens), ROW)
        kept = cache.accept(array_of(tokens), LeaseOffer(ROW, offered[None]))
        assert kept.node is not None
        allocator.free(offered[offered != kept.pages[0]], ROW)
        cache.unlock(kept.node)
    return cache


def test_a_match_that_finds_nothing_locks_nothing() -> None:
    cache = cache_with((1, 2, 3))
    match = cache.match_prefix(array_of((9, 9)))
    assert match.node is None
    assert match.length == 0
    assert cache.num_protected == [0]
    audit_cache(cache, [])


def test_the_least_recently_used_goes_first() -> None:
    cache = cache_with((1, 1), (2, 2), (3, 3))
    node = cache.match_prefix(array_of((1, 1))).node
    assert node is not None
    cache.unlock(node)
    cache.evict(4)
    assert set(cached_pages(cache.tree)) == {(1,), (1, 1)}


def test_eviction_shortens_the_last_edge_to_the_deficit() -> None:
    cache = cache_with((1, 2, 3, 4, 5))
    assert cache.evict(2) == 2
    assert set(cached_pages(cache.tree)) == {(1,), (1, 2), (1, 2, 3)}


def test_an_emptied_tree_can_be_evicted_again_and_used_again() -> None:
    cache = cache_with((1, 2))
    assert cache.evict(9) == 2
    assert cache.evict(9) == 0
    audit_cache(cache, [])
    assert cache.match_prefix(array_of((1, 2))).node is None


def test_unlocking_more_often_than_locked_raises() -> None:
    cache = cache_with((1, 2))
    node = cache.match_prefix(array_of((1, 2))).node
    assert node is not None
    cache.unlock(node)
    with pytest.raises(LedgerError, match="unlocked more often"):
        cache.unlock(node)


def test_eviction_never_reaches_what_a_lock_deeper_down_needs() -> None:
    cache = cache_with((1, 2, 3), (1, 2, 4))
    match = cache.match_prefix(array_of((1, 2, 3)))
    assert cache.evict(99) == 1
    assert set(cached_pages(cache.tree)) == {(1,), (1, 2), (1, 2, 3)}
    assert match.node is not None
    audit_cache(cache, [(match.node, None)])


def accept_again(cache: RadixCache, allocator: PageAllocator, tokens: Tokens) -> TreeNode:
    """Offer fresh pages for `tokens`; the node that ends there is locked."""
    pages = allocator.alloc(len(tokens), ROW)
    kept = cache.accept(array_of(tokens), LeaseOffer(ROW, pages[None]))
    assert kept is not None
    assert kept.node is not None
    allocator.free(pages[pages != kept.pages[0]], ROW)
    return kept.node


@pytest.mark.parametrize("length", [0, 2])
def test_beside_a_withdrawn_path_that_is_locked_another_one_takes_its_place(length: int) -> None:
    allocator = PageAllocator(100)
    cache = cache_with((1, 2, 3, 4), (1, 2, 5), allocator=allocator)
    log = cache.tree.block_log = BlockLog()
    old = cache.match_prefix(array_of((1, 2, 3, 4))).node
    assert old is not None
    cache.withdraw(array_of((1, 2, 3, 4)), "", length)
    assert not cache.finds(old)
    assert cache.peek(array_of((1, 2, 3, 4))) == length
    assert cache.peek(array_of((1, 2, 5))) == (3 if length else 0)
    removed = [each.hashes for each in log.take() if isinstance(each, BlocksRemoved)]
    assert len(np.concatenate(removed)) == (2 if length else 5)
    audit_cache(cache, [(old, None)])
    new = accept_again(cache, allocator, (1, 2, 3, 4))
    assert cache.match_prefix(array_of((1, 2, 3, 4))).node is new
    assert len(held_blocks(cache)) == (5 if length else 4)
    locks = [(old, None), (new, None), (new, None)]
    audit_cache(cache, locks)
    walk = CacheWalk(cache)
    while walk.has_nodes:
        walk.check_some(locks)
    walk.check_rest(0)
    log.take()
    cache.unlock(old)
    assert not log.take(), "the blocks are the new path's"
    assert not any(node.is_withdrawn for node in cache.nodes())
    audit_cache(cache, locks[1:])
    assert cache.evict(99) == (1 if length else 0)


def test_nothing_joins_a_withdrawn_path() -> None:
    allocator = PageAllocator(100)
    cache = cache_with((1, 2, 3, 4), allocator=allocator)
    upper = cache.match_prefix(array_of((1, 2))).node
    lower = cache.match_prefix(array_of((1, 2, 3, 4))).node
    assert upper is not None
    assert lower is not None
    cache.withdraw(array_of((1, 2, 3, 4)), "", 0)
    locks = [(upper, None), (lower, None)]
    tokens = array_of((1, 2, 3, 4, 5))
    assert cache.accept(tokens, LeaseOffer(ROW, np.zeros((1, 5), np.int32), lower)) is None
    assert cache.peek(tokens, "", upper) == 2, "what is below is withdrawn, too"
    key = cache.next_key(upper, tokens[2:], "")
    assert not cache.cursors.is_awaited(upper, key), "nor is it published again and again"
    audit_cache(cache, locks)
    again = accept_again(cache, allocator, (1, 2, 3))
    cache.withdraw(tokens, "", 1)  # of the new path, all but a page
    assert cache.peek(tokens) == 1
    audit_cache(cache, [*locks, (again, None)])
    for node in (upper, again, lower):
        cache.unlock(node)
    audit_cache(cache, [])
    assert cache.evict(99) == 1


def test_more_of_a_withdrawn_path_that_is_locked_is_withdrawn() -> None:
    allocator = PageAllocator(100)
    cache = cache_with((1, 2, 3, 4), allocator=allocator)
    lower = cache.match_prefix(array_of((1, 2, 3, 4))).node
    assert lower is not None
    locks = [(lower, None)]
    for length in (3, 2, 0):
        cache.withdraw(array_of((1, 2, 3, 4)), "", length)
        assert cache.peek(array_of((1, 2, 3, 4))) == length
        again = accept_again(cache, allocator, (1, 2, 3, 4))
        locks.append((again, None))
        audit_cache(cache, locks)
    for node, _ in locks:
        cache.unlock(node)
    audit_cache(cache, [])
    assert cache.evict(99) == 4


def test_a_walk_visits_the_rest_of_an_edge_whose_end_was_split_off_and_evicted() -> None:
    allocator = PageAllocator(100)
    cache = cache_with((1, 2, 3, 4), allocator=allocator)
    walk = CacheWalk(cache)  # lists the edge
    match = cache.match_prefix(array_of((1, 2)))
    assert cache.evict(99) == 2
    while walk.has_nodes:
        walk.check_some([(match.node, None)])
    walk.check_rest(0)
