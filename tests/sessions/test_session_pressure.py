"""Sessions when memory is short, and on several ranks."""

import pytest

from sgl_jax.core.messages import SessionTurn
from sgl_jax.scheduler.events import Flush
from tests.scheduler.driver import generate
from tests.sessions.test_sessions import talk
from tests.support.faults import no_more_pages

# -- what goes first ----------------------------------------------------------------------------


@pytest.mark.parametrize("radix", [False, True])
def test_idle_sessions_go_used_longest_ago_first_before_anything_is_retracted(radix: bool) -> None:
    s = talk(page_size=4, pool_tokens=64, disable_radix_cache=not radix)
    for session_id in ("a", "b", "c"):
        s.open(session_id)
        s.say(session_id, [ord(session_id) - 80] * 10, 4)
    s.say("a", [1], 2)
    assert [each for each, _ in s.driver.scheduler.ranks[0].memory.sessions.idle()] == [
        "b",
        "c",
        "a",
    ]
    s.driver.submit(generate("big", [33] * 20, 6))
    s.run()
    assert s.lease("b") is None
    assert s.lease("a") is not None
    counters = s.driver.scheduler.counters()
    assert (counters["sessions_evicted"], counters["requests_retracted"]) == (1, 0)
    s.driver.check_tokens("big")
    s.say("b", [2], 3)
    s.check()
    s.close_all()


@pytest.mark.parametrize(("num_rows", "pool_tokens"), [(4, 192), (9, 128)])  # rows, pages lack
def test_idle_sessions_make_room_for_a_fetch_as_for_the_request_itself(
    num_rows: int, pool_tokens: int
) -> None:
    num_evicted = []
    for host_ratio in (0.0, 8.0):
        s = talk(
            num_rows=num_rows,
            pool_tokens=pool_tokens,
            host_ratio=host_ratio,
            hicache_fetch_policy="always",
        )
        s.driver.oracle.host.end_rate = 1.0
        for name in "abcdef":
            s.open(name)
            s.say(name, [ord(name) % 50] * 30)
        for name in "abcdef":
            num_before = len(s.of[name].tokens) - 1
            rid = s.say(name, [1, 2, 3])
            assert not host_ratio or s.driver.cached[rid] == num_before // 4 * 4
        counters = s.driver.scheduler.counters()
        assert (counters["host_fetched_tokens"] > 0) == (host_ratio > 0)
        num_evicted.append(counters["sessions_evicted"])
        s.check()
        s.close_all()
    assert num_evicted[0] == num_evicted[1]


def test_no_session_is_evicted_for_a_request_that_does_not_fit_even_so() -> None:
    s = talk(page_size=4, pool_tokens=128, disable_radix_cache=True, schedule_conservativeness=0.0)
    for session_id in ("a", "b", "c"):
        s.open(session_id)
        s.say(session_id, [1] * 4, 2)
    s.driver.submit(generate("running", [2] * 40, 30))
    s.driver.step()
    s.driver.submit(generate("big", [3] * 90, 4))
    while len(s.driver.tokens["running"]) < 5:  # its prompt is done: others could start now
        s.driver.step()
    assert s.driver.scheduler.num_waiting == 1
    assert s.driver.scheduler.counters()["sessions_evicted"] == 0
    s.run()
    s.driver.check_tokens("big")
    s.close_all()


@pytest.mark.parametrize("reads_what_they_share", [False, True])
def test_nor_are_sessions_that_share_pages_which_can_be_freed_only_once(
    reads_what_they_share: bool,
) -> None:
    s = talk(page_size=4, pool_tokens=128, num_rows=17, schedule_conservativeness=0.0)
    s.say("s", list(range(30)), 5)
    for number in range(6):
        s.fork("s", f"f{number}")
        s.say(f"f{number}", [number], 3)
    s.driver.submit(generate("running", [40] * 30, 30))
    while len(s.driver.tokens["running"]) < 5:
        s.driver.step()
    stem = list(range(30)) if reads_what_they_share else []
    s.driver.submit(generate("big", stem + [41] * (110 - len(stem)), 10))
    for _ in range(4):
        s.driver.step()
    assert s.driver.scheduler.num_waiting == 1
    assert s.driver.scheduler.counters()["sessions_evicted"] == 0
    s.run()
    s.driver.check_tokens("big")
    assert s.driver.scheduler.counters()["sessions_evicted"] > 0
    s.close_all()


def test_what_a_running_request_shares_with_a_prompt_counts_as_room_for_it() -> None:
    s = talk(page_size=4, pool_tokens=128, num_rows=17, schedule_conservativeness=0.0)
    s.say("s", [1] * 20, 4)
    s.driver.submit(generate("running", [2] * 60, 20))
    while len(s.driver.tokens["running"]) < 5:
        s.driver.step()
    s.driver.submit(generate("more", [2] * 60 + [3] * 30, 4))
    for _ in range(3):
        s.driver.step()
    assert s.driver.scheduler.num_waiting == 0
    s.run()
    s.driver.check_tokens("more")
    s.close_all()


def test_a_turn_that_cannot_use_its_lease_releases_it_only_when_it_starts() -> None:
    s = talk(pool_tokens=64)
    s.say("s", list(range(20)), 5)
    s.driver.submit(generate("big", [40] * 30, 20))
    for _ in range(8):
        s.driver.step()
    rid = s.begin("s", [49] * 20, 4, turn=SessionTurn(id="s", is_whole=True))
    for _ in range(2):
        s.driver.step()
    assert s.driver.scheduler.num_waiting == 1
    held = s.lease("s")
    assert held is not None
    s.driver.abort(rid)
    assert s.lease("s") is held
    s.settle()
    s.run()
    s.close_all()


def test_a_turn_that_cannot_use_its_lease_starts_on_what_that_held() -> None:
    s = talk(pool_tokens=64)
    s.say("s", list(range(40)), 5)
    s.say("s", [49] * 45, 4, turn=SessionTurn(id="s", is_whole=True))
    assert s.driver.scheduler.counters()["sessions_evicted"] == 0
    s.close_all()


def test_a_session_whose_turn_waits_goes_after_those_with_none() -> None:
    s = talk(page_size=4, pool_tokens=64, num_rows=4)
    for session_id in ("a", "b"):
        s.open(session_id)
        s.say(session_id, [ord(session_id) - 80] * 6, 2)
    s.begin("a", [1], 2)
    sessions = s.driver.scheduler.ranks[0].memory.sessions
    assert [each for each, _ in sessions.idle()] == ["b", "a"]
    s.run()
    s.close_all()


def test_a_waiting_turn_whose_lease_was_taken_goes_where_there_is_room() -> None:
    s = talk(page_size=4, pool_tokens=64, num_rows=3, dp_size=2, schedule_policy="fcfs")
    s.say("s", [5] * 6, 2)
    home = next(r for r in s.driver.scheduler.ranks if r.memory.sessions.lease_of("s")).dp_rank
    for i in range(2):
        s.driver.submit(generate(f"r{i}", [10 + i] * 4, 20, dp_rank=home))
    rid = s.begin("s", [1], 2)
    for _ in range(8):
        s.driver.step()
    s.driver.collect()
    assert s.driver.dp_rank[rid] == 1 - home
    assert s.driver.finish[rid].type == "length"
    s.run()
    s.close_all()


def test_what_only_the_tree_has_goes_before_any_session() -> None:
    s = talk(page_size=4, pool_tokens=64)
    s.say("s", [1] * 10, 4)
    for number in range(5):
        s.driver.submit(generate(f"r{number}", [10 + number] * 20, 4))
        s.run()
    assert s.driver.scheduler.counters()["evicted_pages"] > 0
    assert s.driver.scheduler.counters()["sessions_evicted"] == 0
    assert s.driver.cached[s.say("s", [2])] == 13


def test_a_decoding_request_takes_an_idle_sessions_pages_before_it_is_retracted() -> None:
    s = talk(page_size=4, pool_tokens=64, disable_radix_cache=True, schedule_conservativeness=0.0)
    s.say("s", [1] * 20, 4)
    for rid in ("x", "y"):
        s.driver.submit(generate(rid, [ord(rid) - 90] * 4, 24))
    s.run()
    counters = s.driver.scheduler.counters()
    assert (counters["sessions_evicted"], counters["requests_retracted"]) == (1, 0)
    s.close_all()


def test_a_prompt_in_chunks_takes_an_idle_sessions_pages() -> None:
    """A session that became idle since the prompt was admitted, and found room for all of it."""
    s = talk(page_size=4, pool_tokens=64, disable_radix_cache=True, schedule_conservativeness=0.0)
    s.begin("s", [1] * 3, 17)
    s.driver.step()
    s.driver.submit(generate("long", [2] * 40, 4))
    s.run()
    assert s.driver.finish["long"].type == "length"
    s.driver.check_tokens("long")
    s.close_all()


@pytest.mark.parametrize("radix", [False, True])
@pytest.mark.parametrize("num_drafts", [0, 3])
def test_an_evicted_session_answers_as_if_nothing_had_happened(
    radix: bool, num_drafts: int
) -> None:
    answers = []
    for is_evicted in (False, True):
        s = talk(disable_radix_cache=not radix, num_drafts=num_drafts)
        for number in range(6):
            if is_evicted and number:
                rank = s.driver.scheduler.ranks[0]
                assert rank.idle_sessions.evict_oldest()
                assert not rank.idle_sessions.evict_oldest()
                assert rank.memory.view().session_rows == 0
            history = len(s.of["s"].tokens)
            rid = s.say("s", [number, 3, 5], 5)
            expected = max(history - 1, 0)
            if is_evicted:
                expected = expected // 4 * 4 if radix else 0
            assert s.driver.cached[rid] == expected
        answers.append(s.of["s"].tokens)
        s.close_all()
    assert answers[0] == answers[1]


def test_more_sessions_than_rows_take_turns() -> None:
    s = talk(num_rows=4, pool_tokens=1024)
    for i in range(8):
        s.open(f"s{i}")
    for number in range(3):
        for i in range(8):
            s.say(f"s{i}", [number, i], 3)
            (view,) = s.driver.scheduler.memory_views()
            assert view.session_rows == min(number * 8 + i + 1, 3)
    assert s.driver.scheduler.counters()["sessions_evicted"] == 24 - 3
    rids = [s.begin(f"s{i}", [9], 3) for i in range(8)]
    s.run()
    assert all(s.driver.finish[rid].type == "length" for rid in rids)
    s.check()
    s.close_all()


@pytest.mark.parametrize(("fraction", "num_kept"), [(1.0, 4), (0.5, 2), (0.26, 1), (0.0, 0)])
@pytest.mark.parametrize("radix", [False, True])
def test_idle_sessions_hold_no_more_than_their_share(
    fraction: float, num_kept: int, radix: bool
) -> None:
    """Four sessions of four pages each, of seventeen."""
    s = talk(
        page_size=4, pool_tokens=64, disable_radix_cache=not radix, session_memory_fraction=fraction
    )
    for i in range(4):
        s.open(f"s{i}")
        s.say(f"s{i}", [i] * 10, 5)
        assert s.driver.scheduler.memory_views()[0].session_rows == min(i + 1, num_kept)
    assert [s.lease(f"s{i}") is not None for i in range(4)] == [i >= 4 - num_kept for i in range(4)]
    s.close_all()


@pytest.mark.parametrize(("fraction", "num_kept"), [(0.45, 4), (0.4, 3), (0.35, 2), (0.25, 0)])
def test_a_page_that_idle_sessions_share_counts_once(fraction: float, num_kept: int) -> None:
    """Four sessions: five pages that all of them read, and one of each one's own, of 21."""
    s = talk(page_size=4, pool_tokens=80, session_memory_fraction=fraction)
    s.say("s", list(range(20)), 2)
    for name in ("a", "b", "c"):
        s.fork("s", name)
        s.say(name, [ord(name) % 50], 2)
    assert s.driver.scheduler.memory_views()[0].session_rows == num_kept
    assert s.driver.scheduler.counters()["requests_retracted"] == 0
    s.close_all()


def test_a_session_that_goes_back_after_an_abort_is_held_to_the_share_as_well() -> None:
    s = talk(page_size=4, pool_tokens=64, disable_radix_cache=True, session_memory_fraction=0.4)
    s.say("s", [1] * 10, 5)
    rid = s.begin("s", [2] * 20, 10)
    s.driver.step()
    s.open("other")
    other = s.begin("other", [3] * 10, 5)
    while other not in s.driver.finish:
        s.driver.step()
    s.settle()
    s.driver.abort(rid)
    s.run()
    assert s.lease("other") is None
    lease = s.lease("s")
    assert lease is not None
    assert s.driver.scheduler.ranks[0].memory.num_session_pages == 4
    assert (lease.kv_committed_len, lease.kv_allocated_len) == (15, 15)
    s.close_all()


def test_a_flush_takes_the_memory_of_idle_sessions_not_what_was_said() -> None:
    s = talk(dp_size=2)
    s.open("t")
    s.say("s", [1, 2, 3])
    s.say("t", [4, 5, 6])
    assert s.driver.scheduler.handle(Flush())
    for view in s.driver.scheduler.memory_views():
        assert view.free_pages == view.total_pages - 1
        assert view.session_rows == 0
    assert s.driver.cached[s.say("s", [7])] == 0
    s.check()
    s.begin("t", [8], 5)
    s.driver.step()
    assert not s.driver.scheduler.handle(Flush())
    s.run()
    s.close_all()


@pytest.mark.parametrize("radix", [False, True])
def test_a_turn_that_does_not_fit_beside_what_runs_waits_and_then_finds_its_lease(
    radix: bool,
) -> None:
    """Its own lease is not evicted to make room for itself."""
    s = talk(
        page_size=4, pool_tokens=64, disable_radix_cache=not radix, schedule_conservativeness=1.0
    )
    s.say("s", [1] * 20, 5)
    s.driver.submit(generate("runs", [2] * 8, 20))
    for _ in range(3):
        s.driver.step()
    rid = s.begin("s", [3] * 20, 5)
    for _ in range(3):
        s.driver.step()
    assert s.driver.scheduler.num_waiting == 1
    assert s.lease("s") is not None
    s.run()
    assert s.driver.cached[rid] == 24
    s.close_all()


def test_a_session_grows_to_all_that_a_rank_can_hold() -> None:
    s = talk(page_size=4, pool_tokens=64)
    s.open("other")
    while len(s.of["s"].tokens) < 60:
        s.say("other", [3], 1)
        s.say("s", [1, 2], 2)
    rid = s.begin("s", [1], 3)
    s.run()
    assert s.driver.finish[rid].type == "length"
    rid = s.begin("s", [1], 1)
    assert s.driver.finish[rid].status_code == 400
    s.check()
    s.close_all()


def test_a_shortage_that_eviction_cannot_mend_ends_a_request_and_no_conversation() -> None:
    s = talk(page_size=4)
    s.say("s", [1, 2, 3])
    s.driver.submit(generate("plain", [9] * 4, 20))
    with no_more_pages(s.driver.scheduler.ranks[0].memory):
        while "plain" not in s.driver.finish:
            s.driver.step()
    s.run()
    s.say("s", [4])
    s.check()
    s.close_all()


# -- ranks --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dp_size", [2, 3, 4])
@pytest.mark.parametrize("balance", ["prefix_aware", "round_robin"])
@pytest.mark.parametrize("radix", [False, True])
def test_turns_go_to_the_rank_that_holds_their_session(
    dp_size: int, balance: str, radix: bool
) -> None:
    """Independent of the balancer and of the load of the rank."""
    s = talk(
        dp_size=dp_size, pool_tokens=512, disable_radix_cache=not radix, load_balance_method=balance
    )
    for i in range(5):
        s.open(f"s{i}")
    homes: dict[str, int] = {}
    for number in range(5):
        for i in range(number):
            s.driver.submit(generate(f"plain{number}.{i}", [i, 9, 9], 6, dp_rank=0))
        rids = {each: s.begin(each, [number, int(each[1:] or 9)], 3) for each in s.of}
        histories = {each: len(conversation.tokens) for each, conversation in s.of.items()}
        s.run()
        for session_id, rid in rids.items():
            home = homes.setdefault(session_id, s.driver.dp_rank[rid])
            assert s.driver.dp_rank[rid] == home
            assert s.listed()[session_id]["dp_rank"] == home
            assert s.driver.cached[rid] == max(histories[session_id] - 1, 0)
    assert len(set(homes.values())) > 1
    s.close_all()


def test_once_its_memory_is_gone_a_session_may_move() -> None:
    s = talk(dp_size=2)
    s.say("s", [1, 2, 3], dp_rank=0)
    assert s.driver.scheduler.ranks[0].idle_sessions.evict_oldest()
    rid = s.say("s", [4], dp_rank=1)
    assert (s.driver.dp_rank[rid], s.driver.cached[rid]) == (1, 0)
    assert s.listed()["s"]["dp_rank"] == 1
    rid = s.say("s", [5])
    assert s.driver.dp_rank[rid] == 1
    s.check()
    s.close_all()


def test_a_turn_that_asks_for_another_rank_takes_its_session_there() -> None:
    s = talk(dp_size=2)
    s.say("s", [1, 2, 3], dp_rank=0)
    rid = s.say("s", [4], dp_rank=1)
    assert (s.driver.dp_rank[rid], s.driver.cached[rid]) == (1, 0)
    assert not s.driver.scheduler.ranks[0].memory.sessions.lease_of("s")
    s.check()
    s.close_all()


def test_a_retracted_turn_may_go_on_elsewhere_and_its_session_with_it() -> None:
    s = talk(dp_size=2, load_balance_method="round_robin", disable_radix_cache=True)
    s.say("s", [1, 2, 3])
    homes = set()
    for number in range(6):
        rid = s.begin("s", [number], 6)
        s.driver.step()
        s.driver.retract(rid)
        s.run()
        homes.add(s.driver.dp_rank[rid])
        assert s.listed()["s"]["dp_rank"] == s.driver.dp_rank[rid]
    assert homes == {0, 1}
    s.check()
    s.close_all()


def test_a_rank_that_is_refused_pages_does_not_lose_its_sessions_words() -> None:
    s = talk(dp_size=2, page_size=4, disable_radix_cache=True)
    s.say("s", [1, 2, 3, 4, 5], dp_rank=0)
    rid = s.begin("s", [6] * 9, turn=SessionTurn(id="s"))
    with no_more_pages(s.driver.scheduler.ranks[0].memory):
        for _ in range(4):
            s.driver.step()
    s.run()
    assert s.driver.finish[rid].type == "abort"
    s.check()
    s.say("s", [7])
    s.close_all()
