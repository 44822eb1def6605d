"""A turn has ended in the engine, but its client saw less of it: the two go on from what it saw.

Stop strings are found in the frontend, and clients are lost there, while the engine runs ahead.
"""

import pytest

from sgl_jax.core.messages import AbortRequest, SessionTurn, StopRequest
from tests.scheduler.driver import generate
from tests.sessions.conversations import Conversations
from tests.sessions.test_session_endings import go_on
from tests.sessions.test_sessions import talk
from tests.support.long import long_half

EVERY_MEMORY = [(1, True), (4, True), (4, False), (16, True), (256, True)]
WHOLE = SessionTurn(id="s", is_whole=True)


def three_turns(page_size: int = 4, radix: bool = True, **config: object) -> Conversations:
    s = talk(page_size=page_size, disable_radix_cache=not radix, pool_tokens=1024, **config)  # type: ignore[arg-type]
    for number in range(3):
        s.say("s", [number, 1, 2], 5)
    return s


# -- a stop string found late, as the next turn has begun -----------------------------------------


@pytest.mark.parametrize("num_steps", [0, 1, 2, 5])
@pytest.mark.parametrize("num_kept", [1, 3, 4])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("page_size", "radix"), EVERY_MEMORY)
def test_a_stop_that_crosses_the_next_turn_ends_that_and_cuts_the_one_before(
    num_steps: int, num_kept: int, page_size: int, radix: bool, overlap: bool
) -> None:
    """It was sent when for its client the turn before was in flight, and is refused as then."""
    s = three_turns(page_size, radix, overlap=overlap)
    s.begin("s", list(range(10, 22)), 10)
    for _ in range(num_steps):
        s.driver.step()
    s.settle()
    assert s.stop_late("s", num_kept)
    assert len(s.of["s"].tokens) == 16 + 3 + num_kept
    s.run()
    go_on(s, s.of["s"].tokens)


def test_so_does_one_that_crosses_a_turn_which_waits_after_a_retract() -> None:
    s = three_turns()
    rid = s.begin("s", [7, 8], 10)
    while not s.driver.tokens[rid]:
        s.driver.step()
    s.driver.retract(rid)
    assert s.stop_late("s", 2)
    s.run()
    go_on(s, s.of["s"].tokens)


def test_a_stop_at_the_very_end_of_the_turn_before_changes_nothing() -> None:
    s = three_turns()
    rid = s.begin("s", [7, 8], 10)
    s.driver.step()
    assert not s.stop_late("s", 5)
    s.run()
    assert s.driver.finish[rid].type == "length"
    go_on(s, s.of["s"].tokens)


def test_a_session_closed_meanwhile_goes_with_the_turn_that_the_stop_ends() -> None:
    s = three_turns()
    rid = s.begin("s", [7, 8], 10)
    last = s.of["s"].last
    assert last is not None
    s.driver.step()
    s.close("s")
    turn = SessionTurn(id="s")
    s.driver.scheduler.handle(StopRequest(rid=last, num_output_tokens=1, session=turn))
    s.run()
    assert s.driver.finish[rid].status_code == 400
    s.check()
    s.close_all()


def test_a_session_opened_anew_under_the_same_name_is_not_cut() -> None:
    s = three_turns()
    last = s.of["s"].last
    assert last is not None
    s.close("s")
    s.open("s")
    s.say("s", [1, 2], 4)
    turn = SessionTurn(id="s")
    s.driver.scheduler.handle(StopRequest(rid=last, num_output_tokens=1, session=turn))
    s.driver.scheduler.handle(AbortRequest(rid=last, session=turn))
    s.check()
    s.close_all()


# -- a whole conversation in flight, which was built on nothing ------------------------------------


@pytest.mark.parametrize(
    ("amend", "num_steps", "end", "diverges_at", "memory"),
    long_half(
        *(["stop", "abort"], [0, 1, 5], ["length", "abort", "retract", "device"], [0, 9, 14]),
        EVERY_MEMORY,
    ),
)
def test_a_whole_conversation_runs_on_though_the_turn_before_it_is_amended(
    amend: str, num_steps: int, end: str, diverges_at: int, memory: tuple[int, bool]
) -> None:
    page_size, radix = memory
    s = talk(page_size=page_size, disable_radix_cache=not radix, pool_tokens=1024)
    s.say("s", [1, 2, 3], 5)
    s.say("s", [4, 5], 6)
    same = s.of["s"].tokens[:diverges_at]
    rid = s.begin("s", [*same, 41, 42, 43, 44], 6, turn=WHOLE)
    for _ in range(num_steps):
        s.driver.step()
    assert not (s.stop_late("s", 2) if amend == "stop" else s.abort_late("s"))
    if end == "abort":
        s.driver.abort(rid)
    elif end == "device":
        s.driver.fail_all("the device is gone")
    elif end == "retract" and num_steps:
        s.driver.retract(rid)
    s.run()
    assert (s.driver.finish[rid].type == "abort") == (end in ("abort", "device"))
    s.check()
    lease = s.lease("s")
    assert lease is None or lease.kv_committed_len <= len(s.of["s"].tokens)
    go_on(s, s.of["s"].tokens)


def test_the_same_conversation_sent_again_is_answered_and_finds_what_it_had_before() -> None:
    s = talk(page_size=4, pool_tokens=512)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8]
    s.say("s", prompt, 6, turn=WHOLE)
    rid = s.begin("s", prompt, 6, turn=WHOLE)
    s.driver.step()
    s.abort_late("s")
    s.run()
    assert s.driver.finish[rid].type == "length"
    assert s.driver.cached[rid] >= 4
    s.check()
    go_on(s, s.of["s"].tokens)


# -- a client that was gone when its turn ended ----------------------------------------------------


@pytest.mark.parametrize("num_turns", [1, 2, 4])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("page_size", "radix"), EVERY_MEMORY)
def test_a_turn_whose_end_was_not_delivered_is_undone(
    num_turns: int, page_size: int, radix: bool, overlap: bool
) -> None:
    s = talk(page_size=page_size, disable_radix_cache=not radix, pool_tokens=1024, overlap=overlap)
    for number in range(num_turns):
        history = s.of["s"].tokens
        s.say("s", [number, 1, 2], 5)
    assert not s.abort_late("s")
    go_on(s, history)


@pytest.mark.parametrize("num_steps", [0, 1, 5])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("page_size", "radix"), EVERY_MEMORY)
def test_nor_was_what_was_sent_after_it(
    num_steps: int, page_size: int, radix: bool, overlap: bool
) -> None:
    s = three_turns(page_size, radix, overlap=overlap)
    s.begin("s", list(range(10, 22)), 10)
    for _ in range(num_steps):
        s.driver.step()
    s.settle()
    assert s.abort_late("s")
    assert len(s.of["s"].tokens) == 16
    s.run()
    go_on(s, s.of["s"].tokens)


@pytest.mark.parametrize("kept", [0, 3, 8, 12, 16])
@pytest.mark.parametrize(("page_size", "radix"), EVERY_MEMORY)
def test_what_a_whole_turn_had_replaced_is_there_again(
    kept: int, page_size: int, radix: bool
) -> None:
    """Its tokens and its turns; not its KV, whose place the turn has taken."""
    s = talk(page_size=page_size, disable_radix_cache=not radix, pool_tokens=1024)
    s.say("s", [1, 2, 3], 5)
    s.say("s", [4, 5, 6], 5)
    history, ends = s.of["s"].tokens, s.of["s"].turn_ends
    s.say("s", [*history[:kept], *[47] * 9], 4, turn=WHOLE)
    s.abort_late("s")
    assert (s.of["s"].tokens, s.of["s"].turn_ends) == (history, ends)
    lease = s.lease("s")
    assert lease is None or lease.kv_committed_len <= kept
    s.check()
    s.roll_back("s", 1)
    go_on(s, history[:8])


def test_after_a_stop_that_was_late_the_client_may_still_be_gone() -> None:
    s = three_turns()
    s.stop_late("s", 2)
    s.abort_late("s")
    go_on(s, s.of["s"].tokens)


def test_a_turn_that_others_have_followed_stays_though_its_end_was_not_delivered() -> None:
    s = three_turns()
    history = s.of["s"].tokens
    for rid in ("s.0", "s.1"):
        s.driver.scheduler.handle(AbortRequest(rid=rid, session=SessionTurn(id="s")))
    s.check()
    s.roll_back("s", 2)  # the second is the last again, but what came before it is forgotten
    s.driver.scheduler.handle(AbortRequest(rid="s.1", session=SessionTurn(id="s")))
    go_on(s, history[:16])


def test_an_abort_without_a_session_leaves_a_turn_that_has_ended() -> None:
    """Who asks for it by name is still there, and sees the end."""
    s = three_turns()
    s.driver.abort("s.2")
    go_on(s, s.of["s"].tokens)


@pytest.mark.parametrize("has_room", [True, False])
def test_an_evicted_session_is_amended_all_the_same(has_room: bool) -> None:
    s = three_turns()
    s.driver.scheduler.ranks[0].idle_sessions.evict_oldest()
    if has_room:
        s.driver.submit(generate("plain", [9] * 5, 4))
        s.run()
    s.stop_late("s", 1)
    s.check()
    s.abort_late("s")
    go_on(s, s.of["s"].tokens)
