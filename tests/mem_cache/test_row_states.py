"""Where rows of models with recurrent layers go on from, and what becomes of their snapshots."""

import numpy as np
import pytest

from sgl_jax.core.engine_sizes import LAST_VALUE, CacheGroup
from sgl_jax.mem_cache.dump import dump_rank
from sgl_jax.mem_cache.errors import LeaseError, LedgerError
from sgl_jax.mem_cache.ledger import audit, check_balance
from sgl_jax.mem_cache.pages.req_to_token_pool import NO_STATE
from sgl_jax.mem_cache.rank_memory import RankMemory
from sgl_jax.mem_cache.release import (
    adopt_prefix,
    free_passed_window_pages,
    free_tail,
    release_idle_lease,
    resume_lease,
    roll_back_lease,
)
from sgl_jax.mem_cache.row_states import (
    NULL_SLOT,
    can_go_back,
    free_passed_snapshots,
    resumable_len,
    state_source,
    take_snapshot_slot,
)
from tests.mem_cache.state_requests import (
    FULL,
    WITH_WINDOW,
    Device,
    Request,
    make_memory,
    numbers,
)
from tests.mem_cache.test_release import make_memory as make_plain_memory

POOL = 1


def listed(memory: RankMemory, row: int) -> list[int]:
    """After how many tokens the snapshots are that a row lists."""
    columns = memory.rows.pages[row, memory.state_group].nonzero()[0]
    return ((columns + 1) * memory.page_size).tolist()


def snapshots(memory: RankMemory) -> tuple[int, int, int]:
    """Free, rows' own, and the tree's."""
    allocator = memory.allocators[POOL]
    return allocator.num_free, allocator.num_leased, allocator.num_tree


def turn(device: Device, length: int, *, num_prompt: int = 13) -> Request:
    """The first turn of session "s": a prompt, and what was generated, of `length` tokens."""
    request = device.open(numbers())
    device.memory.sessions.bind("s", request.lease)
    device.prefill(request, num_prompt)
    device.publish(request)
    while request.lease.kv_committed_len < length:
        device.decode(request)
    device.end(request, length)
    return request


def resume(device: Device, request: Request, length: int, *, then: int = 0) -> Request:
    """The next turn of session "s", of which the first `length` tokens are those of `request`."""
    tokens = numbers(then=then, at=length)
    tokens[:length] = request.tokens[:length]
    return Request(tokens, resume_lease(device.memory, "s", length))


# -- what a row goes on from ----------------------------------------------------------------------


def test_a_row_without_tokens_starts_from_the_null_slot() -> None:
    device = Device(make_memory())
    assert state_source(device.memory, device.open(numbers()).lease) == NULL_SLOT


def test_a_row_with_a_cached_prefix_starts_from_its_snapshot() -> None:
    device = Device(make_memory())
    first = device.open(numbers())
    device.prefill(first, 13)
    device.end(first)
    second = device.open(numbers())
    assert second.lease.kv_committed_len == 12
    slot = state_source(device.memory, second.lease)
    assert 0 < slot < device.sizes.num_snapshots
    assert listed(device.memory, second.lease.row) == [12]
    assert device.decode(second)
    device.check(num_running=1)


def test_a_row_goes_on_from_what_its_last_step_wrote() -> None:
    device = Device(make_memory())
    request = device.open(numbers())
    device.prefill(request, 13)
    assert state_source(device.memory, request.lease) == device.sizes.own_slot(1, 1)
    device.decode(request)
    assert state_source(device.memory, request.lease) == device.sizes.own_slot(1, 0)


def test_a_row_without_a_state_after_its_tokens_says_so() -> None:
    device = Device(make_memory())
    request = device.open(numbers())
    device.prefill(request, 13)
    device.memory.rows.state_lens[:, request.lease.row] = NO_STATE
    with pytest.raises(LeaseError, match="no state after its committed tokens"):
        state_source(device.memory, request.lease)


def test_without_recurrent_layers_all_that_is_committed_can_be_gone_on_with() -> None:
    memory = make_plain_memory(4)
    lease = memory.open_lease(numbers(20))
    memory.grow_row(lease.row, 20)
    memory.commit_rows(np.array([lease.row]), np.array([10]))
    assert [resumable_len(memory, lease, length) for length in (0, 7, 12)] == [0, 7, 10]
    with pytest.raises(LeaseError, match="no recurrent layers"):
        free_passed_snapshots(memory, lease.row, 8)


def test_states_have_a_pool_of_their_own() -> None:
    with pytest.raises(ValueError, match="pool of their own"):
        make_memory(groups=(FULL, CacheGroup(LAST_VALUE, 0, (), True)))


# -- sessions -------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_known", [20, 21])
def test_a_turn_goes_on_from_the_state_of_its_sessions_row(num_known: int) -> None:
    device = Device(make_memory())
    request = turn(device, 21)
    following = resume(device, request, num_known, then=1)
    assert following.lease.kv_committed_len == num_known
    assert device.prefill(following, 30)
    device.check(num_running=1)


def test_a_row_keeps_two_states_and_a_turn_between_them_and_the_tree_matches_anew() -> None:
    device = Device(make_memory())
    turn(device, 21)
    lease = device.memory.sessions.idle_lease("s")
    assert lease is not None
    assert lease.cache_protected_len == 20
    states = [resumable_len(device.memory, lease, length) for length in (19, 20, 21, 40)]
    assert states == [-1, 20, 21, 21]
    assert not can_go_back(device.memory, lease, 19)
    with pytest.raises(LeaseError, match="cannot go on from its first 19"):
        resume_lease(device.memory, "s", 19)
    assert device.memory.sessions.idle_lease("s") is lease
    device.check(num_running=0)
    assert release_idle_lease(device.memory, "s")
    assert device.open(numbers(20)).lease.kv_committed_len == 16


def test_a_session_without_a_state_in_its_halves_goes_on_from_the_trees_snapshot() -> None:
    device = Device(make_memory())
    request = device.open(numbers())
    device.memory.sessions.bind("s", request.lease)
    device.prefill(request, 12)
    device.end(request, 12)
    device.memory.rows.state_lens[:, request.lease.row] = NO_STATE
    following = resume(device, request, 12)
    slot = state_source(device.memory, following.lease)
    assert 0 < slot < device.sizes.num_snapshots
    assert device.prefill(following, 20)
    device.check(num_running=1)


def test_rolled_back_a_session_keeps_its_lease_where_there_is_a_state() -> None:
    device = Device(make_memory(page_size=1))
    turn(device, 21, num_prompt=12)
    lease = device.memory.sessions.idle_lease("s")
    roll_back_lease(device.memory, "s", 21)
    assert device.memory.sessions.idle_lease("s") is lease
    roll_back_lease(device.memory, "s", 20)
    assert device.memory.sessions.idle_lease("s") is None
    device.check(num_running=0)


def test_a_fork_reads_the_tree_and_leaves_the_session_alone() -> None:
    device = Device(make_memory())
    request = turn(device, 23)
    fork = device.open(numbers(then=2, at=22))
    assert fork.lease.kv_committed_len == 20
    assert device.prefill(fork, 30)
    following = resume(device, request, 23, then=1)
    assert following.lease.kv_committed_len == 23
    assert device.prefill(following, 30)
    device.check(num_running=2)


def test_a_turn_takes_the_trees_prefix_only_if_it_is_longer_than_what_the_row_can_resume() -> None:
    device = Device(make_memory())
    request = turn(device, 21)
    other = device.open(numbers())
    device.prefill(other, 33)
    device.end(other)
    following = resume(device, request, 21)
    assert not adopt_prefix(device.memory, following.lease, numbers(21))
    assert following.lease.kv_committed_len == 21
    assert adopt_prefix(device.memory, following.lease, numbers(40))
    assert following.lease.kv_committed_len == following.lease.cache_protected_len == 32
    assert device.prefill(following, 40)
    device.check(num_running=1)


def test_an_idle_session_holds_no_snapshot_past_its_tokens() -> None:
    """A step in flight may have been told to keep a state of tokens that a stop took back."""
    device = Device(make_memory())
    request = device.open(numbers())
    device.memory.sessions.bind("s", request.lease)
    device.prefill(request, 24)
    device.end(request, 19)
    assert snapshots(device.memory) == (18, 0, 2)
    assert device.memory.view().pools[POOL].session_held_pages == 0
    device.check(num_running=0)


# -- drafts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_accepted", [0, 1, 2, 3])
def test_a_turn_goes_on_from_any_draft_that_was_accepted(num_accepted: int) -> None:
    for back in range(num_accepted + 1):
        device = Device(make_memory(max_draft_tokens=3, page_size=32))
        request = device.open(numbers())
        device.memory.sessions.bind("s", request.lease)
        device.prefill(request, 13)
        device.decode(request, 3, num_accepted)
        device.accept(request, num_accepted)
        known = 14 + num_accepted
        device.end(request, known)
        following = resume(device, request, known - back, then=1)
        assert following.lease.kv_committed_len == known - back
        assert device.prefill(following, 30)
        device.check(num_running=1)


def test_a_turn_goes_on_from_a_draft_of_the_step_before_the_last() -> None:
    device = Device(make_memory(max_draft_tokens=3, page_size=32))
    request = device.open(numbers())
    device.memory.sessions.bind("s", request.lease)
    device.prefill(request, 13)
    device.decode(request, 3, 2)  # states after 14, 15 and 16 tokens
    device.accept(request, 2)
    device.decode(request, 3, 0)  # after 17
    device.end(request, 17)
    second = resume(device, request, 16, then=1)
    assert second.lease.kv_committed_len == 16
    assert device.prefill(second, 20)


def test_what_the_last_step_wrote_counts_more_than_refused_drafts_of_the_one_before() -> None:
    device = Device(make_memory(max_draft_tokens=3, page_size=32))
    request = device.open(numbers())
    device.prefill(request, 13)
    device.decode(request, 3, 0)  # a state after 14 tokens, and refused ones
    device.decode(request, 3, 1)  # after 15 and 16
    device.accept(request, 1)
    slot = state_source(device.memory, request.lease)
    assert device.written[slot] == request.prefix(16)


def test_states_of_refused_drafts_are_not_gone_on_from_while_a_later_step_is_unread() -> None:
    """The step in flight began where the first one ended; what it wrote is not known yet."""
    device = Device(make_memory(max_draft_tokens=3, page_size=32))
    request = device.open(numbers())
    device.memory.sessions.bind("s", request.lease)
    device.prefill(request, 13)
    device.decode(request, 3, 1)  # states after 14 and 15 tokens, and two refused
    device.accept(request, 1)
    device.decode(request, 3, 0, is_known=False)  # after 16
    device.end(request, 16)
    lease = device.memory.sessions.idle_lease("s")
    assert lease is not None
    assert resumable_len(device.memory, lease, 16) == 14
    assert device.prefill(resume(device, request, 16, then=1), 20)


def test_states_past_where_a_turn_went_back_to_are_not_gone_on_from_later() -> None:
    """The first half still holds the state after 15 tokens that are not the row's any more."""
    device = Device(make_memory(max_draft_tokens=3, page_size=32))
    request = device.open(numbers())
    device.memory.sessions.bind("s", request.lease)
    device.prefill(request, 13)
    device.decode(request, 3, 2)  # states after 14, 15 and 16 tokens
    device.accept(request, 2)
    device.end(request, 16)
    second = resume(device, request, 14, then=1)
    device.prefill(second, 20)
    device.end(second, 20)
    lease = device.memory.sessions.idle_lease("s")
    assert lease is not None
    lengths = [resumable_len(device.memory, lease, length) for length in (14, 15, 19, 20)]
    assert lengths == [14, 14, 14, 20]
    device.end(resume(device, second, 20), 20)
    assert resumable_len(device.memory, lease, 15) != 15


def test_a_turn_that_ends_amid_accepted_drafts_goes_on_from_there() -> None:
    """The step after them has begun past the end: what they left is known to be right."""
    device = Device(make_memory(max_draft_tokens=3, page_size=32))
    request = device.open(numbers())
    device.memory.sessions.bind("s", request.lease)
    device.prefill(request, 13)
    device.decode(request, 3, 3)  # states after 14, 15, 16 and 17 tokens
    device.accept(request, 3)
    device.decode(request, 3, 0)  # after 18
    device.end(request, 16)
    second = resume(device, request, 16, then=1)
    assert second.lease.kv_committed_len == 16
    assert device.prefill(second, 20)


def test_a_chunk_of_a_prompt_leaves_one_state() -> None:
    """Its half has room for those of a step with drafts, too."""
    device = Device(make_memory(max_draft_tokens=3, page_size=32))
    request = device.open(numbers())
    device.memory.sessions.bind("s", request.lease)
    device.prefill(request, 8)
    device.prefill(request, 14)
    device.end(request, 14)
    lease = device.memory.sessions.idle_lease("s")
    assert lease is not None
    lengths = [resumable_len(device.memory, lease, length) for length in (7, 8, 9, 11, 13, 14)]
    assert lengths == [0, 8, 8, 8, 8, 14]


def test_a_draft_that_may_reach_a_length_and_the_step_that_does_take_one_slot() -> None:
    device = Device(make_memory(max_draft_tokens=3))
    request = device.open(numbers())
    device.prefill(request, 14, keep=())
    device.decode(request, 3, 0)
    slot = device.memory.rows.pages[1, 1, 3]
    device.decode(request, 3, 0)
    assert listed(device.memory, 1) == [16]
    assert device.memory.rows.pages[1, 1, 3] == slot
    device.end(request, 17)
    device.check(num_running=0)
    assert device.open(numbers()).lease.kv_committed_len == 16


# -- snapshots ------------------------------------------------------------------------------------


def test_growing_takes_no_slots() -> None:
    device = Device(make_memory())
    request = device.open(numbers())
    assert device.memory.grow_row(request.lease.row, 20)
    other = device.open(numbers())
    rows, lens = np.array([1, 2]), np.array([40, 20])
    assert device.memory.pages_to_grow(rows, lens).tolist() == [5, 5]
    assert device.memory.grow_rows(rows, lens)
    assert snapshots(device.memory) == (20, 0, 0)
    assert not device.memory.rows.pages[:, 1].any()
    assert device.memory.request_pages(20) == 5
    assert device.memory.num_held(other.lease) == 5
    device.check(num_running=2)


def test_pages_that_a_row_takes_cost_no_snapshot() -> None:
    device = Device(make_memory(num_snapshots=1))
    first = device.open(numbers(then=1, at=0))
    device.prefill(first, 12, keep=(12,))
    device.end(first)
    request = device.open(numbers())
    assert device.memory.grow_row(request.lease.row, 8)
    assert device.memory.grow_rows(np.array([request.lease.row]), np.array([20]))
    assert snapshots(device.memory) == (0, 0, 1)


@pytest.mark.parametrize("length", [0, 10, 12, 24])
def test_a_snapshot_ends_a_page_that_is_allocated_and_not_published(length: int) -> None:
    device = Device(make_memory())
    request = device.open(numbers())
    device.prefill(request, 12)
    device.publish(request)
    device.memory.grow_row(request.lease.row, 20)
    with pytest.raises(LeaseError, match=f"cannot keep a state after {length} tokens"):
        take_snapshot_slot(device.memory, request.lease.row, length)


def test_a_snapshot_takes_the_place_of_one_that_is_not_locked_or_is_not_kept() -> None:
    device = Device(make_memory(num_snapshots=1))
    first = device.open(numbers(then=1, at=0))
    device.prefill(first, 12, keep=(12,))
    device.end(first)
    assert snapshots(device.memory) == (0, 0, 1)
    second = device.open(numbers())
    device.prefill(second, 12, keep=(8, 12))
    assert listed(device.memory, second.lease.row) == [8]
    assert snapshots(device.memory) == (0, 1, 0)
    assert device.memory.allocator.num_tree == 0  # they led to the snapshot that was evicted
    device.check(num_running=1)


def test_a_row_frees_snapshots_before_its_last_certain_one() -> None:
    """But not of those at multiples of 8, which it publishes."""
    device = Device(make_memory())
    request = device.open(numbers())
    device.prefill(request, 13, keep=(4,))
    device.publish(request)
    device.prefill(request, 36, keep=(16, 20, 28, 36))
    free_passed_snapshots(device.memory, 1, 19)
    assert listed(device.memory, 1) == [16, 20, 28, 36]
    free_passed_snapshots(device.memory, 1, 28)
    assert listed(device.memory, 1) == [16, 28, 36]
    device.check(num_running=1)
    free_passed_snapshots(device.memory, 1, 36)
    assert listed(device.memory, 1) == [16, 36]
    assert snapshots(device.memory) == (17, 2, 1)
    device.end(request)
    device.check(num_running=0)
    assert [device.open(numbers(n)).lease.kv_committed_len for n in (12, 20, 40)] == [4, 16, 36]


def test_a_row_unlocks_the_trees_snapshot_when_it_has_a_certain_one() -> None:
    device = Device(make_memory())
    request = device.open(numbers())
    device.prefill(request, 12, keep=(12,))
    device.publish(request)
    assert device.memory.cache.num_protected[POOL] == 1
    device.prefill(request, 20, keep=(20,))
    free_passed_snapshots(device.memory, 1, 19)
    assert device.memory.cache.num_protected[POOL] == 1
    free_passed_snapshots(device.memory, 1, 20)
    assert device.memory.cache.num_protected[POOL] == 0
    assert device.memory.locked[POOL].num_locked == 0
    device.check(num_running=1)
    assert device.memory.cache.evict(1, POOL) == 1
    device.check(num_running=1)


def test_a_row_that_begins_again_keeps_states_before_those_that_it_freed() -> None:
    device = Device(make_memory(use_radix_cache=False))
    request = device.open(numbers())
    device.memory.sessions.bind("s", request.lease)
    device.prefill(request, 20, keep=(12, 20))
    free_passed_snapshots(device.memory, 1, 20)
    device.end(request, 20)
    second = resume(device, request, 7)
    assert second.lease.kv_committed_len == 0
    device.prefill(second, 14, keep=(4, 12))
    assert listed(device.memory, 1) == [4, 12]
    device.check(num_running=1)


def test_windows_pass_and_snapshots_stay() -> None:
    memory = make_memory(groups=WITH_WINDOW)
    device = Device(memory)
    request = device.open(numbers())
    device.prefill(request, 24, keep=(8, 16))
    free_passed_window_pages(memory.rows, [memory], np.array([1]), np.array([24]))
    assert listed(memory, 1) == [8, 16]
    assert memory.rows.first_pages[:, 1].tolist() == [0, 5, 0]
    assert memory.pages_to_grow(np.array([1]), np.array([28])).tolist() == [2]
    device.check(num_running=1)


def test_what_a_row_cannot_go_back_to_is_not_cut() -> None:
    device = Device(make_memory())
    request = device.open(numbers())
    device.prefill(request, 13, keep=(4, 8))
    device.decode(request)
    with pytest.raises(LeaseError, match="no state after them"):
        free_tail(device.memory, request.lease, 12)
    assert free_tail(device.memory, request.lease, 8) == [2, 0]
    assert state_source(device.memory, request.lease) == device.memory.rows.pages[1, 1, 1]
    assert free_tail(device.memory, request.lease, 4) == [1, 1]
    assert device.memory.rows.state_lens[:, 1].tolist() == [NO_STATE, NO_STATE]
    device.check(num_running=1)


# -- publishing -----------------------------------------------------------------------------------


def test_a_chunk_without_a_snapshot_at_its_end_locks_none_there() -> None:
    """Not even one that another request brings later: it would be counted for nobody."""
    device = Device(make_memory())
    first = device.open(numbers())
    device.prefill(first, 12, keep=(8,))
    device.publish(first)
    assert listed(device.memory, 1) == []
    assert device.memory.cache.num_protected == [3, 0]
    second = device.open(numbers())
    assert second.lease.kv_committed_len == 8
    device.prefill(second, 13, keep=(12,))
    device.publish(second)
    assert device.memory.cache.num_protected == [3, 1]
    device.check(num_running=2)
    device.prefill(first, 20, keep=(16,))
    device.end(first)
    device.end(second)
    device.check(num_running=0)


def test_of_two_rows_that_keep_the_same_state_one_frees_its_own() -> None:
    device = Device(make_memory())
    requests = [device.open(numbers()) for _ in range(2)]
    for request in requests:
        device.prefill(request, 13)
    assert snapshots(device.memory) == (16, 4, 0)
    for request in requests:
        device.publish(request)
    assert snapshots(device.memory) == (18, 0, 2)
    assert [listed(device.memory, row) for row in (1, 2)] == [[12], [12]]
    device.check(num_running=2)


def test_a_released_row_leaves_no_state_behind() -> None:
    device = Device(make_memory())
    request = device.open(numbers())
    device.prefill(request, 20)
    device.end(request, insert=False)
    assert snapshots(device.memory) == (20, 0, 0)
    assert device.memory.rows.state_lens.tolist() == [[NO_STATE] * 6] * 2
    request = device.open(numbers())
    assert state_source(device.memory, request.lease) == NULL_SLOT
    device.prefill(request, 20)
    device.memory.rebuild()
    assert snapshots(device.memory) == (20, 0, 0)
    assert device.memory.rows.state_lens.tolist() == [[NO_STATE] * 6] * 2


# -- proof ----------------------------------------------------------------------------------------


def test_the_memory_view_tells_states_from_pages() -> None:
    device = Device(make_memory(max_draft_tokens=2))
    request = device.open(numbers())
    device.prefill(request, 18)
    view = device.memory.view()
    pages, states = view.pools
    assert (pages.kind, pages.own_slots, pages.sliding_windows) == ("pages", 0, (None,))
    assert (states.kind, states.own_slots, states.sliding_windows) == ("states", 36, ())
    assert (states.total_pages, states.leased_pages, states.free_pages) == (21, 2, 18)
    assert (view.total_pages, view.leased_pages, view.free_pages) == (61, 5, 55)
    assert device.memory.allocators[POOL].name == "rank 0, states"


def test_the_ledger_misses_a_snapshot_that_no_row_lists() -> None:
    device = Device(make_memory())
    request = device.open(numbers())
    device.prefill(request, 18, keep=(8,))
    check_balance(device.memory)
    device.memory.rows.unlist(1, 1, 0, 4)
    with pytest.raises(LedgerError, match=r"rows hold 0 pages, 1 are leased.*row 1 took page 1"):
        check_balance(device.memory)


def test_the_walk_finds_states_that_cannot_be() -> None:
    device = Device(make_memory())
    request = device.open(numbers())
    device.prefill(request, 18)
    device.memory.rows.state_lens[0, 3] = 5
    device.memory.rows.state_lens[0, 1] = 19
    with pytest.raises(
        LedgerError, match=r"row 3 is free, but has states after \[5, -1\] tokens"
    ) as error:
        audit(device.memory)
    assert "row 1 has states after [19, 18] tokens, 18 are committed" in str(error.value)


def test_the_dump_says_what_the_rows_states_are() -> None:
    device = Device(make_memory())
    request = device.open(numbers())
    device.prefill(request, 18)
    (row,) = dump_rank(device.memory)["rows"]
    assert (row["state_lens"], row["state_half"], row["resumed_len"]) == ([NO_STATE, 18], 1, 0)
    assert len(row["pages"][1]) == 2
