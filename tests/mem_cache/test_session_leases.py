"""Whose lease is whose: check-out and check-in, and what a lease holds between turns."""

import numpy as np
import pytest

from sgl_jax.core.engine_sizes import EngineSizes
from sgl_jax.mem_cache.errors import LeaseError, LedgerError
from sgl_jax.mem_cache.lease import KVLease
from sgl_jax.mem_cache.ledger import audit, check_balance
from sgl_jax.mem_cache.pages.req_to_token_pool import RowTables
from sgl_jax.mem_cache.rank_memory import RankMemory
from sgl_jax.mem_cache.release import (
    release_idle_lease,
    release_kv_cache,
    resume_lease,
    roll_back_lease,
)
from sgl_jax.mem_cache.session_leases import SessionLeases

PAGE_SIZES = [1, 4, 16, 256]


def array(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


# -- leases alone -----------------------------------------------------------------------------


def make_leases(num_leases: int) -> tuple[SessionLeases, list[KVLease]]:
    rows = RowTables.empty(num_leases + 1, 1, 4)
    leases = [KVLease(0, row, rows) for row in range(1, num_leases + 1)]
    for lease in leases:
        lease.set_lengths(protected=0, committed=5, allocated=8)
    return SessionLeases(), leases


def test_a_lease_goes_from_the_turn_to_the_session_and_back() -> None:
    sessions, (lease,) = make_leases(1)
    assert not sessions.lease_of("s")
    sessions.bind("s", lease)
    assert sessions.lease_of("s")
    assert (sessions.num_idle, sessions.idle_lease("s"), sessions.oldest_idle()) == (0, None, None)
    assert list(sessions.checked_out()) == [("s", lease)]
    assert lease.session_id == "s"
    sessions.check_in(lease, 3)
    assert lease.session_id is None
    assert sessions.lease_of("s")
    assert sessions.idle_lease("s") is lease
    assert (sessions.num_idle, list(sessions.checked_out())) == (1, [])
    assert sessions.check_out("s") is lease
    assert (sessions.num_idle, list(sessions.checked_out())) == (0, [("s", lease)])
    sessions.unbind(lease)
    sessions.unbind(lease)
    assert not sessions.lease_of("s")
    with pytest.raises(LeaseError, match="is no session's to keep"):
        sessions.check_in(lease, 3)


def test_who_takes_a_lease_over_keeps_the_tokens_it_knows_and_drops_unread_results() -> None:
    sessions, (lease,) = make_leases(1)
    sessions.bind("s", lease)
    epoch = int(lease._rows.epoch[lease.row])
    sessions.check_in(lease, 3)
    assert (lease.kv_committed_len, lease.kv_allocated_len) == (3, 8)
    assert lease._rows.epoch[lease.row] == epoch + 1
    sessions.check_out("s")
    sessions.check_in(lease, 7)
    assert lease.kv_committed_len == 3


def test_the_idle_session_used_longest_ago_comes_first() -> None:
    sessions, leases = make_leases(3)
    for session_id, lease in zip("abc", leases, strict=True):
        sessions.bind(session_id, lease)
    for lease in (leases[1], leases[2], leases[0]):
        sessions.check_in(lease, 5)
    assert [each for each, _ in sessions.idle()] == ["b", "c", "a"]
    sessions.check_out("b")
    assert sessions.oldest_idle() == "c"
    sessions.check_in(leases[1], 5)
    assert [each for each, _ in sessions.idle()] == ["c", "a", "b"]
    assert sessions.remove("c") is leases[2]
    assert sessions.remove("c") is None
    assert sessions.oldest_idle() == "a"


def test_a_session_has_one_lease_and_a_lease_one_session() -> None:
    sessions, (first, second, third) = make_leases(3)
    sessions.bind("s", first)
    with pytest.raises(LeaseError, match="'s' has a lease already"):
        sessions.bind("s", second)
    with pytest.raises(LeaseError, match="is that of session 's' already"):
        sessions.bind("t", first)
    with pytest.raises(LeaseError, match="'s' has no idle lease"):
        sessions.check_out("s")
    sessions.check_in(first, 5)
    with pytest.raises(LeaseError, match="'s' has a lease already"):
        sessions.bind("s", second)
    third.released = True
    with pytest.raises(LeaseError, match="after its release"):
        sessions.bind("t", third)
    assert [each for each, _ in sessions.idle()] == ["s"]


# -- leases of a rank -------------------------------------------------------------------------


def make_memory(page_size: int, *, radix: bool = True, num_rows: int = 5) -> RankMemory:
    sizes = EngineSizes(
        dp_size=1,
        page_size=page_size,
        pool_pages=(41,),
        num_rows=num_rows,
        max_context_len=20 * page_size,
        max_step_tokens=64,
        max_prompt_logprob_tokens=64,
        vocab_size=100,
    )
    return RankMemory(3, sizes, use_radix_cache=radix)


def known(num_tokens: int) -> np.ndarray:
    return np.arange(num_tokens, dtype=np.int32)


def take_turn(
    memory: RankMemory, committed: int, allocated: int, num_known: int, session_id: str = "s"
) -> KVLease:
    """The first turn of a session, from its beginning to where the session takes over."""
    lease = memory.open_lease(known(0))
    memory.sessions.bind(session_id, lease)
    assert memory.grow_rows(array(lease.row), array(allocated))
    memory.commit_rows(array(lease.row), array(committed))
    release_kv_cache(memory, lease, known(num_known), insert=True)
    return lease


def check(memory: RankMemory) -> None:
    """The ledger of a rank on which no request runs."""
    check_balance(memory, num_running=0)
    audit(memory, num_running=0)
    view = memory.view()
    counted = view.free_pages + view.leased_pages + view.cached_pages + view.session_held_pages
    assert counted + view.reserved_pages == view.total_pages
    assert view.leased_pages == 0
    assert view.free_rows + view.session_rows == view.total_rows
    idle = [lease for _, lease in memory.sessions.idle()]
    locked = {
        page
        for lease in idle
        for page in lease.pages(view.page_size, 0, lease.cache_protected_len)[0].tolist()
    }
    assert view.protected_pages == len(locked)
    assert memory.num_session_pages == len(locked) + view.session_held_pages
    assert memory.num_reclaimable_pages == view.total_pages - view.reserved_pages


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("radix", [False, True])
def test_a_session_holds_what_the_tree_does_not_and_both_are_counted_once(
    page_size: int, radix: bool
) -> None:
    memory = make_memory(page_size, radix=radix)
    committed, allocated = 3 * page_size + page_size // 2, 6 * page_size
    lease = take_turn(memory, committed, allocated, committed + 1)
    assert not lease.released
    assert memory.leases == {lease.row: lease}
    num_cached = 3 if radix else 0
    num_written = -(-committed // page_size)
    view = memory.view()
    assert (view.cached_pages, view.session_held_pages) == (num_cached, num_written - num_cached)
    assert memory.num_session_pages == num_written
    check(memory)
    resumed = resume_lease(memory, "s", committed)
    assert resumed is lease
    view = memory.view()
    assert (view.session_held_pages, view.session_rows) == (0, 0)
    assert view.leased_pages == num_written - num_cached
    check_balance(memory, num_running=1)
    audit(memory, num_running=1)
    with pytest.raises(LedgerError, match="2 requests run and 0 sessions are idle"):
        check_balance(memory, num_running=2)
    release_kv_cache(memory, lease, known(committed), insert=True)
    check(memory)
    assert release_idle_lease(memory, "s")
    assert not release_idle_lease(memory, "s")
    assert lease.released
    assert memory.view().free_pages == 40 - num_cached
    check(memory)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("radix", [False, True])
@pytest.mark.parametrize("offset", [-1, 0, 1])
@pytest.mark.parametrize("num_ahead", [0, 1, 5])
def test_the_tail_of_a_resumed_lease_is_freed_by_whole_pages_from_the_next_border_on(
    page_size: int, radix: bool, offset: int, num_ahead: int
) -> None:
    """Slots reserved ahead, and a prefix at, before and after the border of a page."""
    memory = make_memory(page_size, radix=radix)
    committed = 3 * page_size + offset
    allocated = committed + num_ahead
    lease = take_turn(memory, committed, allocated, committed + 1)
    pages, free = lease.pages(page_size)[0], memory.view().free_pages
    resume_lease(memory, "s", committed + 1)
    kept = -(-committed // page_size)
    assert (lease.kv_committed_len, lease.kv_allocated_len) == (committed, committed)
    assert lease.pages(page_size)[0].tolist() == pages[:kept].tolist()
    assert (memory.rows.pages[lease.row, 0, kept:] == 0).all()
    assert memory.view().free_pages == free + len(pages) - kept
    audit(memory, num_running=1)
    assert memory.grow_rows(array(lease.row), array(committed + 2 * page_size))
    audit(memory, num_running=1)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("less", range(4))
def test_a_prefix_shorter_than_what_was_committed_cuts_the_lease(page_size: int, less: int) -> None:
    """The last token is computed again, and a turn may keep less of the history than there is."""
    memory = make_memory(page_size, radix=False)
    committed = 3 * page_size
    lease = take_turn(memory, committed, committed, committed)
    prefix = max(committed - less, 0)
    pages = lease.pages(page_size)[0].tolist()
    resume_lease(memory, "s", prefix)
    assert (lease.kv_committed_len, lease.kv_allocated_len) == (prefix, prefix)
    # The page that the prefix ends in stays: the next tokens fill it.
    assert lease.pages(page_size)[0].tolist() == pages[: -(-prefix // page_size)]
    audit(memory, num_running=1)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_a_lease_is_never_cut_below_what_the_tree_owns_of_it(page_size: int) -> None:
    memory = make_memory(page_size)
    lease = take_turn(memory, 3 * page_size, 3 * page_size, 3 * page_size)
    assert lease.cache_protected_len == 3 * page_size
    view = memory.view()
    with pytest.raises(LeaseError, match="the tree owns more of it"):
        resume_lease(memory, "s", 3 * page_size - 1)
    assert memory.view().free_pages == view.free_pages


def test_a_session_that_is_not_idle_cannot_be_resumed() -> None:
    memory = make_memory(4)
    with pytest.raises(LeaseError, match="'s' has no idle lease"):
        resume_lease(memory, "s", 3)
    take_turn(memory, 6, 6, 6)
    resume_lease(memory, "s", 6)
    with pytest.raises(LeaseError, match="'s' has no idle lease"):
        resume_lease(memory, "s", 6)
    assert not release_idle_lease(memory, "s")
    roll_back_lease(memory, "s", 0)
    assert memory.sessions.lease_of("s")


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("radix", [False, True])
@pytest.mark.parametrize("kept_pages", [0.0, 0.5, 1.0, 2.0, 2.5, 3.0, 4.0])
def test_a_rolled_back_lease_keeps_what_is_left_unless_the_tree_owns_more(
    page_size: int, radix: bool, kept_pages: float
) -> None:
    memory = make_memory(page_size, radix=radix)
    committed = int(3.5 * page_size)
    lease = take_turn(memory, committed, 6 * page_size, committed)
    num_tokens = int(kept_pages * page_size)
    roll_back_lease(memory, "s", num_tokens)
    check(memory)
    if num_tokens < (3 * page_size if radix else 1):
        assert lease.released
        assert memory.view().cached_pages == (3 if radix else 0)
        return
    assert memory.sessions.idle_lease("s") is lease
    left = min(committed, num_tokens)
    assert (lease.kv_committed_len, lease.kv_allocated_len) == (left, left)
    assert memory.num_session_pages == -(-left // page_size)


def test_a_turn_whose_result_must_not_be_kept_leaves_the_session_none() -> None:
    """A failed step: neither the tree nor the session takes anything."""
    memory = make_memory(4)
    take_turn(memory, 6, 6, 6)
    lease = resume_lease(memory, "s", 6)
    memory.sessions.unbind(lease)
    release_kv_cache(memory, lease, known(6), insert=False)
    assert lease.released
    assert not memory.sessions.lease_of("s")
    assert memory.view().session_rows == 0
    check(memory)


def test_two_sessions_share_the_pages_of_what_both_have_said() -> None:
    memory = make_memory(4)
    first = take_turn(memory, 10, 12, 11, "a")
    second = take_turn(memory, 10, 12, 11, "b")
    assert first.pages(4, 0, 8)[0].tolist() == second.pages(4, 0, 8)[0].tolist()
    view = memory.view()
    assert (view.cached_pages, view.protected_pages, view.session_held_pages) == (2, 2, 2)
    assert memory.num_session_pages == 4
    check(memory)
    release_idle_lease(memory, "a")
    assert memory.view().protected_pages == 2
    release_idle_lease(memory, "b")
    assert memory.view().protected_pages == 0
    check(memory)


def test_a_rebuilt_rank_has_no_sessions() -> None:
    memory = make_memory(4)
    idle = take_turn(memory, 6, 8, 6, "idle")
    take_turn(memory, 6, 8, 6, "runs")
    running = resume_lease(memory, "runs", 6)
    memory.rebuild()
    assert idle.released
    assert running.released
    assert not memory.sessions.lease_of("idle")
    assert not memory.sessions.lease_of("runs")
    assert memory.view().free_pages == 40
    check(memory)
