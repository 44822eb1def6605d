"""A cursor on a tree that changes is where a fresh walk along its tokens would end."""

import random

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sgl_jax.core.engine_sizes import EngineSizes
from sgl_jax.mem_cache.eviction.eviction_policy import EVICTION_POLICIES
from sgl_jax.mem_cache.lease import KVLease
from sgl_jax.mem_cache.ledger import audit
from sgl_jax.mem_cache.rank_memory import RankMemory
from sgl_jax.mem_cache.release import publish_prefix, release_kv_cache
from sgl_jax.mem_cache.tree.cursor_index import CursorIndex
from sgl_jax.mem_cache.tree.prefix_cursor import LIVE, PrefixCursor, SharedPrefix
from sgl_jax.mem_cache.tree.prompt_tree import PromptTree
from sgl_jax.mem_cache.tree.radix_cache import RadixCache
from tests.mem_cache.tree_model import NAMESPACES, array_of, follow, token_lists


def make_memory(
    policy: str,
    *,
    page_size: int = 4,
    num_pages: int = 40,
    dp_rank: int = 0,
    waiting: PromptTree | None = None,
) -> RankMemory:
    sizes = EngineSizes(
        dp_size=2,
        page_size=page_size,
        pool_pages=(num_pages,),
        num_rows=6,
        max_context_len=64,
        max_step_tokens=64,
        max_prompt_logprob_tokens=64,
        vocab_size=100,
    )
    return RankMemory(dp_rank, sizes, eviction_policy=policy, waiting=waiting)


def index_of(memory: RankMemory) -> CursorIndex:
    """The cursors of the rank's tree."""
    assert isinstance(memory.cache, RadixCache)
    return memory.cache.tree.cursors


def line_of(memory: RankMemory, cursor: PrefixCursor) -> tuple[int, int]:
    """Length and place of a cursor, as the columns have them."""
    columns, number, rank = memory.waiting.columns, cursor.prefix.number, memory.dp_rank
    while columns.above[rank, number] != LIVE:
        number = int(columns.above[rank, number])
    length = int(columns.usable_pages[rank, number]) * memory.page_size
    assert memory.waiting.cached_pages(cursor.prefix)[rank] == length // memory.page_size
    return length, int(columns.place[rank, number])


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
    """Prefixes are published, kept and evicted on two ranks, in several namespaces, under the
    cursors of many prompts that wait for both."""

    @initialize(
        policy=st.sampled_from(EVICTION_POLICIES),
        page_size=st.sampled_from([1, 4]),
        num_pages=st.sampled_from([8, 12, 40]),
    )
    def start(self, policy: str, page_size: int, num_pages: int) -> None:
        waiting = PromptTree(page_size, 2)
        self.memories = [
            make_memory(
                policy, page_size=page_size, num_pages=num_pages, dp_rank=dp_rank, waiting=waiting
            )
            for dp_rank in range(2)
        ]
        self.memory = self.memories[0]  # of the rank that the next rules are about
        self.leases_of: list[list[tuple[KVLease, np.ndarray]]] = [[], []]
        self.prefixes: list[SharedPrefix] = []
        # By rank, lengths and places that the cursors had when they were last said to have moved,
        # or not.
        self.told: list[list[tuple[int, int]]] = [[], []]

    @property
    def leases(self) -> list[tuple[KVLease, np.ndarray]]:
        return self.leases_of[self.memory.dp_rank]

    @rule()
    def turn_to_the_other_rank(self) -> None:
        self.memory = self.memories[1 - self.memory.dp_rank]

    def draw_tokens(self, data: st.DataObject) -> np.ndarray:
        return array_of(data.draw(token_lists(self.memory.page_size, ragged=True)))

    @rule(data=st.data(), namespace=st.sampled_from(["", *NAMESPACES]))
    def publish(self, data: st.DataObject, namespace: str) -> None:
        self.write(self.draw_tokens(data), namespace)

    def write(self, tokens: np.ndarray, namespace: str) -> None:
        if not self.memory.row_pool.num_free:
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
            self.memory = rng.choice(self.memories)
            dice = rng.randrange(8)
            if dice < 3:
                self.write(tokens, namespace)
            elif dice < 5 and self.leases:
                self.release(rng.randrange(5))
            elif dice == 5:
                self.evict(rng.randint(1, 3))
            else:
                self.add(follow(self.memory, tokens, namespace))
            self.cursors_are_where_walks_end()

    @rule(data=st.data(), namespace=st.sampled_from(["", *NAMESPACES]))
    def follow(self, data: st.DataObject, namespace: str) -> None:
        tokens = self.draw_tokens(data)
        self.add(follow(self.memory, tokens, namespace))

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), which=st.integers(0, 4))
    def follow_what_continues_a_lease(self, data: st.DataObject, which: int) -> None:
        """Of which it is known how much of it the tree has at least."""
        lease, tokens = self.leases[which % len(self.leases)]
        known = tokens[: lease.cache_protected_len]
        tokens = np.concatenate([known, self.draw_tokens(data)])
        self.add(follow(self.memory, tokens, lease.namespace, lease.node))

    def add(self, cursor: PrefixCursor) -> None:
        self.prefixes.append(cursor.prefix)
        for memory, told in zip(self.memories, self.told, strict=True):
            told.append(line_of(memory, PrefixCursor(cursor.prefix, memory.dp_rank)))

    @precondition(lambda self: self.prefixes)
    @rule(which=st.integers(0, 20))
    def unfollow(self, which: int) -> None:
        which %= len(self.prefixes)
        self.memory.waiting.unfollow(self.prefixes.pop(which))
        for told in self.told:
            del told[which]

    @rule()
    def ask_whether_any_has_moved(self) -> None:
        for dp_rank, memory in enumerate(self.memories):
            cursors = [PrefixCursor(prefix, dp_rank) for prefix in self.prefixes]
            lines = [line_of(memory, cursor) for cursor in cursors]
            assert memory.cache.cursors.take_has_moved() or lines == self.told[dp_rank]
            self.told[dp_rank] = lines

    @invariant()
    def cursors_are_where_walks_end(self) -> None:
        if not hasattr(self, "memory"):
            return
        for memory in self.memories:
            for prefix in self.prefixes:
                cursor = PrefixCursor(prefix, memory.dp_rank)
                found = memory.cache.peek(prefix.tokens, prefix.namespace)
                assert cursor.length == found, cursor
                length, place = line_of(memory, cursor)
                assert length == found
                assert memory.cache.cursors.nodes[place] is cursor.node
            index_of(memory).audit()

    def teardown(self) -> None:
        """Without cursors and leases, nothing is left of either."""
        if not hasattr(self, "memory"):
            return
        self.ask_whether_any_has_moved()
        for prefix in self.prefixes:
            self.memory.waiting.unfollow(prefix)
        for memory, leases in zip(self.memories, self.leases_of, strict=True):
            root = index_of(memory)._root
            assert [node for node in memory.cache.cursors.nodes if node] == [root]
            for lease, tokens in leases:
                release_kv_cache(memory, lease, tokens, insert=True)
            audit(memory)
            memory.cache.cursors.take_has_moved()
            memory.cache.reset()
            assert not memory.cache.cursors.take_has_moved()


TestCursors = CursorMachine.TestCase
TestCursors.settings = settings(max_examples=40, stateful_step_count=15, deadline=None)


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_a_cursor_moves_as_pages_are_published_and_evicted(policy: str) -> None:
    memory = make_memory(policy)
    tokens = np.arange(18, dtype=np.int32)
    cursor = follow(memory, tokens)
    assert cursor.length == 0
    lease = write(memory, tokens[:11])
    assert lease is not None
    assert cursor.length == 8
    assert memory.cache.cursors.take_has_moved()
    release_kv_cache(memory, lease, tokens[:11], insert=True)
    assert not memory.cache.cursors.take_has_moved()
    memory.cache.evict(1)
    assert cursor.length == 4
    memory.cache.evict(1)
    assert cursor.length == 0
    assert memory.cache.cursors.take_has_moved()
    memory.waiting.unfollow(cursor.prefix)


PAGES = [np.full(4, token, np.int32) for token in range(10)]


def path(*pages: int) -> np.ndarray:
    """Tokens of these of `PAGES`."""
    return np.concatenate([PAGES[page] for page in pages])


def test_a_cursor_within_an_edge_goes_on_when_that_is_split_where_it_ends() -> None:
    memory = make_memory("lru")
    assert write(memory, path(1, 2, 3, 4)) is not None
    cursor = follow(memory, path(1, 9, 9))
    assert write(memory, path(1, 2, 5)) is not None  # splits the edge behind the cursor
    assert cursor.length == 4
    assert write(memory, path(1, 9)) is not None
    assert cursor.length == 8


def test_a_cursor_at_the_end_of_an_edge_goes_on_after_that_was_merged() -> None:
    memory = make_memory("lru")
    upper, lower = write(memory, path(1)), write(memory, path(1, 2, 3))
    assert upper is not None
    assert lower is not None
    cursor = follow(memory, path(1, 9, 9))
    release_kv_cache(memory, upper, path(1), insert=True)
    assert len(memory.cache.nodes()) == 1
    assert write(memory, path(1, 9)) is not None
    assert cursor.length == 8


def test_a_cursor_that_is_gone_is_not_moved() -> None:
    memory = make_memory("lru")
    tokens = np.arange(12, dtype=np.int32)
    memory.waiting.unfollow(follow(memory, tokens).prefix)
    assert write(memory, tokens) is not None
    assert not memory.cache.cursors.take_has_moved()


def test_a_cursor_of_one_namespace_stays_where_it_is_when_another_publishes() -> None:
    memory = make_memory("lru")
    tokens = np.arange(12, dtype=np.int32)
    cursor = follow(memory, tokens, "red")
    assert write(memory, tokens, "blue") is not None
    assert not memory.cache.cursors.take_has_moved()
    assert cursor.length == 0
    assert write(memory, tokens, "red") is not None
    assert cursor.length == 12


def test_the_next_key_of_prompts_that_begin_alike_is_of_their_namespace() -> None:
    memory = make_memory("lru")
    first, _ = (follow(memory, path(1, last), "red") for last in (2, 3))
    assert first.next_key == memory.cache.next_key(None, path(1), "red")


def test_prompts_that_are_alike_but_for_a_part_of_a_page_share_a_cursor() -> None:
    memory = make_memory("lru")
    prompts = memory.waiting
    first = prompts.follow(path(1, 2), "")
    assert prompts.follow(np.append(path(1, 2), PAGES[3][:2]), "") is first
    assert prompts.follow(path(1, 2), "red") is not first
    prompts.unfollow(first)
    index_of(memory).audit()
    assert prompts.follow(path(1, 2), "") is first


def count_moves(monkeypatch: pytest.MonkeyPatch) -> list[SharedPrefix]:
    """The prefixes with a cursor that is filed on a node, or taken from all, from now on."""
    moves: list[SharedPrefix] = []
    file, leave = CursorIndex._file, CursorIndex.leave
    monkeypatch.setattr(
        CursorIndex,
        "_file",
        lambda i, prefix, *to: moves.append(prefix) or file(i, prefix, *to),  # type: ignore[func-returns-value]
    )
    monkeypatch.setattr(
        CursorIndex,
        "leave",
        lambda i, cursor: moves.append(cursor.prefix) or leave(i, cursor),  # type: ignore[func-returns-value]
    )
    return moves


def test_a_change_is_no_work_for_cursors_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = make_memory("lru")
    cursor = follow(memory, np.arange(12, dtype=np.int32))
    for first in range(20, 60):
        follow(memory, np.full(12, first, np.int32))
    moves = count_moves(monkeypatch)
    assert write(memory, np.arange(12, dtype=np.int32)) is not None
    assert moves == [cursor.prefix]


def num_moves_of_a_shared_prefix(
    monkeypatch: pytest.MonkeyPatch, num_waiting: int, branches: int
) -> list[int]:
    """Moves as a prefix is published, gets a branch, and is evicted page by page, where so many
    wait with it, the same number on each of the branches that follow it."""
    memory = make_memory("lru", num_pages=100)
    for number in range(num_waiting):
        tail = np.full(4, 100 + number, np.int32)
        follow(memory, np.concatenate([path(1, 2, 3, number % branches), tail]))
    moves, counts = count_moves(monkeypatch), []
    for pages in (1, 2, 3), (1, 2, 3, 0):
        lease = write(memory, path(*pages))
        assert lease is not None
        release_kv_cache(memory, lease, path(*pages), insert=True)
        counts.append(len(moves))
    while memory.cache.evict(1):
        counts.append(len(moves))
    index_of(memory).audit()
    monkeypatch.undo()
    return counts


def test_a_change_costs_by_shared_prefixes_and_not_by_prompts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few = num_moves_of_a_shared_prefix(monkeypatch, 6, branches=2)
    assert num_moves_of_a_shared_prefix(monkeypatch, 1000, branches=2) == few
    assert few[-1] < 10
