"""Leases that idle sessions keep, among all that may happen to others: what is counted as it
changes is what a count from scratch finds, and a turn reads the longer of lease and tree."""

import random

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from sgl_jax.mem_cache.errors import LeaseError
from sgl_jax.mem_cache.lease import KVLease
from sgl_jax.mem_cache.ledger import audit
from sgl_jax.mem_cache.rank_memory import RankMemory
from sgl_jax.mem_cache.release import (
    adopt_prefix,
    release_idle_lease,
    release_kv_cache,
    resume_lease,
    roll_back_lease,
)
from tests.mem_cache.test_release import (
    CUTS,
    MAX_LEN,
    Holder,
    LeaseMachine,
    array,
    as_tuple,
    make_memory,
    write_kv,
)
from tests.mem_cache.test_session_leases import PAGE_SIZES, check, known, take_turn
from tests.mem_cache.test_session_leases import make_memory as make_session_memory
from tests.mem_cache.tree_model import NAMESPACES, follow, in_namespace


def num_in_use(memory: RankMemory, tokens: np.ndarray, namespace: str = "") -> int:
    """Pages of what the tree has of `tokens` that running requests have locked."""
    cursor = follow(memory, tokens, namespace)
    num_pages = memory.num_pages_in_use(cursor)
    memory.waiting.unfollow(cursor.prefix)
    return num_pages


class SessionLeaseMachine(LeaseMachine):
    """The leases of running requests are in `holders`, those of idle sessions in `idle`."""

    def __init__(self) -> None:
        super().__init__()
        self.idle: dict[str, Holder] = {}  # used longest ago first
        self.num_sessions = 0

    @precondition(lambda self: self.holders)
    @rule(which=st.integers(0, 4), num_known=st.sampled_from(CUTS))
    def rest(self, which: int, num_known: int) -> None:
        """The turn of a session ends, and the session is idle."""
        holder = self.holders.pop(which % len(self.holders))
        sessions, lease = self.memory.sessions, holder.lease
        if lease.session_id is None:
            self.num_sessions += 1
            sessions.bind(f"s{self.num_sessions}", lease)
        session_id = lease.session_id
        num_known = max(num_known, lease.cache_protected_len)
        self.expect_published(holder, num_known)
        num_kept = min(num_known, lease.kv_committed_len)
        release_kv_cache(self.memory, lease, holder.known(num_known), insert=True)
        assert lease.released == (num_kept == 0)
        if num_kept:
            assert sessions.idle_lease(session_id) is lease
            assert lease.kv_committed_len == lease.kv_allocated_len == num_kept
            self.idle[session_id] = holder

    @precondition(lambda self: self.idle)
    @rule(
        which=st.integers(0, 4),
        cut=st.sampled_from(CUTS),
        stem=st.integers(0, 1),
        tail=st.integers(0, 1),
    )
    def resume(self, which: int, cut: int, stem: int, tail: int) -> None:
        """The next turn has at least the tokens that its session's lease protects."""
        session_id = list(self.idle)[which % len(self.idle)]
        lease, memory = self.idle[session_id].lease, self.memory
        if lease.cache_protected_len == MAX_LEN:
            return  # the last token must be computed
        holder = self.idle.pop(session_id)
        num_kept = max(min(cut, lease.kv_committed_len), lease.cache_protected_len)
        num_kept = min(num_kept, MAX_LEN - 1)
        given = np.full(MAX_LEN, stem, np.int32)
        given[cut:] = 10 + tail
        given[:num_kept] = holder.known(num_kept)
        tokens, matchable = array(*in_namespace(as_tuple(given), lease.namespace)), given[:-1]
        in_lease = min(lease.kv_committed_len, num_kept)
        in_tree = self.model.longest_match(as_tuple(tokens[:-1]))
        is_longer = len(in_tree) > in_lease
        read = self.model.pages_of(in_tree)[: None if is_longer else in_lease // self.page_size]
        shared = self.running_pages().intersection(self.model.pages_of(in_tree))
        assert num_in_use(memory, matchable, lease.namespace) == len(shared)
        resume_lease(memory, session_id, num_kept)
        own = lease.pages(self.page_size)[0].tolist()
        assert adopt_prefix(memory, lease, matchable) == is_longer
        assert not adopt_prefix(memory, lease, matchable)
        if is_longer:
            self.model.touch(in_tree)
            assert lease.cache_protected_len == lease.kv_allocated_len == len(in_tree)
        assert lease.kv_committed_len == max(in_lease, len(in_tree))
        assert lease.pages(self.page_size)[0].tolist() == (read if is_longer else own)
        self.holders.append(Holder(tokens, lease))

    @rule(which=st.integers(0, 4), num_known=st.sampled_from(CUTS), insert=st.booleans())
    def release(self, which: int, num_known: int, insert: bool) -> None:
        if self.holders:
            self.memory.sessions.unbind(self.holders[which % len(self.holders)].lease)
            super().release(which, num_known, insert)

    @rule()
    def evict_session(self) -> None:
        oldest = self.memory.sessions.oldest_idle()
        assert oldest == next(iter(self.idle), None)
        if oldest is not None:
            lease = self.idle.pop(oldest).lease
            assert release_idle_lease(self.memory, oldest)
            assert lease.released

    @precondition(lambda self: self.idle)
    @rule(which=st.integers(0, 4), num_tokens=st.sampled_from([0, *CUTS]))
    def roll_back(self, which: int, num_tokens: int) -> None:
        session_id = list(self.idle)[which % len(self.idle)]
        roll_back_lease(self.memory, session_id, num_tokens)
        if self.idle[session_id].lease.released:
            del self.idle[session_id]

    @rule(seed=st.integers(0, 2**32))
    def many_turns(self, seed: int) -> None:
        """Twenty things at random, of which many are turns that others have computed before."""
        rng = random.Random(seed)
        for _ in range(20):
            which, cut, dice = rng.randrange(5), rng.choice(CUTS), rng.randrange(12)
            if dice < 3:
                namespace = rng.choice(["", *NAMESPACES])
                self.open_lease(rng.randrange(2), cut, rng.randrange(2), namespace)
            elif self.holders and dice < 7:
                self.prefill(which, rng.choice([cut, MAX_LEN]))
                self.publish(which, MAX_LEN)
            elif self.holders and dice < 9:
                self.rest(which, cut)
            elif self.idle and dice < 11:
                self.resume(which, cut, rng.randrange(2), rng.randrange(2))
            else:
                self.release(which, cut, insert=True)
            self.ledger_balances()
            self.counts_are_those_of_a_walk()

    def running_pages(self) -> set[int]:
        """The pages that running requests read or write."""
        return {
            page for each in self.holders for page in each.lease.pages(self.page_size)[0].tolist()
        }

    def know_locks(self) -> None:
        super().know_locks()
        self.model.locked += [
            as_tuple(holder.tokens[: holder.lease.cache_protected_len])
            for holder in self.idle.values()
        ]

    @invariant()
    def counts_are_those_of_a_walk(self) -> None:
        if not hasattr(self, "memory"):
            return
        memory, page_size = self.memory, self.page_size
        idle = [holder.lease for holder in self.idle.values()]
        assert [lease for _, lease in memory.sessions.idle()] == idle
        kept = {page for lease in idle for page in lease.pages(page_size)[0].tolist()}
        assert memory.num_session_pages == len(kept)
        own = [len(lease.pages(page_size, lease.cache_protected_len)[0]) for lease in idle]
        assert memory.view().session_held_pages == sum(own)
        num_usable = memory.allocator.num_pages - memory.allocator.num_reserved
        assert memory.num_reclaimable_pages == num_usable - len(self.running_pages())
        for holder in self.idle.values():
            self.check_content(holder)

    def teardown(self) -> None:
        for session_id in self.idle:
            assert release_idle_lease(self.memory, session_id)
        for holder in getattr(self, "holders", ()):
            self.memory.sessions.unbind(holder.lease)
        super().teardown()


TestSessionLeases = SessionLeaseMachine.TestCase
TestSessionLeases.settings = settings(max_examples=60, stateful_step_count=15, deadline=None)


# -- a lease whose tokens the tree has, too ---------------------------------------------------


def resume_beside(
    page_size: int, num_in_lease: int, num_in_tree: int
) -> tuple[RankMemory, KVLease, list[int]]:
    """A turn that resumes `num_in_lease` tokens, of which no more than a page are the tree's, and
    the pages that it has then. A plain request has left `num_in_tree` to the tree since."""
    memory = make_session_memory(page_size)
    take_turn(memory, num_in_lease, num_in_lease, num_in_lease)
    plain = memory.open_lease(known(0))
    write_kv(memory, plain, num_in_tree)
    release_kv_cache(memory, plain, known(num_in_tree), insert=True)
    lease = resume_lease(memory, "s", num_in_lease)
    return memory, lease, lease.pages(page_size)[0].tolist()


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("num_more", [1, 2, 5])
def test_a_longer_prefix_of_the_tree_replaces_the_pages_of_a_row(
    page_size: int, num_more: int
) -> None:
    in_lease = 2 * page_size + page_size // 2
    in_tree = (2 + num_more) * page_size
    memory, lease, pages = resume_beside(page_size, in_lease, in_tree)
    free = memory.view().free_pages
    num_own = len(pages) - lease.cache_protected_len // page_size
    assert adopt_prefix(memory, lease, known(in_tree + page_size // 2))
    assert lease.cache_protected_len == lease.kv_committed_len == lease.kv_allocated_len == in_tree
    assert memory.view().free_pages == free + num_own
    assert lease.pages(page_size)[0].tolist()[:2] == pages[:2]
    assert memory.view().protected_pages == in_tree // page_size
    audit(memory, num_running=1)
    assert memory.grow_rows(array(lease.row), array(in_tree + 2 * page_size))
    release_kv_cache(memory, lease, known(in_tree), insert=True)
    check(memory)


@pytest.mark.parametrize("page_size", [4, 16, 256])
@pytest.mark.parametrize("num_past_the_border", [0, 1])
def test_a_row_that_has_as_much_as_the_tree_keeps_its_pages(
    page_size: int, num_past_the_border: int
) -> None:
    """The tree has whole pages; a row may have a part of one beyond them."""
    in_lease = 3 * page_size + num_past_the_border
    memory, lease, pages = resume_beside(page_size, in_lease, 3 * page_size)
    assert not adopt_prefix(memory, lease, known(4 * page_size))
    assert lease.pages(page_size)[0].tolist() == pages
    assert lease.kv_committed_len == in_lease
    audit(memory, num_running=1)


@pytest.mark.parametrize("page_size", [4, 16, 256])
def test_a_row_keeps_pages_that_it_has_not_published_where_the_tree_has_fewer(
    page_size: int,
) -> None:
    memory = make_session_memory(page_size)
    first, second = memory.open_lease(known(0)), memory.open_lease(known(0))
    write_kv(memory, first, 2 * page_size)
    write_kv(memory, second, 2 * page_size + 1)
    release_kv_cache(memory, first, known(2 * page_size), insert=True)
    pages = second.pages(page_size)[0].tolist()
    assert not adopt_prefix(memory, second, known(4 * page_size))
    assert (second.cache_protected_len, second.kv_committed_len) == (0, 2 * page_size + 1)
    assert second.pages(page_size)[0].tolist() == pages
    audit(memory, num_running=1)


@pytest.mark.parametrize("page_size", [4, 16, 256])
def test_a_row_without_a_lock_adopts_a_prefix_from_its_beginning(page_size: int) -> None:
    """It had less than a page, so that nothing of it was the tree's."""
    memory, lease, _ = resume_beside(page_size, page_size // 2, 3 * page_size)
    assert lease.node is None
    assert adopt_prefix(memory, lease, known(3 * page_size))
    assert lease.node is not None
    assert lease.kv_committed_len == 3 * page_size
    audit(memory, num_running=1)


def test_without_a_tree_there_is_nothing_to_adopt() -> None:
    memory = make_session_memory(4, radix=False)
    take_turn(memory, 10, 10, 10)
    lease = resume_lease(memory, "s", 10)
    assert not adopt_prefix(memory, lease, known(20))
    audit(memory, num_running=1)


def test_a_released_lease_adopts_nothing() -> None:
    memory = make_memory(4)
    lease = memory.open_lease(known(3))
    release_kv_cache(memory, lease, known(0), insert=False)
    with pytest.raises(LeaseError, match="after its release"):
        adopt_prefix(memory, lease, known(3))


def test_what_running_requests_read_is_not_reclaimable_and_what_only_sessions_read_is() -> None:
    """Session "s" has 3 pages on the tree and one of its own; a request reads the first two."""
    memory = make_session_memory(4)
    take_turn(memory, 14, 16, 14)
    assert (memory.num_available_pages, memory.num_reclaimable_pages) == (36, 40)
    plain = memory.open_lease(known(11))
    assert (memory.num_available_pages, memory.num_reclaimable_pages) == (36, 38)
    assert num_in_use(memory, known(14)) == num_in_use(memory, known(20)) == 2
    assert memory.num_session_pages == 4
    release_kv_cache(memory, plain, known(0), insert=False)
    assert memory.num_reclaimable_pages == 40
    assert num_in_use(memory, known(14)) == 0
    check(memory)
