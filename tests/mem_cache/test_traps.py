"""Traps that other engines fell into, those that lie in the memory of a rank; each test names its.

    stray pages    a lease whose length is not whole pages frees and counts by whole pages (6)
    duplicates     found while publishing: freed from the protected length on, not from the length
                   that matched when the request began (7)
    rows           a request keeps its row, with all in it, between the chunks of its prefill (8)
    overshoot      KV past the finished length is freed, and never cached (9)
    twice          a page is counted under one holder and released by it once (5, 10, 11)
    refusal        what cannot be granted changes nothing (4)
    ranks          one rank short of memory takes nothing from another (14)
    leaked locks   are not hidden by adding "protected" in (15)
    the root       never enters the eviction set, and is never locked: not by a match that finds
                   nothing, nor by one that is cut to nothing or to an earlier boundary
    left out       a cache or policy that lacks a method is refused, and does not answer "nothing"
    crossed        boundaries of a prefill that is given up in the middle neither leak nor get lost

Traps of the scheduler: `tests/scheduler/test_traps.py`.
"""

import numpy as np
import pytest

from sgl_jax.core.step_plan import Int32Array
from sgl_jax.mem_cache.errors import LeaseError, LedgerError
from sgl_jax.mem_cache.lease import KVLease
from sgl_jax.mem_cache.ledger import audit, check_balance
from sgl_jax.mem_cache.rank_memory import RankMemory
from sgl_jax.mem_cache.release import publish_prefix, release_kv_cache
from sgl_jax.mem_cache.tree.full_component import FullComponent
from sgl_jax.mem_cache.tree.radix_cache import RadixCache
from sgl_jax.mem_cache.tree.radix_tree import RadixTree
from tests.mem_cache.test_release import array, make_memory, write_kv

PAGE = 4
TOKENS = np.arange(40, dtype=np.int32)


def tree_of(memory: RankMemory) -> RadixTree:
    assert isinstance(memory.cache, RadixCache)
    return memory.cache.tree


def full_of(memory: RankMemory) -> FullComponent:
    (full,) = tree_of(memory).components
    assert isinstance(full, FullComponent)
    return full


def cache_prefix(memory: RankMemory, tokens: Int32Array) -> None:
    """Let a request come and go that leaves `tokens` (whole pages) in the cache."""
    lease = memory.open_lease(tokens[:-1])
    write_kv(memory, lease, len(tokens))
    release_kv_cache(memory, lease, tokens, insert=True)


def assert_all_free(memory: RankMemory) -> None:
    audit(memory)
    memory.cache.reset()
    assert memory.view().free_pages == memory.view().total_pages - 1
    assert memory.view().free_rows == memory.view().total_rows


# -- pages ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("allocated", [9, 10, 11, 12])
@pytest.mark.parametrize("insert", [True, False])
def test_stray_tokens_hold_a_whole_page_which_is_freed_once(allocated: int, insert: bool) -> None:
    memory = make_memory(PAGE)
    lease = memory.open_lease(TOKENS[:20])
    write_kv(memory, lease, 9)
    assert memory.grow_rows(array(lease.row), array(allocated))
    assert memory.view().leased_pages == 3
    check_balance(memory)
    release_kv_cache(memory, lease, TOKENS[:9], insert=insert)
    assert memory.view().leased_pages == 0
    assert memory.view().cached_pages == (2 if insert else 0)
    assert_all_free(memory)


def test_duplicates_are_freed_from_the_protected_length_not_from_the_length_that_matched() -> None:
    """The second matched nothing, then published 2 pages, then finds 2 more of its own cached."""
    memory = make_memory(PAGE)
    second = memory.open_lease(TOKENS[:20])
    assert second.kv_committed_len == 0
    write_kv(memory, second, 8)
    publish_prefix(memory, second, TOKENS[:8])
    cache_prefix(memory, TOKENS[:16])
    write_kv(memory, second, 17)
    shared = second.pages(PAGE, 0, 8)[0].tolist()
    publish_prefix(memory, second, TOKENS[:17])
    audit(memory)
    assert second.cache_protected_len == 16
    assert second.pages(PAGE, 0, 8)[0].tolist() == shared
    assert memory.view().cached_pages == 4
    assert memory.view().leased_pages == 1
    release_kv_cache(memory, second, TOKENS[:17], insert=True)
    assert_all_free(memory)


def test_what_was_written_past_the_finished_length_is_freed_and_never_cached() -> None:
    """Drafts were accepted up to 16 tokens; a stop string ends the request after 9."""
    memory = make_memory(PAGE)
    lease = memory.open_lease(TOKENS[:5])
    write_kv(memory, lease, 5)
    assert memory.grow_rows(array(lease.row), array(20))
    memory.commit_rows(array(lease.row), array(6))
    memory.commit_rows(array(lease.row), array(16))
    release_kv_cache(memory, lease, TOKENS[:9], insert=True)
    assert memory.cache.peek(TOKENS) == 8
    assert memory.view().free_pages == memory.view().total_pages - 1 - 2
    assert_all_free(memory)


def test_a_page_is_counted_under_one_holder_as_it_moves() -> None:
    memory = make_memory(PAGE)
    lease = memory.open_lease(TOKENS[:20])
    write_kv(memory, lease, 12)
    counts = []
    for tokens in (TOKENS[:4], TOKENS[:8], TOKENS[:12]):
        publish_prefix(memory, lease, tokens)
        view = memory.view()
        counts.append((view.leased_pages, view.cached_pages, view.protected_pages))
        held = view.free_pages + view.leased_pages + view.cached_pages + view.reserved_pages
        assert held == view.total_pages
        audit(memory)
    assert counts == [(2, 1, 1), (1, 2, 2), (0, 3, 3)]


def test_releasing_twice_raises_and_frees_nothing_of_the_next_holder() -> None:
    memory = make_memory(PAGE)
    first = memory.open_lease(TOKENS[:20])
    write_kv(memory, first, 8)
    release_kv_cache(memory, first, TOKENS[:8], insert=False)
    second = memory.open_lease(TOKENS[20:])
    write_kv(memory, second, 8)
    assert second.row == first.row
    view = memory.view()
    with pytest.raises(LeaseError, match="after its release"):
        release_kv_cache(memory, first, TOKENS[:8], insert=False)
    assert memory.view() == view
    assert second.pages(PAGE)[0].tolist() == memory.rows.pages[second.row, 0, :2].tolist()
    audit(memory)


def test_a_copy_of_a_lease_cannot_release_it() -> None:
    memory = make_memory(PAGE)
    lease = memory.open_lease(TOKENS[:20])
    borrower = KVLease(memory.dp_rank, lease.row, memory.rows)
    view = memory.view()
    with pytest.raises(LeaseError, match="not listed as its own"):
        release_kv_cache(memory, borrower, TOKENS[:20], insert=False)
    assert memory.view() == view
    audit(memory)
    release_kv_cache(memory, lease, TOKENS[:20], insert=False)
    assert_all_free(memory)


# -- refusals -------------------------------------------------------------------------------------


def test_a_lease_that_cannot_be_opened_or_grown_changes_nothing() -> None:
    memory = make_memory(PAGE, num_pages=6, num_rows=3)
    cache_prefix(memory, TOKENS[:8])
    leases = [memory.open_lease(TOKENS[:12]), memory.open_lease(TOKENS[20:])]
    view, locks = memory.view(), memory.cache.num_locks
    with pytest.raises(LeaseError, match="all 2 rows are held"):
        memory.open_lease(TOKENS[:12])
    rows = array(*(lease.row for lease in leases))
    assert not memory.grow_rows(rows, array(12, 16))
    assert memory.view() == view
    assert memory.cache.num_locks == locks
    assert memory.cache.num_evicted == 0
    audit(memory)


def test_a_rank_short_of_pages_takes_nothing_from_another() -> None:
    short, roomy = make_memory(PAGE, num_pages=4), make_memory(PAGE, num_pages=4)
    for memory in (short, roomy):
        cache_prefix(memory, TOKENS[:8])
    before, kept = roomy.view(), roomy.cache.peek(TOKENS)
    lease = short.open_lease(TOKENS[20:])
    assert short.grow_rows(array(lease.row), array(12))
    assert not short.grow_rows(array(lease.row), array(16))
    assert short.cache.num_evicted == 2
    assert roomy.view() == before
    assert roomy.cache.peek(TOKENS) == kept


# -- chunks ---------------------------------------------------------------------------------------


def test_a_request_keeps_its_row_and_pages_between_chunks() -> None:
    memory = make_memory(PAGE)
    chunked = memory.open_lease(TOKENS[:30])
    row = chunked.row
    held: list[int] = []
    for end in (6, 13, 20):
        write_kv(memory, chunked, end)
        publish_prefix(memory, chunked, TOKENS[:30])
        other = memory.open_lease(TOKENS[31:])
        write_kv(memory, other, 5)
        assert other.row != row
        assert chunked.row == row
        assert chunked.pages(PAGE)[0].tolist()[: len(held)] == held
        assert not set(other.pages(PAGE)[0].tolist()) & set(chunked.pages(PAGE)[0].tolist())
        held = chunked.pages(PAGE)[0].tolist()
        release_kv_cache(memory, other, TOKENS[31:36], insert=False)
        audit(memory)


@pytest.mark.parametrize("insert", [True, False])
@pytest.mark.parametrize("ahead", [0, 7])
def test_boundaries_crossed_by_a_prefill_given_up_in_the_middle_stay_valid(
    insert: bool, ahead: int
) -> None:
    memory = make_memory(PAGE)
    lease = memory.open_lease(TOKENS[:30])
    for end in (6, 13):
        write_kv(memory, lease, end)
        publish_prefix(memory, lease, TOKENS[:30])
    assert memory.grow_rows(array(lease.row), array(13 + ahead))
    crossed = lease.pages(PAGE, 0, 12)[0].tolist()
    release_kv_cache(memory, lease, TOKENS[:30], insert=insert)
    assert memory.view().leased_pages == memory.view().protected_pages == 0
    again = memory.open_lease(TOKENS[:30])
    assert again.pages(PAGE)[0].tolist() == crossed
    release_kv_cache(memory, again, TOKENS[:30], insert=insert)
    assert_all_free(memory)


# -- locks and the root ---------------------------------------------------------------------------


def test_a_leaked_lock_is_found_while_others_are_held() -> None:
    """Both leases protect the same page: the count of protected pages alone tells nothing."""
    memory = make_memory(PAGE)
    cache_prefix(memory, TOKENS[:4])
    lease = memory.open_lease(TOKENS[:12])
    check_balance(memory)
    leaked = memory.cache.match_prefix(TOKENS[:12])
    assert memory.view().protected_pages == 1
    with pytest.raises(LedgerError, match="1 rows have locked 4 tokens, the tree gave 2 locks"):
        check_balance(memory)
    assert leaked.node is not None
    memory.cache.unlock(leaked.node)
    release_kv_cache(memory, lease, TOKENS[:12], insert=True)
    assert_all_free(memory)


def test_a_lock_moved_to_a_shorter_prefix_is_found() -> None:
    memory = make_memory(PAGE)
    cache_prefix(memory, TOKENS[:8])
    lease = memory.open_lease(TOKENS[:12])
    short = memory.cache.match_prefix(TOKENS[:5])
    assert lease.node is not None
    memory.cache.unlock(lease.node)
    assert short.length == 4
    with pytest.raises(LedgerError, match="locked 8 tokens, the tree gave 1 locks on 4 tokens"):
        check_balance(memory)


def test_two_short_locks_do_not_pass_for_a_long_one() -> None:
    memory = make_memory(PAGE)
    cache_prefix(memory, TOKENS[:8])
    lease = memory.open_lease(TOKENS[:12])
    for _ in range(2):
        memory.cache.match_prefix(TOKENS[:5])
    assert lease.node is not None
    memory.cache.unlock(lease.node)
    with pytest.raises(
        LedgerError, match="1 rows have locked 8 tokens, the tree gave 2 locks on 8"
    ):
        check_balance(memory)


def test_the_root_of_an_emptied_tree_is_no_victim() -> None:
    memory = make_memory(PAGE)
    for tokens in (TOKENS[:8], TOKENS[20:28]):
        cache_prefix(memory, tokens)
    assert memory.cache.evict(99) == 4
    full, root = full_of(memory), tree_of(memory).root
    assert not root.children
    assert len(full._policy) == 0
    assert memory.cache.tree.policy.next_victim(0) is None
    assert memory.cache.evict(1) == 0
    full.refresh(root)
    assert root not in full._policy
    cache_prefix(memory, TOKENS[:8])
    assert root not in full._policy
    assert_all_free(memory)


@pytest.mark.parametrize("wanted", [TOKENS[:0], TOKENS[:3], TOKENS[20:30], np.full(9, 3, np.int32)])
@pytest.mark.parametrize("is_empty", [True, False])
def test_a_match_that_finds_nothing_locks_nothing_not_even_the_root(
    wanted: Int32Array, is_empty: bool
) -> None:
    memory = make_memory(PAGE)
    if not is_empty:
        cache_prefix(memory, TOKENS[:8])
    before = memory.view()
    match = memory.cache.match_prefix(wanted)
    assert (match.length, match.node, match.pages.shape[1]) == (0, None, 0)
    assert memory.cache.num_locks == 0
    assert not any(tree_of(memory).root.locks)
    assert memory.view() == before
    lease = memory.open_lease(wanted)
    assert lease.node is None
    release_kv_cache(memory, lease, wanted, insert=True)
    assert_all_free(memory)
