"""A cursor on a tree that changes is where a fresh walk along its tokens would end."""

import random

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sgl_jax.core.engine_sizes import EngineSizes
from sgl_jax.mem_cache.eviction_policy import EVICTION_POLICIES
from sgl_jax.mem_cache.lease import KVLease
from sgl_jax.mem_cache.ledger import audit
from sgl_jax.mem_cache.prefix_cursor import CursorIndex, PrefixCursor
from sgl_jax.mem_cache.radix_cache import RadixCache
from sgl_jax.mem_cache.rank_memory import RankMemory
from sgl_jax.mem_cache.release import publish_prefix, release_kv_cache
from tests.mem_cache.tree_model import NAMESPACES, array_of, token_lists


def make_memory(policy: str, *, page_size: int = 4, num_pages: int = 40) -> RankMemory:
    sizes = EngineSizes(
        dp_size=1,
        page_size=page_size,
        pool_pages=(num_pages,),
        num_rows=6,
        max_context_len=64,
        max_step_tokens=64,
        max_prompt_logprob_tokens=64,
        vocab_size=100,
    )
    return RankMemory(0, sizes, eviction_policy=policy)


def index_of(memory: RankMemory) -> CursorIndex:
    """The cursors of the rank's tree."""
    assert isinstance(memory.cache, RadixCache)
    return memory.cache.tree.cursors


def write(memory: RankMemory, tokens: np.ndarray, namespace: str = "") -> KVLease | None:
    """Publish the whole pages of `tokens`; the lease that keeps them, None if there is no room."""
    lease = memory.open_lease(tokens, namespace)
    row, end = np.array([lease.row]), np.array([len(tokens)])
    if not memory.grow_rows(row, end):
        release_kv_cache(memory, lease, tokens, insert=False)
        return None
    memory.commit_rows(row, end)
    publish_prefix(memory, lease, tokens)
    return lease


class CursorMachine(RuleBasedStateMachine):
    """Prefixes are published, kept and evicted, in several namespaces, under many cursors."""

    @initialize(
        policy=st.sampled_from(EVICTION_POLICIES),
        page_size=st.sampled_from([1, 4]),
        num_pages=st.sampled_from([8, 12, 40]),
    )
    def start(self, policy: str, page_size: int, num_pages: int) -> None:
        self.memory = make_memory(policy, page_size=page_size, num_pages=num_pages)
        self.leases: list[tuple[KVLease, np.ndarray]] = []
        self.cursors: list[PrefixCursor] = []
        # Lengths and places that the cursors had when they were last asked.
        self.told: list[tuple[int, int]] = []

    def draw_tokens(self, data: st.DataObject) -> np.ndarray:
        return array_of(data.draw(token_lists(self.memory.page_size, ragged=True)))

    @rule(data=st.data(), namespace=st.sampled_from(["", *NAMESPACES]))
    def publish(self, data: st.DataObject, namespace: str) -> None:
        self.write(self.draw_tokens(data), namespace)

    def write(self, tokens: np.ndarray, namespace: str) -> None:
        if not self.memory.rows.num_free:
            self.release(0)
        lease = write(self.memory, tokens, namespace)
        if lease is not None:
            self.leases.append((lease, tokens))

    @precondition(lambda self: self.leases)
    @rule(which=st.integers(0, 4))
    def release(self, which: int) -> None:
        lease, tokens = self.leases.pop(which % len(self.leases))
        release_kv_cache(self.memory, lease, tokens, insert=True)

    @rule(num_pages=st.integers(1, 6))
    def evict(self, num_pages: int) -> None:
        self.memory.cache.evict(num_pages)

    @precondition(lambda self: not self.leases)
    @rule()
    def reset(self) -> None:
        self.memory.cache.reset()

    @rule(seed=st.integers(0, 2**32))
    def many_things(self, seed: int) -> None:
        """Twenty at random: rules alone seldom split or merge an edge that a cursor ends in."""
        rng = random.Random(seed)
        for _ in range(20):
            pages = [[1] * self.memory.page_size, [3] * self.memory.page_size]
            chosen = [token for _ in range(rng.randint(1, 6)) for token in rng.choice(pages)]
            tokens, namespace = np.array(chosen, np.int32), rng.choice(["", *NAMESPACES])
            dice = rng.randrange(8)
            if dice < 3:
                self.write(tokens, namespace)
            elif dice < 5 and self.leases:
                self.release(rng.randrange(5))
            elif dice == 5:
                self.evict(rng.randint(1, 3))
            else:
                self.add(self.memory.cache.cursors.follow(tokens, namespace, tag=0))
            self.cursors_are_where_walks_end()

    @rule(data=st.data(), namespace=st.sampled_from(["", *NAMESPACES]))
    def follow(self, data: st.DataObject, namespace: str) -> None:
        tokens = self.draw_tokens(data)
        self.add(self.memory.cache.cursors.follow(tokens, namespace, tag=0))

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), which=st.integers(0, 4))
    def follow_what_continues_a_lease(self, data: st.DataObject, which: int) -> None:
        """Of which it is known how much of it the tree has at least."""
        lease, tokens = self.leases[which % len(self.leases)]
        known = tokens[: lease.cache_protected_len]
        tokens = np.concatenate([known, self.draw_tokens(data)])
        self.add(self.memory.cache.cursors.follow(tokens, lease.namespace, 0, lease.node))

    def add(self, cursor: PrefixCursor) -> None:
        self.cursors.append(cursor)
        self.told.append((cursor.length, cursor.place))

    @precondition(lambda self: self.cursors)
    @rule(which=st.integers(0, 20))
    def unfollow(self, which: int) -> None:
        which %= len(self.cursors)
        self.memory.cache.cursors.unfollow(self.cursors.pop(which))
        del self.told[which]

    @rule()
    def ask_which_have_moved(self) -> None:
        moved = [id(cursor) for cursor in self.memory.cache.cursors.take_moved()]
        assert len(set(moved)) == len(moved)
        assert set(moved) <= {id(cursor) for cursor in self.cursors}
        changed = {
            id(cursor)
            for cursor, told in zip(self.cursors, self.told, strict=True)
            if (cursor.length, cursor.place) != told
        }
        assert changed <= set(moved)
        self.told = [(cursor.length, cursor.place) for cursor in self.cursors]

    @invariant()
    def cursors_are_where_walks_end(self) -> None:
        if not hasattr(self, "memory"):
            return
        for cursor in self.cursors:
            found = self.memory.cache.peek(cursor.tokens, cursor.namespace)
            assert cursor.length == found, cursor
            assert self.memory.cache.cursors.nodes[cursor.place] is cursor.node
        index_of(self.memory).audit()

    def teardown(self) -> None:
        """Without cursors and leases, nothing is left of either."""
        if not hasattr(self, "memory"):
            return
        self.ask_which_have_moved()
        for cursor in self.cursors:
            self.memory.cache.cursors.unfollow(cursor)
        assert not any(self.memory.cache.cursors.nodes)
        for lease, tokens in self.leases:
            release_kv_cache(self.memory, lease, tokens, insert=True)
        audit(self.memory)
        self.memory.cache.reset()
        assert self.memory.cache.cursors.take_moved() == []


TestCursors = CursorMachine.TestCase
TestCursors.settings = settings(max_examples=40, stateful_step_count=15, deadline=None)


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_a_cursor_moves_as_pages_are_published_and_evicted(policy: str) -> None:
    memory = make_memory(policy)
    tokens = np.arange(18, dtype=np.int32)
    cursor = memory.cache.cursors.follow(tokens, "", tag=7)
    assert (cursor.length, cursor.tag) == (0, 7)
    lease = write(memory, tokens[:11])
    assert lease is not None
    assert cursor.length == 8
    assert memory.cache.cursors.take_moved() == [cursor]
    release_kv_cache(memory, lease, tokens[:11], insert=True)
    assert memory.cache.cursors.take_moved() == []
    memory.cache.evict(1)
    assert cursor.length == 4
    memory.cache.evict(1)
    assert cursor.length == 0
    assert memory.cache.cursors.take_moved() == [cursor]
    memory.cache.cursors.unfollow(cursor)


PAGES = [np.full(4, token, np.int32) for token in range(10)]


def path(*pages: int) -> np.ndarray:
    """Tokens of these of `PAGES`."""
    return np.concatenate([PAGES[page] for page in pages])


def test_a_cursor_within_an_edge_goes_on_when_that_is_split_where_it_ends() -> None:
    memory = make_memory("lru")
    assert write(memory, path(1, 2, 3, 4)) is not None
    cursor = memory.cache.cursors.follow(path(1, 9, 9), "", tag=0)
    assert write(memory, path(1, 2, 5)) is not None  # splits the edge behind the cursor
    assert cursor.length == 4
    assert write(memory, path(1, 9)) is not None
    assert cursor.length == 8


def test_a_cursor_at_the_end_of_an_edge_goes_on_after_that_was_merged() -> None:
    memory = make_memory("lru")
    upper, lower = write(memory, path(1)), write(memory, path(1, 2, 3))
    assert upper is not None
    assert lower is not None
    cursor = memory.cache.cursors.follow(path(1, 9, 9), "", tag=0)
    release_kv_cache(memory, upper, path(1), insert=True)
    assert len(memory.cache.nodes()) == 1
    assert write(memory, path(1, 9)) is not None
    assert cursor.length == 8


def test_a_cursor_that_moves_before_its_end_is_not_reported() -> None:
    memory = make_memory("lru")
    tokens = np.arange(12, dtype=np.int32)
    cursor = memory.cache.cursors.follow(tokens, "", tag=0)
    assert write(memory, tokens) is not None
    memory.cache.cursors.unfollow(cursor)
    assert memory.cache.cursors.take_moved() == []


def test_a_cursor_of_one_namespace_stays_where_it_is_when_another_publishes() -> None:
    memory = make_memory("lru")
    tokens = np.arange(12, dtype=np.int32)
    cursor = memory.cache.cursors.follow(tokens, "red", tag=0)
    assert write(memory, tokens, "blue") is not None
    assert memory.cache.cursors.take_moved() == []
    assert cursor.length == 0
    assert write(memory, tokens, "red") is not None
    assert cursor.length == 12


def test_a_change_is_no_work_for_cursors_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = make_memory("lru")
    memory.cache.cursors.follow(np.arange(12, dtype=np.int32), "", tag=0)
    for first in range(20, 60):
        memory.cache.cursors.follow(np.full(12, first, np.int32), "", tag=first)
    filed: list[int] = []
    file = CursorIndex._file
    monkeypatch.setattr(
        CursorIndex,
        "_file",
        lambda index, cursor, node: filed.append(cursor.tag) or file(index, cursor, node),
    )
    assert write(memory, np.arange(12, dtype=np.int32)) is not None
    assert set(filed) == {0}
