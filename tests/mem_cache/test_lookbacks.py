"""Windows on the tree, beside the model that is the rule of lookbacks written down."""

import random
from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sgl_jax.core.engine_sizes import LAST_VALUE, CacheGroup
from sgl_jax.mem_cache.eviction.eviction_policy import EVICTION_POLICIES
from sgl_jax.mem_cache.pages.page_allocator import PageAllocator
from sgl_jax.mem_cache.tree.cache_walk import audit_cache
from sgl_jax.mem_cache.tree.prefix_cursor import PrefixCursor
from sgl_jax.mem_cache.tree.prompt_tree import PromptTree, RankPrompts
from sgl_jax.mem_cache.tree.radix_cache import RadixCache
from sgl_jax.mem_cache.tree.tree_component import FirstPages, LeaseOffer
from sgl_jax.mem_cache.tree_node import TreeNode
from tests.mem_cache.lookback_model import Lock, LookbackModel
from tests.mem_cache.tree_model import (
    NAMESPACES,
    Tokens,
    array_of,
    check_shape,
    held_pages,
    in_namespace,
    namespace_of,
    token_lists,
    tokens_to,
)
from tests.support.long import long_but

ROW = 1
Audit = Callable[[RadixCache, Sequence[tuple[TreeNode, FirstPages]]], None]


def values_on_tree(cache: RadixCache) -> dict[Tokens, list[int]]:
    """What `LookbackModel.pages` should be."""
    found: dict[Tokens, list[int]] = {}
    for leaf in cache.tree.nodes():
        if leaf.children:
            continue
        tokens, pages = tokens_to(leaf), cache.tree.pages_to(leaf).T.tolist()
        for end in range(leaf.end, 0, -cache.tree.page_size):
            if tokens[:end] in found:
                break  # the rest is that of another leaf
            found[tokens[:end]] = pages[end // cache.tree.page_size - 1]
    return found


class LookbackMachine(RuleBasedStateMachine):
    """Leases match, publish with what they still have, free windows early, and end."""

    layouts: ClassVar = [
        [(None, 0), (3, 0)],  # of each group: window in tokens, pool, whether it is recurrent
        [(4, 0), (None, 0)],
        [(None, 0), (5, 1)],
        [(9, 1), (None, 0)],
        [(6, 0)],
        [(None, 0), (2, 0), (7, 0)],
        [(None, 0), (4, 1), (9, 1)],
        [(3, 0), (8, 1)],
        [(None, 0), (LAST_VALUE, 1, True)],
        [(None, 0), (5, 0), (LAST_VALUE, 1, True)],
        [(None, 0), (7, 1), (LAST_VALUE, 2, True)],
    ]

    @initialize(
        layout=st.sampled_from(range(len(layouts))),
        page_size=st.integers(1, 4),
        policy=st.sampled_from(EVICTION_POLICIES),
    )
    def start(self, layout: int, page_size: int, policy: str) -> None:
        self.begin(layout, page_size, policy)

    def begin(self, layout: int, page_size: int, policy: str, audit: Audit = audit_cache) -> None:
        self.audit = audit
        self.page_size = page_size
        self.groups = [
            CacheGroup(window, pool, (), *rest)
            for window, pool, *rest in self.layouts[layout]  # type: ignore[attr-defined]
        ]
        num_pools = max(group.pool for group in self.groups) + 1
        self.allocators = [PageAllocator(1500, f"pool {pool}") for pool in range(num_pools)]
        self.prompts = PromptTree(page_size, 1)
        self.cache = RadixCache(
            self.groups,
            self.allocators,
            page_size,
            eviction_policy=policy,
            prompts=RankPrompts(self.prompts, 0),
        )
        self.model = LookbackModel(self.groups, page_size)
        self.nodes: list[TreeNode] = []  # of the model's locks
        self.cursors: list[tuple[PrefixCursor, Tokens]] = []
        self.told: dict[int, int] = {}
        # What is written in each page: the group, and the prefix whose last page it is.
        self.content: dict[tuple[int, int], tuple[int, Tokens]] = {}

    # -- leases -----------------------------------------------------------------------------

    def offer(self, tokens: Tokens, owned_from: int, zeros: list[int], lock: Lock | None) -> None:
        """Publish as a row does that owns what is behind `owned_from`, but for the windows' pages
        before `zeros` of each group, and all states but those at multiples of as many pages."""
        model, count = self.model, len(tokens) // self.page_size
        first = owned_from // self.page_size
        offered = np.zeros((len(self.groups), count), np.int32)
        prefixes = model.prefixes(tokens)
        for group, (window, pool, *_) in enumerate(self.groups):
            offered[group, :first] = [model.pages[each][group] for each in prefixes[:first]]
            begin = first if window is None else max(first, min(zeros[group], count))
            owned = list(range(begin, count))
            if self.groups[group].is_recurrent:
                interval = 1 + zeros[group] % 5
                owned = [each for each in range(first, count) if (each + 1) % interval == 0]
            offered[group, owned] = self.allocators[pool].alloc(len(owned), ROW)
            for number in owned:
                self.content[pool, int(offered[group, number])] = group, prefixes[number]
        namespace, node, firsts = namespace_of(tokens), None, [0] * len(self.groups)
        if lock is not None:
            i = model.locks.index(lock)
            node, firsts = self.nodes.pop(i), lock.firsts
            model.locks.pop(i)
        given = None if lock is None else firsts
        offer = LeaseOffer(ROW, offered, node, namespace, given)
        kept = self.cache.accept(array_of(tokens), offer)
        assert kept is not None
        assert kept.node is not None
        assert kept.length == kept.node.end == len(tokens)
        model.insert(tokens, offered.tolist(), owned_from)
        model.locks.append(Lock(tokens, firsts))
        self.nodes.append(kept.node)
        model.drop_dead()
        expected = [[model.pages[each][g] for each in prefixes] for g in range(len(self.groups))]
        begin = 0 if node is None else first
        assert kept.pages.tolist() == [row[begin:] for row in expected]
        for group, (_, pool, *_) in enumerate(self.groups):
            own = offered[group, first:]
            duplicates = own[(own != kept.pages[group, first - begin :]) & (own != 0)]
            self.allocators[pool].free(duplicates, ROW)

    @rule(data=st.data(), namespace=st.sampled_from(NAMESPACES))
    def publish(self, data: st.DataObject, namespace: str) -> None:
        """A request that has matched nothing, or not looked."""
        tokens = in_namespace(data.draw(token_lists(self.page_size)), namespace)
        zeros = [data.draw(st.integers(0, 4)) for _ in self.groups]
        self.offer(tokens, 0, zeros, None)

    @rule(data=st.data(), namespace=st.sampled_from(NAMESPACES))
    def compute_as_an_engine_does(self, data: st.DataObject, namespace: str) -> None:
        """Match, then publish chunk by chunk, letting go of what each window has passed."""
        tokens = in_namespace(data.draw(token_lists(self.page_size)), namespace)
        self.compute(tokens, namespace, data.draw(st.lists(st.integers(1, 3), min_size=6)))

    def compute(self, tokens: Tokens, namespace: str, chunks: list[int]) -> None:
        """`chunks` are pages."""
        self.match_tokens(tokens[:-1], namespace)
        prefix = self.model.longest_match(tokens[:-1])
        lock = self.model.locks[-1] if prefix else None
        length = len(prefix)
        for chunk in chunks:
            if length == len(tokens):
                break
            end = min(length + chunk * self.page_size, len(tokens))
            zeros = [self.model.first_read(group, length) for group in range(len(self.groups))]
            self.offer(tokens[:end], length, zeros, lock)
            self.after_a_chunk()
            lock, length = self.model.locks[-1], end
            for group, first in enumerate(zeros):
                # What a row without a snapshot at its end has not locked it does not read.
                is_read = not self.groups[group].is_recurrent or self.model.can_resume(tokens[:end])
                self.unlock_passed(
                    len(self.nodes) - 1, group, first if is_read else end // self.page_size
                )

    def after_a_chunk(self) -> None:
        """The place for further checks while a prompt is computed."""

    @precondition(lambda self: self.nodes)
    @rule(data=st.data())
    def extend(self, data: st.DataObject) -> None:
        lock = data.draw(st.sampled_from(self.model.locks))
        added = data.draw(token_lists(self.page_size))
        tokens = lock.prefix + in_namespace(added, namespace_of(lock.prefix))
        zeros = [data.draw(st.integers(0, 7)) for _ in self.groups]
        self.offer(tokens, len(lock.prefix), zeros, lock)

    @rule(data=st.data(), namespace=st.sampled_from(NAMESPACES))
    def match(self, data: st.DataObject, namespace: str) -> None:
        tokens = in_namespace(data.draw(token_lists(self.page_size, ragged=True)), namespace)
        self.match_tokens(tokens, namespace)

    def match_tokens(self, tokens: Tokens, namespace: str) -> None:
        expected = self.model.longest_match(tokens)
        assert self.cache.peek(array_of(tokens), namespace) == len(expected)
        match = self.cache.match_prefix(array_of(tokens), namespace)
        assert match.length == len(expected)
        self.check_pages_read(match.pages, expected, 0)
        assert (match.node is None) == (not expected)
        if match.node is not None:
            self.model.locks.append(Lock(expected, [0] * len(self.groups)))
            self.nodes.append(match.node)

    def check_pages_read(self, pages: np.ndarray, prefix: Tokens, behind: int) -> None:
        """A match answers what is read from there, which holds what it should."""
        prefixes = self.model.prefixes(prefix)
        for group, (_, pool, *_) in enumerate(self.groups):
            first = self.model.first_read(group, len(prefix))
            expected = [
                self.model.pages[each][group] if number >= first else 0
                for number, each in enumerate(prefixes)
            ][behind:]
            assert pages[group].tolist() == expected
            for number, page in enumerate(expected, behind):
                if page:
                    assert self.content[pool, page] == (group, prefixes[number])

    @precondition(lambda self: self.nodes)
    @rule(data=st.data())
    def match_more_than_is_locked(self, data: st.DataObject) -> None:
        i = data.draw(st.integers(0, len(self.nodes) - 1))
        lock, namespace = self.model.locks[i], self.nodes[i].namespace
        more = data.draw(token_lists(self.page_size, ragged=True))
        tokens = lock.prefix + in_namespace(more, namespace)
        expected = max(lock.prefix, self.model.longest_match(tokens), key=len)
        assert self.cache.peek(array_of(tokens), namespace, self.nodes[i]) == len(expected)
        behind = len(lock.prefix) // self.page_size
        start, firsts = self.nodes[i], lock.firsts
        match = self.cache.match_prefix(array_of(tokens), namespace, start, firsts)
        assert match.length == len(expected)
        self.check_pages_read(match.pages, expected, behind)
        assert match.node is not None
        self.nodes[i], lock.prefix = match.node, expected
        self.model.drop_dead()

    @precondition(lambda self: self.nodes)
    @rule(data=st.data())
    def free_early(self, data: st.DataObject) -> None:
        i = data.draw(st.integers(0, len(self.nodes) - 1))
        group = data.draw(st.integers(0, len(self.groups) - 1))
        end = len(self.model.locks[i].prefix) // self.page_size
        self.unlock_passed(i, group, data.draw(st.integers(0, end)))

    def unlock_passed(self, i: int, group: int, first: int) -> None:
        lock = self.model.locks[i]
        first = min(first, len(lock.prefix) // self.page_size)
        if self.groups[group].sliding_window is None or first <= lock.firsts[group]:
            return
        self.cache.unlock_passed(self.nodes[i], group, lock.firsts[group], first)
        lock.firsts[group] = first
        self.model.drop_dead()

    @precondition(lambda self: self.nodes)
    @rule(data=st.data())
    def unlock_one(self, data: st.DataObject) -> None:
        self.unlock(data.draw(st.integers(0, len(self.nodes) - 1)))

    def unlock(self, i: int) -> None:
        self.cache.unlock(self.nodes.pop(i), self.model.locks.pop(i).firsts)
        self.model.drop_dead()

    @rule(seed=st.integers(0, 2**32))
    def many_things(self, seed: int) -> None:
        """Twenty at random: rules alone seldom split, merge or heal what is locked and watched."""
        rng = random.Random(seed)
        for _ in range(20):
            self.one_thing(rng)
            self.agrees_with_the_model()

    def one_thing(self, rng: random.Random) -> None:
        dice, namespace = rng.randrange(10), rng.choice(["", "", "red"])
        chosen = [rng.choice([(1,), (1,), (3,)]) * self.page_size for _ in range(rng.randint(1, 8))]
        tokens = in_namespace(tuple(token for page in chosen for token in page), namespace)
        if len(self.nodes) > 6:
            self.unlock(rng.randrange(len(self.nodes)))
        if dice == 0:
            self.offer(tokens, 0, [rng.randint(0, 6) for _ in self.groups], None)
        elif dice <= 2:
            self.compute(tokens, namespace, [rng.randint(1, 3) for _ in range(8)])
        elif dice == 3:
            self.match_tokens(tokens, namespace)
        elif dice == 4 and self.nodes:
            lock = rng.choice(self.model.locks)
            if len(lock.prefix) > 20 * self.page_size:
                return
            longer = lock.prefix + in_namespace(
                array_of(tokens).tolist(), namespace_of(lock.prefix)
            )
            self.offer(longer, len(lock.prefix), [rng.randint(0, 9) for _ in self.groups], lock)
        elif dice == 5 and self.nodes:
            i = rng.randrange(len(self.nodes))
            self.unlock_passed(i, rng.randrange(len(self.groups)), rng.randint(0, 8))
        elif dice == 6 and self.nodes:
            self.unlock(rng.randrange(len(self.nodes)))
        elif dice == 7:
            if len(self.cursors) > 6:
                self.prompts.unfollow(self.cursors.pop(rng.randrange(7))[0].prefix)
            self.add_cursor(tokens, namespace)
        elif dice == 8:
            self.ask_whether_any_has_moved()
        else:
            num_pages = rng.randint(1, 4 + len(self.model.pages) // 4)
            self.evict_from(rng.randrange(len(self.allocators)), num_pages)

    # -- memory -----------------------------------------------------------------------------

    @rule(data=st.data(), num_pages=st.integers(0, 12))
    def evict(self, data: st.DataObject, num_pages: int) -> None:
        self.evict_from(data.draw(st.integers(0, len(self.allocators) - 1)), num_pages)

    def evict_from(self, pool: int, num_pages: int) -> None:
        model = self.model
        evictable, _ = model.counts(pool)
        num_free = [allocator.num_free for allocator in self.allocators]
        num_held = sum(allocator.num_tree for allocator in self.allocators)
        num_before = self.cache.num_evicted
        freed = self.cache.evict(num_pages, pool)
        assert freed == self.allocators[pool].num_free - num_free[pool]
        assert freed >= min(num_pages, evictable)
        num_gone = num_held - sum(allocator.num_tree for allocator in self.allocators)
        assert self.cache.num_evicted - num_before == num_gone
        if num_pages == 0:
            assert num_gone == 0
        model.remove_evicted(values_on_tree(self.cache))
        # Whatever else changes the model has it drop what is dead; here the tree must have.
        before = {prefix: list(values) for prefix, values in model.pages.items()}
        model.drop_dead()
        assert model.pages == before, "something dead is on the tree"

    @rule()
    def reset(self) -> None:
        while self.nodes:
            self.unlock(0)
        self.cache.reset()
        assert not self.cache.tree.root.children
        self.model.pages.clear()

    # -- cursors ----------------------------------------------------------------------------

    @rule(data=st.data(), namespace=st.sampled_from(NAMESPACES))
    def follow(self, data: st.DataObject, namespace: str) -> None:
        tokens = in_namespace(data.draw(token_lists(self.page_size, ragged=True)), namespace)
        self.add_cursor(tokens, namespace)

    def add_cursor(self, tokens: Tokens, namespace: str) -> None:
        cursor = PrefixCursor(self.prompts.follow(array_of(tokens), namespace), 0)
        self.cursors.append((cursor, tokens))
        self.told[id(cursor)] = cursor.length

    @precondition(lambda self: self.cursors)
    @rule(data=st.data())
    def unfollow(self, data: st.DataObject) -> None:
        i = data.draw(st.integers(0, len(self.cursors) - 1))
        self.prompts.unfollow(self.cursors.pop(i)[0].prefix)

    @rule()
    def ask_whether_any_has_moved(self) -> None:
        has_moved = self.cache.cursors.take_has_moved()
        for cursor, _ in self.cursors:
            assert cursor.length == self.told[id(cursor)] or has_moved
            self.told[id(cursor)] = cursor.length

    # -- proof ------------------------------------------------------------------------------

    @invariant()
    def agrees_with_the_model(self) -> None:
        model = self.model
        self.audit(
            self.cache,
            [(node, lock.firsts) for node, lock in zip(self.nodes, model.locks, strict=True)],
        )
        assert all(
            tokens_to(node) == lock.prefix
            for node, lock in zip(self.nodes, model.locks, strict=True)
        )
        assert values_on_tree(self.cache) == model.pages
        counts = [model.counts(pool) for pool in range(len(self.allocators))]
        assert self.cache.num_evictable == [evictable for evictable, _ in counts]
        assert self.cache.num_protected == [protected for _, protected in counts]
        for pool, allocator in enumerate(self.allocators):
            assert allocator.num_tree == sum(counts[pool]) == len(held_pages(self.cache, pool))
            assert allocator.num_leased == 0
        for cursor, tokens in self.cursors:
            assert cursor.length == len(model.longest_match(tokens)), cursor
        check_shape(self.cache.tree)

    def teardown(self) -> None:
        """Drained and evicted, the pools are full and the tree is its root."""
        if not hasattr(self, "cache"):
            return
        self.agrees_with_the_model()
        self.reset()
        for cursor, _ in self.cursors:
            assert cursor.length == 0
            self.prompts.unfollow(cursor.prefix)
        assert not self.cache.cursors._watchers
        for allocator in self.allocators:
            assert allocator.num_free == allocator.num_pages - 1


TestLookbacks = LookbackMachine.TestCase
TestLookbacks.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)


def run_at_random(layout: int, page_size: int, policy: str, num_steps: int) -> None:
    """So many things, the same in each run; after each, everything is compared with the model."""
    rng = random.Random(f"{layout} {policy} {page_size}")
    machine = LookbackMachine()
    machine.begin(layout, page_size, policy)
    for _ in range(num_steps):
        machine.one_thing(rng)
        machine.agrees_with_the_model()
    machine.teardown()


LAYOUTS = range(len(LookbackMachine.layouts))


@pytest.mark.parametrize("layout", long_but(LAYOUTS, *LAYOUTS[::2]))
def test_two_hundred_things_the_same_in_each_run(layout: int) -> None:
    """What hypothesis draws differs from run to run: it finds rare slips now and then."""
    run_at_random(layout, 1 + layout % 3, "adaptive", 200)
