"""Where others' sessions went wrong: the sixteen traps of a list of such defects, one by one.

Traps that do not need a session have a test of their own in `tests/scheduler/test_traps.py`,
or, where they concern the memory alone, in `tests/mem_cache`; here each is met with sessions.
"""

import numpy as np
import pytest

from sgl_jax.core.messages import AbortRequest, SessionTurn
from sgl_jax.core.scheduler_args import SchedulerArgs
from sgl_jax.mem_cache.errors import LedgerError
from sgl_jax.scheduler.events import Flush
from tests.scheduler.driver import Driver, generate, make_sizes
from tests.sessions.conversations import Conversations
from tests.sessions.test_sessions import PAGE_SIZES, talk
from tests.support.long import long_half


def test_trap_1_a_retract_neither_ends_the_turn_nor_lets_another_in() -> None:
    """Without sessions: `test_a_retract_ends_nothing_and_says_nothing`."""
    s = talk()
    s.say("s", [1, 2, 3])
    rid = s.begin("s", [4], 12)
    for _ in range(4):
        s.driver.step()
    s.driver.retract(rid)
    assert s.listed()["s"]["num_running"] == 1
    refused = generate("second", [5], 3, session=SessionTurn(id="s"))
    s.driver.submit(refused)
    assert "in flight" in (s.driver.finish["second"].message or "")
    s.run()
    assert len(s.driver.tokens[rid]) == 12
    s.check()


@pytest.mark.parametrize("radix", [False, True])
@pytest.mark.parametrize("num_turns", [0, 3])
def test_trap_2_a_retract_takes_the_memory_of_the_session_too(radix: bool, num_turns: int) -> None:
    """All of it can be used by others at once."""
    s = talk(disable_radix_cache=not radix, pool_tokens=64)
    for number in range(num_turns):
        s.say("s", [number, 1, 2], 5)
    rid = s.begin("s", [4], 12)
    for _ in range(5):
        s.driver.step()
    s.driver.retract(rid)
    memory = s.driver.scheduler.ranks[0].memory
    assert s.lease("s") is None
    assert memory.num_available_pages == 16
    assert memory.row_pool.num_free == 8
    s.run()
    assert s.driver.finish[rid].type == "length"
    s.close_all()


@pytest.mark.parametrize(
    ("num_steps", "page_size", "overlap", "num_drafts", "radix"),
    long_half(range(1, 9), PAGE_SIZES, [False, True], [0, 3], [False, True]),
)
def test_trap_3_lengths_that_grew_at_launch_are_not_saved_when_the_turn_is_aborted(
    num_steps: int, page_size: int, overlap: bool, num_drafts: int, radix: bool
) -> None:
    """Without sessions:
    `test_an_aborted_request_leaves_no_more_in_the_cache_than_was_written_and_read`."""
    s = talk(
        page_size=page_size, overlap=overlap, num_drafts=num_drafts, disable_radix_cache=not radix
    )
    s.say("s", [1, 2, 3], 4)
    history = s.of["s"].tokens
    rid = s.begin("s", list(range(20)), 30)
    for _ in range(num_steps):
        s.driver.step()
    lease = s.driver.scheduler._requests[rid].lease
    assert lease is not None
    assert lease.kv_committed_len > len(history)
    s.driver.abort(rid)
    assert s.lease("s") is lease
    assert lease.kv_committed_len == lease.kv_allocated_len == len(history)
    assert s.driver.scheduler.memory_views()[0].leased_pages == 0
    s.run()
    rid = s.say("s", [9])
    assert s.driver.prompt_tokens[rid] == len(history) + 1
    s.close_all()


def test_trap_4_a_request_refused_before_it_starts_leaves_the_lease_and_clears_the_mark() -> None:
    """More refusals in `test_session_endings.py`."""
    s = talk(num_rows=2, max_queued_requests=1)
    s.say("s", [1, 2, 3])
    lease = s.lease("s")
    assert lease is not None
    lengths = lease.kv_committed_len, lease.kv_allocated_len, lease.cache_protected_len
    too_long = s.begin("s", [1] * 500)
    for rid in ("would run", "waits"):
        s.driver.submit(generate(rid, [1], 3))
    queue_full = s.begin("s", [1])
    for rid in ("would run", "waits"):
        s.driver.abort(rid)
    waits = s.begin("s", [1])
    s.driver.abort(waits)
    for rid in (too_long, queue_full, waits):
        assert s.driver.finish[rid].type == "abort"
    assert s.lease("s") is lease
    assert lengths == (lease.kv_committed_len, lease.kv_allocated_len, lease.cache_protected_len)
    s.settle()
    assert s.driver.cached[s.say("s", [2])] == 6


def test_trap_5_a_lease_is_not_released_while_a_request_borrows_it() -> None:
    s = talk()
    s.open("timed", timeout_s=1.0)
    s.driver.tick(0.0)
    for session_id in ("s", "timed"):
        s.say(session_id, [1, 2, 3])
    rids = [s.begin(session_id, [4], 20) for session_id in ("s", "timed")]
    for _ in range(3):
        s.driver.step()
    leases = [s.driver.scheduler._requests[rid].lease for rid in rids]
    (rank,) = s.driver.scheduler.ranks
    assert not rank.idle_sessions.evict_oldest()
    s.driver.tick(100.0)
    assert not s.driver.scheduler.handle(Flush())
    s.close("s")
    assert all(lease is not None and not lease.released for lease in leases)
    s.run()
    assert [s.driver.finish[rid].type for rid in rids] == ["length", "length"]
    assert leases[0] is not None
    assert leases[0].released
    s.check()


@pytest.mark.parametrize("radix", [False, True])
@pytest.mark.parametrize("length", range(4, 14))
def test_trap_6_memory_is_freed_and_counted_by_whole_pages(radix: bool, length: int) -> None:
    """Every length around the borders of pages; see `tests/mem_cache/test_session_leases.py`."""
    s = talk(page_size=4, disable_radix_cache=not radix)
    s.say("s", list(range(length - 3)), 3)
    (view,) = s.driver.scheduler.memory_views()
    num_written = length - 1
    num_cached = num_written // 4 if radix else 0
    assert view.cached_pages == view.protected_pages == num_cached
    assert view.session_held_pages == -(-num_written // 4) - num_cached
    s.roll_back("s", 0)
    (view,) = s.driver.scheduler.memory_views()
    assert view.free_pages == view.total_pages - 1 - num_cached
    s.close_all()


@pytest.mark.parametrize("page_size", [4, *PAGE_SIZES])
@pytest.mark.parametrize("overlap", [False, True])
def test_trap_7_of_two_sessions_that_say_the_same_the_duplicates_are_freed_once(
    page_size: int, overlap: bool
) -> None:
    """From what is protected on, not from what was matched: the second turns match nothing, and
    their prefix is much longer than what the tree has of it when they publish."""
    s = talk(page_size=page_size, overlap=overlap)
    s.open("t")
    for number in range(4):
        for session_id in ("s", "t"):
            s.begin(session_id, [number, 1, 2, 3], 4)
        s.run()
    own, other = s.lease("s"), s.lease("t")
    assert own is not None
    assert other is not None
    num_shared = own.cache_protected_len // page_size
    assert own.cache_protected_len == other.cache_protected_len == 31 // page_size * page_size
    pages = own.pages(page_size)[0].tolist()
    assert pages[:num_shared] == other.pages(page_size)[0].tolist()[:num_shared]
    (view,) = s.driver.scheduler.memory_views()
    assert view.cached_pages == num_shared
    s.close_all()


@pytest.mark.parametrize("radix", [False, True])
def test_trap_8_many_turns_at_once_bring_their_rows_and_keep_them_between_chunks(
    radix: bool,
) -> None:
    """Without sessions: `test_a_prompt_in_chunks_keeps_its_row_while_others_come_and_go`."""
    s = talk(chunk=3, pool_tokens=1024, num_rows=13, disable_radix_cache=not radix)
    for i in range(5):
        s.open(f"s{i}")
    for session_id in s.of:
        s.say(session_id, [1, 2, 3])
    rows = {session_id: lease.row for session_id in s.of if (lease := s.lease(session_id))}
    assert len(set(rows.values())) == 6
    first_step = len(s.driver.plans)
    for i, session_id in enumerate(s.of):
        s.begin(session_id, list(range(i, 20 + i)), 5)
    for number in range(4):
        s.driver.submit(generate(f"plain{number}", [number] * 5, 2))
    s.run()
    for session_id, row in rows.items():
        lease = s.lease(session_id)
        assert lease is not None
        assert lease.row == row
        chunks = [
            (int(plan.ranks[0].kv_starts[i]), int(plan.ranks[0].q_lens[i]))
            for plan in s.driver.plans[first_step:]
            for i in np.flatnonzero(plan.ranks[0].rows == row)
        ]
        ends = [start + count for start, count in chunks]
        assert [start for start, _ in chunks] == [6, *ends[:-1]]
    s.close_all()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("page_size", [4, *PAGE_SIZES])
def test_trap_9_what_speculation_accepts_past_the_end_is_no_part_of_the_history(
    overlap: bool, page_size: int
) -> None:
    """Histories equal those without speculation; see `tests/scheduler/test_speculation.py`."""
    histories = []
    for num_drafts in (0, 4):
        s = talk(page_size=page_size, overlap=overlap, num_drafts=num_drafts)
        for number in range(10):
            s.say("s", [number], 3 + number, stop_token_ids=tuple(range(0, 50, 6)))
            lease = s.lease("s")
            assert lease is not None
            assert lease.kv_committed_len <= len(s.of["s"].tokens)
        histories.append((s.of["s"].tokens, s.of["s"].turn_ends))
    assert s.driver.scheduler.counters()["accepted_draft_tokens"] > 5
    assert histories[0] == histories[1]


def test_trap_10_a_page_counts_for_the_request_or_for_the_session_never_for_both() -> None:
    s = talk(disable_radix_cache=True, page_size=4)
    rid = s.begin("s", [1] * 8, 5)
    request = s.driver.scheduler._requests[rid]
    seen = []
    while rid not in s.driver.finish:
        s.driver.step()
        (view,) = s.driver.scheduler.memory_views()
        assert min(view.leased_pages, view.session_held_pages) == 0
        assert view.free_pages + view.leased_pages + view.session_held_pages == 64
        assert view.free_rows + 1 == view.total_rows
        seen.append((view.leased_pages > 0, view.session_held_pages > 0, view.session_rows))
    assert set(seen) == {(True, False, 0), (False, True, 1)}
    assert request.lease is None


@pytest.mark.parametrize("where", ["queue", "chunks", "decode", "retracted"])
def test_trap_11_every_end_states_its_reason_and_clears_the_mark_once(where: str) -> None:
    """All kinds of ends: `test_every_end_of_a_turn_before_its_time_...` in
    `test_session_endings.py`; without sessions, in `tests/scheduler/test_traps.py`."""
    s = talk()
    s.say("s", [1, 2, 3])
    rid = s.begin("s", [1] * 30, 20)
    for _ in range({"queue": 0, "chunks": 2, "decode": 8, "retracted": 8}[where]):
        s.driver.step()
    if where == "retracted":
        s.driver.retract(rid)
    for _ in range(2):  # the second comes too late, and says and does nothing
        s.driver.scheduler.handle(AbortRequest(rid=rid, message="the client went away"))
        s.driver.collect()
    assert s.driver.finish[rid].message == "the client went away"
    s.settle()
    assert s.listed()["s"]["num_running"] == 0
    other = s.begin("s", [2], 5)
    s.driver.scheduler.handle(AbortRequest(rid=rid))
    s.run()
    assert s.driver.finish[other].type == "length"
    s.check()


@pytest.mark.parametrize("chunk", [1, 3, 7])
@pytest.mark.parametrize("overlap", [False, True])
def test_trap_12_between_the_chunks_of_a_turn_nothing_is_sampled(chunk: int, overlap: bool) -> None:
    """Without sessions: `test_only_a_prompts_last_chunk_samples`."""
    s = talk(chunk=chunk, overlap=overlap)
    s.say("s", [1, 2, 3])
    first_step = len(s.driver.plans)
    rid = s.say("s", list(range(20)), 6)
    num_known = s.driver.prompt_tokens[rid]
    for plan in s.driver.plans[first_step:]:
        (rank,) = plan.ranks
        assert rank.samples.tolist() == (rank.kv_starts + rank.q_lens >= num_known).tolist()
    assert len(s.driver.tokens[rid]) == 6


@pytest.mark.parametrize("chunk", [1, 2, 5])
@pytest.mark.parametrize("interval", [1, 3])
@pytest.mark.parametrize("num_drafts", [0, 3])
def test_trap_13_tokens_on_their_way_survive_small_chunks_and_retracts(
    chunk: int, interval: int, num_drafts: int
) -> None:
    """Without sessions, the test of the same name. Ranks of uneven load, padded differently."""
    sizes = make_sizes(
        dp_size=3,
        page_size=4,
        num_pages=28,
        max_chunk_tokens=chunk,
        max_draft_tokens=num_drafts,
    )
    config = SchedulerArgs(
        test_retract=True,
        test_retract_interval=interval,
        schedule_conservativeness=0.0,
    )
    s = Conversations(Driver(sizes, config, max_unread=2))
    for i in range(6):
        s.open(f"s{i}")
    for number in range(3):
        rids = [
            s.begin(f"s{i}", [i, *range(i % 5 * 2)], 3 + i, dp_rank=0 if number == 0 else None)
            for i in range(6)
        ]
        s.run()
        assert [len(s.driver.tokens[rid]) for rid in rids] == [3 + i for i in range(6)]
    assert s.driver.scheduler.counters()["requests_retracted"] > 5
    s.check()
    s.close_all()


def test_trap_14_a_short_rank_leaves_the_sessions_of_other_ranks_alone() -> None:
    """Without sessions: `test_retract_on_a_short_rank_leaves_other_ranks_alone`."""
    s = talk(dp_size=2, pool_tokens=48, page_size=4, schedule_conservativeness=0.0)
    s.open("idle")
    s.say("idle", [1, 2, 3, 4, 5], 5, dp_rank=1)
    s.begin("s", [1, 2, 3], 20, dp_rank=1)
    for i in range(3):
        s.driver.submit(generate(f"busy{i}", list(range(i, i + 8)), 24, dp_rank=0))
    s.run()
    assert s.driver.scheduler.ranks[0].num_retracted > 0
    assert s.driver.scheduler.ranks[1].num_retracted == 0
    assert s.driver.scheduler.ranks[1].idle_sessions.num_evicted == 0
    assert s.driver.cached[s.say("idle", [6])] == 9


def test_trap_15_a_leaked_lock_is_not_hidden_behind_those_of_idle_sessions() -> None:
    s = talk(page_size=4)
    s.open("t")
    for session_id in ("s", "t"):
        s.say(session_id, list(range(10)), 3)
    s.driver.check_idle()
    (view,) = s.driver.scheduler.memory_views()
    (rank,) = s.driver.scheduler.ranks
    leases = [lease for _, lease in rank.memory.sessions.idle()]
    locked = {page for lease in leases for page in lease.pages(4, 0, lease.cache_protected_len)[0]}
    assert view.protected_pages == len(locked) == view.cached_pages
    rank.memory.cache.match_prefix(np.arange(8, dtype=np.int32))  # locks what is locked already
    assert s.driver.scheduler.memory_views() == [view]
    with pytest.raises(LedgerError, match="2 rows have locked 24 tokens, the tree gave 3 locks"):
        s.driver.scheduler.check_balance()


def test_trap_15_a_lost_lease_is_not_hidden_among_those_of_idle_sessions() -> None:
    s = talk(page_size=4)
    s.say("s", list(range(10)), 3)
    (rank,) = s.driver.scheduler.ranks
    rank.memory.open_lease(np.arange(8, dtype=np.int32))
    with pytest.raises(
        LedgerError, match="0 requests run and 1 sessions are idle, but there are 2"
    ):
        s.driver.scheduler.check_balance()


def test_trap_16_seeds_and_parameters_reach_the_row_that_goes_on() -> None:
    """Without sessions: `test_seeds_and_penalties_follow_their_own_request_...`. A turn that goes
    on in its row sends parameters of its own, and only the tokens that the row does not have."""
    s = talk(dp_size=2)
    s.open("t")
    for number in range(4):
        rids = {
            s.begin(
                session_id,
                [offset + number],
                3,
                seed=100 * number + offset,
                frequency_penalty=(offset + number) / 20,
                stop_token_ids=(40 + number,),
            ): (session_id, offset)
            for session_id, offset in (("s", 0), ("t", 10))
        }
        first_step = len(s.driver.plans)
        s.run()
        plans = s.driver.plans[first_step:]
        admissions = [
            (r, a) for p in plans for r, rank in enumerate(p.ranks) for a in rank.admissions
        ]
        assert len(admissions) == 2
        for dp_rank, admission in admissions:
            ((rid, (session_id, offset)),) = [
                item for item in rids.items() if 100 * number + item[1][1] == admission.seed
            ]
            lease = s.lease(session_id)
            assert lease is not None
            assert (dp_rank, admission.row) == (s.driver.dp_rank[rid], lease.row)
            assert admission.start == s.driver.cached[rid]
            assert admission.tokens.tolist() == s.driver.prompts[rid][admission.start :]
            assert admission.prompt_len == len(s.driver.prompts[rid])
            assert admission.sampling.frequency_penalty == (offset + number) / 20
            assert admission.stop_token_ids == (40 + number,)
