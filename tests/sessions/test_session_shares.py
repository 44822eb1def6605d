"""Sessions of several tenants: which of them close for another's, and what that frees."""

from typing import Any

import pytest

from sgl_jax.core.messages import CloseSession, ForkSession, OpenSession, SessionTurn
from sgl_jax.core.scheduler_args import SchedulerArgs
from sgl_jax.core.shares import Tenant
from sgl_jax.scheduler.events import RestoreCache
from tests.scheduler.driver import Driver, generate, make_sizes
from tests.sessions.conversations import Conversations

ANN, BOB = Tenant(name="ann"), Tenant(name="bob")
ARGS = SchedulerArgs(
    fair_share="tokens", max_sessions=8, max_session_tokens=100, session_memory_fraction=1.0
)


def talk(**sizes: Any) -> Conversations:
    return Conversations(Driver(make_sizes(**{"num_pages": 64, **sizes}), ARGS))


def opened(s: Conversations, session_id: str, tenant: Tenant, **fields: Any) -> int:
    """The status with which a session is opened; 0: it is."""
    message = OpenSession(rid="", session_id=session_id, streaming=True, tenant=tenant, **fields)
    reply = s.driver.session(message)
    return 0 if reply.ok else int(reply.data["status_code"])


def test_what_a_displaced_session_held_is_free() -> None:
    s = talk()
    for number in range(6):
        s.open(f"a{number}", tenant=ANN)
        s.say(f"a{number}", [number] * 9, 3)
    view = s.driver.scheduler.memory_views()[0]
    assert view.session_rows == 6
    s.open("b0", tenant=BOB)
    s.open("b1", tenant=BOB)
    s.of.pop("a0")
    s.check()
    view = s.driver.scheduler.memory_views()[0]
    assert view.session_rows == 5
    assert s.driver.scheduler.counters()["sessions_displaced"] == 1
    assert s.driver.scheduler._sessions.store.num_kept == 5 * 12
    s.driver.scheduler.audit()
    s.close_all()


def test_the_session_used_longest_ago_goes_first_and_one_in_use_never() -> None:
    s = talk()
    for number in range(6):
        assert opened(s, f"a{number}", ANN, timeout_s=9.0 if number == 3 else None) == 0
    for rid in ("0", "4"):
        s.driver.submit(generate(rid, [1], 2, session=SessionTurn(id=f"a{rid}")))
        s.driver.run()
    s.driver.submit(generate("2", [1], 2, session=SessionTurn(id="a2")))
    gone = []
    for number in range(4):
        before = set(s.listed())
        assert opened(s, f"b{number}", BOB) == (429 if number == 3 else 0)
        gone += sorted(before - set(s.listed()))
    assert gone == ["a1", "a5"]
    s.driver.run()


def test_a_session_with_a_turn_in_flight_is_not_displaced() -> None:
    s = talk()
    for number in range(6):
        assert opened(s, f"a{number}", ANN) == 0
        s.driver.submit(generate(f"{number}", [1], 2, session=SessionTurn(id=f"a{number}")))
    assert opened(s, "b0", BOB) == 0
    assert opened(s, "b1", BOB) == 429
    assert len(s.listed()) == 7
    s.driver.run()
    assert opened(s, "b1", BOB) == 0
    assert "a0" not in s.listed()


def test_a_turn_displaces_only_once_it_is_accepted() -> None:
    s = talk()
    for number in range(3):
        assert opened(s, f"a{number}", ANN) == 0
        s.driver.submit(generate(f"{number}", [1] * 24, 1, session=SessionTurn(id=f"a{number}")))
        s.driver.run()
    assert opened(s, "b", BOB) == 0
    too_long = generate("long", [2] * 20, 255, session=SessionTurn(id="b"))
    s.driver.submit(too_long)
    assert s.driver.finish["long"].status_code == 400
    assert {"a0", "a1", "a2", "b"} == set(s.listed())
    s.driver.submit(generate("short", [2] * 20, 1, session=SessionTurn(id="b")))
    s.driver.run()
    assert s.driver.finish["short"].type == "length"
    assert {"a1", "a2", "b"} == set(s.listed())


def test_a_fork_counts_for_who_forks_and_never_displaces_its_source() -> None:
    s = talk()
    for number in range(6):
        assert opened(s, f"a{number}", ANN) == 0
    s.driver.submit(generate("0", [1] * 10, 2, session=SessionTurn(id="a0")))
    s.driver.run()
    for number in range(1, 6):
        s.driver.submit(generate(f"{number}", [2], 1, session=SessionTurn(id=f"a{number}")))
        s.driver.run()
    assert opened(s, "b", BOB) == 0
    fork = ForkSession(rid="", session_id="a0", new_session_id="fork", tenant=BOB)
    reply = s.driver.session(fork)
    assert (reply.ok, reply.data["num_tokens"]) == (True, 12)
    # The next one after the source, which was used longest ago.
    assert set(s.listed()) == {"a0", "a2", "a3", "a4", "a5", "b", "fork"}
    turn = generate("t", [3], 2, session=SessionTurn(id="fork"))
    s.driver.submit(turn, [*s.driver.prompts["0"], *s.driver.tokens["0"]])
    s.driver.run()
    s.driver.check_tokens("t")


def test_a_fork_never_displaces_its_source_for_the_room_of_its_tokens() -> None:
    s = talk()
    for number, length in enumerate((23, 14, 14, 14)):
        assert opened(s, f"a{number}", ANN) == 0
        turn = generate(f"{number}", [1] * length, 1, session=SessionTurn(id=f"a{number}"))
        s.driver.submit(turn)
        s.driver.run()
    assert s.driver.scheduler._sessions.store.num_kept == 24 + 3 * 15
    fork = ForkSession(rid="", session_id="a0", new_session_id="fork", tenant=BOB)
    assert s.driver.session(fork).ok
    assert set(s.listed()) == {"a0", "a3", "fork"}
    s.driver.scheduler.audit()


@pytest.mark.parametrize("tenant", [ANN, BOB])
def test_restored_sessions_count_for_their_tenants(tenant: Tenant) -> None:
    first, second = talk(), talk()
    for number in range(6):
        assert opened(first, f"a{number}", ANN, timeout_s=9.0) == 0
    saved = first.driver.scheduler.saved_sessions()
    assert second.driver.scheduler.handle(RestoreCache(saved, [])) == 0
    assert opened(second, "one", tenant) == (429 if tenant == ANN else 0)
    reply = second.driver.session(CloseSession(rid="", session_id="a0"))
    assert reply.ok
    assert opened(second, "two", tenant) == 0
