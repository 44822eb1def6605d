"""Sessions come to their end: closed by their client, at rest or in flight, or by the clock."""

import gc
import weakref

import pytest

from sgl_jax.core.messages import OpenSession, SessionTurn
from tests.scheduler.driver import generate
from tests.sessions.test_session_endings import NEW
from tests.sessions.test_sessions import talk

# -- closing -----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_turns", [0, 2])
@pytest.mark.parametrize("num_steps", [0, 1, 3, 6])
@pytest.mark.parametrize("end", ["length", "abort", "retract"])
@pytest.mark.parametrize("radix", [False, True])
def test_a_session_closed_with_a_turn_in_flight_goes_when_that_has_ended(
    num_turns: int, num_steps: int, end: str, radix: bool
) -> None:
    s = talk(disable_radix_cache=not radix)
    for number in range(num_turns):
        s.say("s", [number, 1, 2], 3)
    rid = s.begin("s", NEW, 8)
    for _ in range(num_steps):
        s.driver.step()
    if end == "retract" and num_steps:
        s.driver.retract(rid)
    s.close("s")
    s.check()
    assert s.driver.session(OpenSession(rid="q", session_id="s")).ok is False
    s.driver.submit(generate("late", [1], 2, session=SessionTurn(id="s")))
    assert s.driver.finish["late"].status_code == 400
    if end == "abort":
        s.driver.abort(rid)
    s.run()
    assert s.driver.finish[rid].type == ("abort" if end == "abort" else "length")
    s.check()
    assert s.lease("s") is None
    s.open("s")
    s.say("s", [1])
    s.close_all()


def test_closing_an_idle_session_frees_all_but_what_the_tree_keeps() -> None:
    s = talk(page_size=4, disable_radix_cache=True)
    s.say("s", list(range(10)), 4)
    (view,) = s.driver.scheduler.memory_views()
    assert (view.session_rows, view.session_held_pages) == (1, 4)
    s.close("s")
    (view,) = s.driver.scheduler.memory_views()
    assert (view.session_rows, view.session_held_pages) == (0, 0)
    assert view.free_pages == view.total_pages - 1


# -- time --------------------------------------------------------------------------------------


def test_a_session_is_closed_when_it_was_idle_for_too_long() -> None:
    """Ticks may pause while they are not needed: time counts from the first one after a use."""
    s = talk()
    s.driver.tick(0.0)
    assert not s.driver.scheduler.needs_tick(1e6)
    s.open("short", timeout_s=5.0)
    assert s.driver.scheduler.needs_tick(0.0)
    s.driver.tick(1e6)
    s.driver.tick(1e6 + 5)
    s.say("short", [1, 2, 3])
    s.driver.tick(1e6 + 8)
    s.driver.tick(1e6 + 13)
    s.check()
    assert s.listed()["short"]["idle_s"] == 5.0
    rid = s.begin("short", [4], 3)
    s.driver.step()
    s.driver.tick(1e6 + 100)
    s.run()
    assert s.driver.finish[rid].type == "length"
    s.driver.tick(1e6 + 101)
    s.check()
    s.driver.tick(1e6 + 106.5)
    assert set(s.listed()) == {"s"}
    assert s.lease("short") is None
    assert not s.driver.scheduler.needs_tick(1e9)
    del s.of["short"]
    s.close_all()


def test_at_rest_a_tick_is_needed_only_when_a_sessions_time_may_be_over() -> None:
    """Each is recorded: an idle server's recording must not grow for ever."""
    s = talk()
    scheduler = s.driver.scheduler
    s.open("short", timeout_s=5.0)
    s.driver.tick(100.0)
    assert not any(scheduler.needs_tick(now_s) for now_s in (100.2, 103.0, 105.0))
    s.say("short", [1])
    assert scheduler.needs_tick(104.0)  # it was used, at an unknown time
    s.driver.tick(104.0)
    assert not scheduler.needs_tick(105.0)
    assert scheduler.needs_tick(105.5)  # when it would have ended, had it not been used
    s.driver.tick(105.5)
    assert set(s.listed()) == {"s", "short"}
    assert not scheduler.needs_tick(109.0)
    assert scheduler.needs_tick(109.5)
    s.driver.tick(109.5)
    assert set(s.listed()) == {"s"}
    assert not scheduler.needs_tick(1e9)


def test_a_tick_looks_only_at_sessions_whose_time_may_be_over() -> None:
    s = talk()
    store = s.driver.scheduler._sessions.store
    looked: list[str] = []

    class Watched(dict[str, float]):
        def __getitem__(self, session_id: str) -> float:
            looked.append(session_id)
            return super().__getitem__(session_id)

    for i in range(20):
        s.open(f"{i}", timeout_s=10.0 + i)
    store._used_at = Watched()
    s.driver.tick(100.0)
    assert len(looked) == 20
    looked.clear()
    for now in range(101, 110):
        s.driver.tick(now)
    assert looked == []
    s.say("0", [1])
    s.driver.tick(110.0)
    assert looked == []  # not yet over, even if it had not been used
    s.driver.tick(112.0)
    assert sorted(looked) == ["0", "1"]
    assert set(s.listed()) == {"s", "0", *(f"{i}" for i in range(2, 20))}
    s.driver.tick(120.0)
    s.driver.tick(120.5)
    assert "0" not in s.listed()


def test_a_session_of_the_same_name_has_a_time_of_its_own() -> None:
    s = talk()
    s.open("short", timeout_s=5.0)
    s.driver.tick(100.0)
    s.close("short")
    s.open("short", timeout_s=50.0)
    s.driver.tick(103.0)
    s.driver.tick(140.0)
    s.check()
    s.driver.tick(153.5)
    assert set(s.listed()) == {"s"}
    assert not s.driver.scheduler.needs_tick(1e9)


def test_it_is_known_how_long_a_session_idles_though_none_times_out() -> None:
    s = talk()
    s.say("s", [1, 2, 3])
    assert s.driver.scheduler.needs_tick(0.0)
    s.driver.tick(100.0)
    assert not s.driver.scheduler.needs_tick(1e9)
    s.driver.tick(3700.0)
    assert s.listed()["s"]["idle_s"] == 3600.0


@pytest.mark.parametrize("is_ticked", [False, True])
def test_nothing_of_a_closed_session_is_kept_until_its_time_would_have_come(
    is_ticked: bool,
) -> None:
    s = talk(pool_tokens=1024)
    store = s.driver.scheduler._sessions.store
    closed = []
    for number in range(200):
        s.open(f"t{number}", timeout_s=1e9)
        if is_ticked:
            s.driver.tick(float(number))
        closed.append(weakref.ref(store.get(f"t{number}")))
        s.close(f"t{number}")
    gc.collect()
    assert not any(ref() for ref in closed)
    assert len(store._checks) < 80


def test_time_does_not_run_back() -> None:
    s = talk()
    s.open("short", timeout_s=5.0)
    s.driver.tick(100.0)
    s.driver.tick(50.0)
    s.say("short", [1])
    s.driver.tick(60.0)
    s.driver.tick(104.0)
    s.check()
    assert s.listed()["short"]["idle_s"] == 4.0
