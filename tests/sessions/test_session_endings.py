"""However a turn ends, its session goes on from its last successful turn, and nothing leaks."""

from collections.abc import Callable

import pytest

from sgl_jax.core.messages import (
    AbortRequest,
    CloseSession,
    ForkSession,
    OpenSession,
    RollbackSession,
    SessionTurn,
    StopRequest,
)
from sgl_jax.mem_cache.errors import LedgerError
from sgl_jax.scheduler.events import Rebuild
from sgl_jax.scheduler.rank_scheduler import RankScheduler
from tests.scheduler.driver import generate
from tests.sessions.conversations import Conversations
from tests.sessions.test_sessions import PAGE_SIZES, talk
from tests.support.faults import FaultyExecutor, no_more_pages
from tests.support.long import long_half

NEW = list(range(10, 40))  # in chunks of 8: four steps


def go_on(s: Conversations, history: list[int]) -> None:
    """The session is where it was, takes another turn, and leaves nothing when it is closed."""
    s.settle()
    s.check()
    assert s.of["s"].tokens == history
    rid = s.say("s", [41, 42])
    assert s.driver.prompt_tokens[rid] == len(history) + 2
    s.say("s", [43])
    s.check()
    s.close_all()


# -- aborts ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_turns", "num_steps", "page_size", "overlap", "radix"),
    long_half([0, 1, 3], [0, 1, 2, 3, 4, 5, 8], PAGE_SIZES, [False, True], [False, True]),
)
def test_a_turn_aborted_at_any_point_never_was(
    num_turns: int, num_steps: int, page_size: int, overlap: bool, radix: bool
) -> None:
    """Before it starts, between the chunks of its prefill, and while it decodes. A disconnect is
    an abort, too."""
    s = talk(page_size=page_size, overlap=overlap, disable_radix_cache=not radix)
    for number in range(num_turns):
        s.say("s", [number, 1, 2], 3)
    history = s.of["s"].tokens
    before = s.lease("s")
    committed = before.kv_committed_len if before is not None else 0
    rid = s.begin("s", NEW, 20)
    for _ in range(num_steps):
        s.driver.step()
    s.driver.scheduler.handle(AbortRequest(rid=rid, message="the client went away"))
    s.run()
    after = s.lease("s")
    if num_turns:
        assert after is before
        assert after is not None
        assert committed <= after.kv_committed_len <= len(history)
    else:
        assert after is None
    go_on(s, history)


@pytest.mark.parametrize("num_turns", [0, 2])
@pytest.mark.parametrize("num_steps", [1, 3, 6])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("radix", [False, True])
def test_a_turn_aborted_while_it_waits_after_a_retract_never_was(
    num_turns: int, num_steps: int, page_size: int, overlap: bool, radix: bool
) -> None:
    s = talk(page_size=page_size, overlap=overlap, disable_radix_cache=not radix)
    for number in range(num_turns):
        s.say("s", [number, 1, 2], 3)
    history = s.of["s"].tokens
    rid = s.begin("s", NEW, 20)
    for _ in range(num_steps):
        s.driver.step()
    s.driver.retract(rid)
    s.driver.abort(rid)
    assert s.lease("s") is None
    s.run()
    go_on(s, history)


@pytest.mark.parametrize("end", ["abort", "stop", "shortage"])
def test_a_row_whose_tokens_were_never_sent_to_the_device_is_not_kept(end: str) -> None:
    """A retracted turn gets a row again, but no step runs before it ends: on the device the row's
    tokens are those of the request that had it before, though its pages hold the history."""
    s = talk(page_size=4)
    for number in range(3):
        s.say("s", [number, 1, 2, 3], 3)
    history = s.of["s"].tokens
    rid = s.begin("s", [1, 2, 3], 20)
    while not s.driver.tokens[rid]:
        s.driver.step()
    rank = s.driver.scheduler.ranks[0]
    s.driver.retract(rid)
    rank.memory.row_pool._free.reverse()  # another row than before
    with no_more_pages(rank.memory):
        while s.driver.scheduler.num_waiting or s.driver.in_flight:
            s.driver.step()
        request = s.driver.scheduler._requests[rid]
        assert request.lease is not None
        assert request.lease.kv_committed_len > len(history) // 4 * 4 - 4
        if end == "shortage":
            s.driver.step()
            assert "needs more KV memory" in (s.driver.finish[rid].message or "")
    if end == "abort":
        s.driver.abort(rid)
    elif end == "stop":
        s.driver.scheduler.handle(StopRequest(rid=rid, num_output_tokens=1))
        s.stopped(rid, 1)
    assert s.lease("s") is None
    go_on(s, s.of["s"].tokens if end == "stop" else history)


@pytest.mark.parametrize(
    ("num_turns", "num_steps", "page_size", "overlap", "radix", "num_drafts"),
    long_half([0, 1, 3], [1, 2, 4, 6], PAGE_SIZES, [False, True], [False, True], [0, 3]),
)
def test_a_retracted_turn_goes_on_and_succeeds(
    num_turns: int, num_steps: int, page_size: int, overlap: bool, radix: bool, num_drafts: int
) -> None:
    s = talk(
        page_size=page_size, overlap=overlap, disable_radix_cache=not radix, num_drafts=num_drafts
    )
    for number in range(num_turns):
        s.say("s", [number, 1, 2], 3)
    history = s.of["s"].tokens
    rid = s.begin("s", NEW, 6)
    for _ in range(num_steps):
        s.driver.step()
    if rid not in s.driver.finish:
        s.driver.retract(rid)
    s.run()
    assert s.driver.finish[rid].type == "length"
    go_on(s, [*history, *NEW, *s.driver.tokens[rid]])


def test_a_failed_step_takes_the_memory_of_all_sessions_but_not_what_was_said() -> None:
    s = talk()
    s.open("idle")
    s.say("idle", [1, 2, 3])
    s.say("s", [1, 2, 3])
    history, of_idle = s.of["s"].tokens, s.of["idle"].tokens
    rid = s.begin("s", NEW, 20)
    s.driver.step()
    s.driver.executor = FaultyExecutor(s.driver.oracle, failing_launches={0})
    s.driver.step()
    assert s.driver.finish[rid].status_code == 500
    assert all(view.cached_pages == 0 for view in s.driver.scheduler.memory_views())
    assert all(view.session_rows == 0 for view in s.driver.scheduler.memory_views())
    s.driver.executor = s.driver.oracle
    rid = s.say("idle", [4])
    assert s.driver.cached[rid] == 0
    assert s.driver.prompt_tokens[rid] == len(of_idle) + 1
    go_on(s, history)


def test_a_memory_that_is_rebuilt_leaves_what_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by a turn whose end was stated when the memory's records were found wrong."""
    s = talk()
    s.open("runs")
    s.say("s", [1, 2, 3])
    s.say("runs", [7])
    s.begin("runs", NEW, 30)
    rid = s.begin("s", [4, 5], 2)
    finish = RankScheduler.finish

    def finish_in_vain(self: RankScheduler, row: int, **kwargs: object) -> None:
        finish(self, row, **kwargs)  # type: ignore[arg-type]
        raise LedgerError("the records are wrong")

    with monkeypatch.context() as patch:
        patch.setattr(RankScheduler, "finish", finish_in_vain)
        with pytest.raises(LedgerError):
            s.run()
    s.driver.in_flight.clear()
    s.driver.scheduler.handle(Rebuild("the records were wrong"))
    s.driver.collect()
    assert s.driver.finish[rid].type == "length"
    s.settle()
    assert len(s.of["s"].turn_ends) == 2
    go_on(s, s.of["s"].tokens)


@pytest.mark.parametrize("num_steps", [0, 1, 3])
@pytest.mark.parametrize("is_retracted", [False, True])
def test_a_turn_that_ends_before_its_first_token_reports_its_whole_prompt_like_others(
    num_steps: int, is_retracted: bool
) -> None:
    s = talk()
    s.say("s", [1, 2, 3])
    history = s.of["s"].tokens
    rid = s.begin("s", NEW, 20)
    for _ in range(num_steps):
        s.driver.step()
    if is_retracted and num_steps:
        s.driver.retract(rid)
    s.driver.abort(rid)
    assert s.driver.tokens[rid] == []
    assert s.driver.prompt_tokens[rid] == len(history) + len(NEW)
    go_on(s, history)


# -- lengths -----------------------------------------------------------------------------------


def test_a_default_length_gives_way_to_the_history() -> None:
    """As for a plain request, whose prompt the frontend can count."""
    s = talk()
    limit = s.driver.scheduler.sizes.max_request_tokens
    assert limit == 256
    s.say("s", [1] * 240, 4)
    before = s.driver.scheduler.memory_views()
    rid = s.begin("s", [2] * 4, 128)
    assert s.driver.finish[rid].status_code == 400
    rid = s.begin("s", [2] * 4, 128, is_length_default=True, min_new_tokens=9)
    assert "248 prompt tokens and 9 to generate" in (s.driver.finish[rid].message or "")
    assert s.driver.scheduler.memory_views() == before
    rid = s.say("s", [2] * 4, 128, is_length_default=True, min_new_tokens=8)
    assert (s.driver.finish[rid].type, len(s.driver.tokens[rid])) == ("length", 8)
    rid = s.begin("s", [3], 128, is_length_default=True)
    assert s.driver.finish[rid].status_code == 400  # there is no room for even one
    s.roll_back("s", 1)
    rid = s.say("s", [3], 3, is_length_default=True)
    assert len(s.driver.tokens[rid]) == 3
    s.close_all()


# -- refusals ----------------------------------------------------------------------------------


def ask(s: Conversations, words: str, new: list[int], **kwargs: object) -> None:
    """A turn that must be refused, and change nothing."""
    lease, views = s.lease("s"), s.driver.scheduler.memory_views()
    lengths = lease and (lease.kv_committed_len, lease.kv_allocated_len)
    rid = s.begin("s", new, **kwargs)  # type: ignore[arg-type]
    finish = s.driver.finish[rid]
    assert (finish.type, finish.status_code) == ("abort", 400)
    assert words in (finish.message or "")
    assert s.driver.scheduler.memory_views() == views
    assert s.lease("s") is lease
    assert (lease and (lease.kv_committed_len, lease.kv_allocated_len)) == lengths
    s.check()


def test_what_a_streaming_session_does_not_take_is_refused_and_changes_nothing() -> None:
    s = talk(dp_size=2)
    s.say("s", [1, 2, 3])
    history = s.of["s"].tokens
    ask(s, "without replace", [4], turn=SessionTurn(id="s", replace=True))
    ask(s, "without drop_previous", [4], turn=SessionTurn(id="s", drop_previous_output=True))
    ask(s, "without offset", [4], turn=SessionTurn(id="s", offset=2))
    ask(s, "not to 'missing'", [4], turn=SessionTurn(id="s", rid="missing"))
    ask(s, "there is no session 'x'", [4], turn=SessionTurn(id="x"))
    ask(s, "exceed the", [4] * 300)
    ask(s, "exceed the", [4], max_new_tokens=250)
    s.say("s", [4], turn=SessionTurn(id="s", rid="s.0"))
    go_on(s, s.of["s"].tokens)
    assert history


def test_a_second_turn_is_refused_while_one_is_in_flight_and_does_not_disturb_it() -> None:
    s = talk()
    s.say("s", [1, 2, 3])
    rid = s.begin("s", [4], 10)
    for _ in range(3):
        refused = generate(f"again{_}", [5], 3, session=SessionTurn(id="s"))
        s.driver.submit(refused)
        assert "in flight" in (s.driver.finish[refused.rid].message or "")
        s.driver.step()
    for message in (
        RollbackSession(rid="q", session_id="s", num_turns=0),
        ForkSession(rid="q", session_id="s", new_session_id="t"),
    ):
        reply = s.driver.session(message)
        assert not reply.ok
        assert "in flight" in reply.message
    s.run()
    assert s.driver.finish[rid].type == "length"
    go_on(s, s.of["s"].tokens)


def test_a_history_holds_no_more_than_its_capacity() -> None:
    s = talk()
    s.open("small", capacity_of_str_len=10)
    s.say("small", [1] * 5, 3)
    rid = s.begin("small", [2, 2, 2])
    assert "exceed the 10 tokens that the session can hold" in (s.driver.finish[rid].message or "")
    rid = s.begin("small", [2], 2)
    assert "exceed the 10 tokens that the session can hold" in (s.driver.finish[rid].message or "")
    assert s.driver.finish[rid].status_code == 400
    s.say("small", [2], 1)
    s.check()
    rid = s.begin("small", [3], 1)
    assert s.driver.finish[rid].status_code == 400
    s.roll_back("small", 1)
    s.say("small", [3], 1)
    s.close_all()


def test_a_default_length_gives_way_to_the_capacity() -> None:
    s = talk()
    s.open("small", capacity_of_str_len=10)
    rid = s.say("small", [1] * 4, 128, is_length_default=True)
    assert len(s.driver.tokens[rid]) == 6
    rid = s.begin("small", [], 128, is_length_default=True)
    assert s.driver.finish[rid].status_code == 400
    assert s.listed()["small"]["num_tokens"] == 10
    s.close_all()


def test_sessions_are_limited_and_their_ids_are_their_own() -> None:
    s = talk(max_sessions=2)
    for session_id, words in (("s", "exists already"), ("", "not empty")):
        reply = s.driver.session(OpenSession(rid="q", session_id=session_id, streaming=True))
        assert not reply.ok
        assert words in reply.message
    s.open("second")
    reply = s.driver.session(OpenSession(rid="q", session_id="third"))
    assert (reply.rid, reply.ok) == ("q", False)
    assert "2 sessions are open" in reply.message
    assert reply.data["status_code"] == 503
    reply = s.driver.session(ForkSession(rid="q", session_id="s", new_session_id="third"))
    assert not reply.ok
    s.close("second")
    s.open("third")
    s.check()
    reply = s.driver.session(CloseSession(rid="q", session_id="second"))
    assert not reply.ok
    reply = s.driver.session(RollbackSession(rid="q", session_id="s", num_turns=1))
    assert "it cannot go back to 1" in reply.message
    s.close_all()


def test_a_turn_that_no_closing_makes_room_for_is_a_fault_of_the_client() -> None:
    s = talk(max_session_tokens=30)
    s.say("s", [1] * 10, 2)
    for number, turn in enumerate((SessionTurn(id="s"), SessionTurn(id="s", is_whole=True))):
        new = [3] * (31 if turn.is_whole else 19)
        s.driver.submit(generate(f"{number}", new, 1, session=turn))
        finish = s.driver.finish[f"{number}"]
        assert finish.status_code == 400
        assert "30 tokens that all sessions may hold" in (finish.message or "")
    s.close_all()


def test_all_sessions_together_hold_no_more_tokens_than_they_may() -> None:
    """More is refused with a 503, and changes nothing, until some are closed or go back."""
    s = talk(max_session_tokens=30)
    s.open("t")
    s.driver.session(OpenSession(rid="q", session_id="tree"))
    store = s.driver.scheduler._sessions.store
    s.say("s", [1] * 10, 2)
    s.say("t", [2] * 10, 2)
    assert store.num_kept == 24
    too_much = (
        SessionTurn(id="s"),
        SessionTurn(id="tree"),
        SessionTurn(id="s", is_whole=True),
    )
    for number, turn in enumerate(too_much):
        new = [3] * (19 if turn.is_whole else 7)
        s.driver.submit(generate(f"{number}", new, 1, session=turn))
        finish = s.driver.finish[f"{number}"]
        assert (finish.type, finish.status_code) == ("abort", 503)
        assert finish.code == "too_many_sessions"
        assert "hold 24 tokens of history, and 7 more would exceed the 30" in (finish.message or "")
        assert "--max-session-tokens" in (finish.message or "")
    reply = s.driver.session(ForkSession(rid="q", session_id="s", new_session_id="fork"))
    assert (reply.ok, reply.data) == (
        False,
        {"status_code": 503, "code": "too_many_sessions"},
    )
    assert "12 more would exceed" in reply.message
    assert store.num_kept == 24
    s.check()
    rid = s.begin("s", [3] * 6, 4)  # what is in flight counts, too
    s.driver.submit(generate("other", [4], 1, session=SessionTurn(id="tree")))
    assert s.driver.finish["other"].status_code == 503
    s.driver.abort(rid)
    s.settle()
    assert store.num_kept == 24
    s.roll_back("s", 0)
    s.fork("t", "fork")
    s.close("t")
    assert store.num_kept == 12
    s.say("s", [3] * 18, 1)
    s.check()
    s.driver.session(CloseSession(rid="q", session_id="tree"))
    s.close_all()
    assert store.num_kept == 0


# -- all other ends ---------------------------------------------------------------------------


def out_of_the_queue(s: Conversations, rid: str) -> None:
    s.driver.abort(rid)


def waited_too_long(s: Conversations, rid: str) -> None:
    s.driver.tick(7.0)


def took_too_long(s: Conversations, rid: str) -> None:
    s.driver.tick(60.0)


def out_of_memory(s: Conversations, rid: str) -> None:
    s.driver.abort("plain")
    with no_more_pages(s.driver.scheduler.ranks[0].memory):
        while rid not in s.driver.finish:
            s.driver.step()


def device_failed(s: Conversations, rid: str) -> None:
    s.driver.fail_all("the device failed")


def shut_down(s: Conversations, rid: str) -> None:
    s.driver.scheduler.handle(AbortRequest(abort_all=True))
    s.driver.collect()


EXITS: list[tuple[Callable[[Conversations, str], None], int | None, bool]] = [
    (out_of_the_queue, None, False),
    (waited_too_long, 503, False),
    (took_too_long, 504, True),
    (out_of_memory, 500, True),
    (device_failed, 500, True),
    (shut_down, None, False),
]


@pytest.mark.parametrize(
    ("end", "status", "is_started"), EXITS, ids=lambda e: getattr(e, "__name__", "")
)
@pytest.mark.parametrize("num_turns", [0, 2])
def test_every_end_of_a_turn_before_its_time_frees_its_session_for_the_next(
    end: Callable[[Conversations, str], None], status: int | None, is_started: bool, num_turns: int
) -> None:
    s = talk(num_rows=2, waiting_timeout=6.0, request_timeout=50.0)
    s.driver.tick(0.5)
    for number in range(num_turns):
        s.say("s", [number, 1, 2], 3)
    history = s.of["s"].tokens
    if not is_started:
        s.driver.submit(generate("plain", [9] * 9, 100))
        s.driver.step()
    rid = s.begin("s", [3], 100)
    for _ in range(3):
        s.driver.step()
    end(s, rid)
    assert s.driver.finish[rid].type == "abort"
    assert s.driver.finish[rid].status_code == status
    if not is_started:
        s.driver.abort("plain")
    s.run()
    go_on(s, history)


def test_a_turn_that_the_full_queue_refuses_leaves_its_session_free() -> None:
    s = talk(num_rows=2, max_queued_requests=1)
    s.say("s", [1, 2, 3])
    history = s.of["s"].tokens
    s.driver.submit(generate("runs", [9] * 9, 20))
    s.driver.step()
    s.driver.submit(generate("waits", [9] * 9, 2))
    rid = s.begin("s", [3])
    assert s.driver.finish[rid].status_code == 503
    s.run()
    go_on(s, history)
