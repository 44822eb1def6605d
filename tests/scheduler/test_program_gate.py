"""Requests with a grammar wait for it and for the programs of their steps; all others run on."""

import pytest

from sgl_jax.core.engine_messages import FinishReason
from sgl_jax.core.messages import OpenSession, SessionTurn, StopRequest
from sgl_jax.core.scheduler_args import SchedulerArgs
from sgl_jax.core.shares import Tenant
from sgl_jax.scheduler.events import (
    AwaitPrograms,
    Configure,
    GrammarReady,
    ProgramsReady,
    Rebuild,
    Resume,
)
from tests.scheduler.driver import Driver, generate, make_sizes


def submit(driver: Driver, rid: str, **kwargs: object) -> None:
    """A request with a grammar, which is compiled."""
    driver.submit(generate(rid, [3, 4, 5], 4, regex="a+", **kwargs))
    driver.scheduler.handle(GrammarReady(rid))


@pytest.fixture
def driver() -> Driver:
    """One request runs, two with a grammar wait for programs."""
    driver = Driver(make_sizes(dp_size=2, num_rows=3, num_pages=40), SchedulerArgs())
    driver.tick(0.0)
    driver.scheduler.handle(AwaitPrograms())
    driver.submit(generate("plain", [1, 2, 3], 12))
    submit(driver, "x")
    submit(driver, "y", dp_rank=1)
    for _ in range(5):
        driver.step()
    return driver


def open_gate(driver: Driver, error: str = "") -> None:
    driver.scheduler.handle(ProgramsReady(error))
    driver.collect()


def test_they_start_when_the_programs_are_there(driver: Driver) -> None:
    assert len(driver.tokens["plain"]) > 2
    assert driver.scheduler.why_waiting("x").kind == "program"
    assert driver.scheduler.count_waiting()["program"] == driver.scheduler.num_waiting == 2
    assert [driver.scheduler.num_waiting_for(rank) for rank in range(2)] == [0, 1]
    assert not any(plan.is_masked for plan in driver.plans)
    open_gate(driver)
    assert driver.scheduler.count_waiting()["program"] == 0
    submit(driver, "late")
    driver.run()
    for rid in ("plain", "x", "y", "late"):
        driver.check_tokens(rid)
        assert driver.finish[rid].type == "length"
    driver.check_replay()


def test_alone_they_leave_the_engine_at_rest(driver: Driver) -> None:
    while driver.step():
        assert driver.scheduler.num_running
    assert driver.scheduler.is_resting
    assert not driver.scheduler.is_idle
    open_gate(driver)
    assert not driver.scheduler.is_resting
    driver.run()
    driver.check_replay()


def test_without_programs_they_end_with_the_reason_and_others_run(driver: Driver) -> None:
    open_gate(driver, "no programs")
    submit(driver, "late")
    for rid in ("x", "y", "late"):
        assert (driver.finish[rid].status_code, driver.finish[rid].message) == (500, "no programs")
    driver.run()
    assert driver.finish["plain"].type == "length"
    driver.check_replay()


def abort(driver: Driver) -> None:
    driver.abort("x")
    driver.abort("y")


def stop(driver: Driver) -> None:
    for rid in ("x", "y"):
        driver.scheduler.handle(StopRequest(rid=rid, num_output_tokens=0))


def pause(driver: Driver) -> None:
    driver.pause("abort")
    driver.scheduler.handle(Resume())


def time_out(driver: Driver) -> None:
    driver.scheduler.handle(Configure(SchedulerArgs(waiting_timeout=1.0), chunk_tokens=8))
    driver.tick(5.0)


def fail(driver: Driver) -> None:
    driver.fail_all("a step failed")


def rebuild(driver: Driver) -> None:
    driver.in_flight.clear()
    driver.scheduler.handle(Rebuild("wrong records"))
    driver.collect()


@pytest.mark.parametrize("end", [abort, stop, pause, time_out, fail, rebuild])
def test_they_end_as_any_request_while_they_wait(driver: Driver, end) -> None:
    end(driver)
    assert driver.scheduler.num_waiting == 0
    assert not {"x", "y"} & set(driver.scheduler._requests)
    open_gate(driver)
    submit(driver, "late")
    driver.run()
    driver.check_tokens("late")
    driver.check_replay()


def test_they_count_among_the_waiting_requests_of_their_tenant(driver: Driver) -> None:
    tenant = Tenant(name="limited", max_queued=1)
    submit(driver, "first", tenant=tenant)
    submit(driver, "second", tenant=tenant)
    assert driver.scheduler.tenants()["limited"].num_queued == 1
    driver.collect()
    assert driver.finish["second"].status_code == 429
    open_gate(driver)
    driver.run()
    driver.check_tokens("first")


def test_a_pause_holds_them_as_all_others(driver: Driver) -> None:
    driver.pause("in_place")
    assert driver.scheduler.why_waiting("x").kind == "paused"
    assert driver.scheduler.count_waiting() == {"paused": 2}
    open_gate(driver)
    driver.step()
    assert driver.scheduler.num_waiting == 2
    driver.scheduler.handle(Resume())
    driver.run()
    driver.check_replay()


def test_a_turn_of_a_session_waits_with_its_history(driver: Driver) -> None:
    driver.session(OpenSession(rid="q", session_id="s", streaming=True))
    driver.submit(generate("first", [7, 8, 9], 3, session=SessionTurn(id="s")))
    while "first" not in driver.finish:
        driver.step()
    history = driver.prompts["first"] + driver.tokens["first"]
    turn = generate("second", [6], 3, regex="a+", session=SessionTurn(id="s"))
    driver.submit(turn, history)
    driver.scheduler.handle(GrammarReady("second"))
    while driver.step():
        pass
    assert "second" not in driver.finish
    open_gate(driver)
    driver.run()
    driver.check_tokens("second")
    assert driver.cached["second"] > 0


@pytest.fixture
def open_driver() -> Driver:
    """All programs are there; one request runs, two wait for their grammars."""
    driver = Driver(make_sizes(dp_size=2, num_rows=3, num_pages=40), SchedulerArgs())
    driver.submit(generate("plain", [1, 2, 3], 12))
    for rid in ("x", "y"):
        driver.submit(generate(rid, [3, 4, 5], 4, regex="a+"))
    for _ in range(5):
        driver.step()
    return driver


def grammar_ready(driver: Driver, rid: str, refusal: FinishReason | None = None) -> None:
    driver.scheduler.handle(GrammarReady(rid, refusal))
    driver.collect()


def test_each_waits_for_its_own_grammar(open_driver: Driver) -> None:
    driver, scheduler = open_driver, open_driver.scheduler
    assert len(driver.tokens["plain"]) > 2
    assert scheduler.why_waiting("x").kind == "grammar"
    assert scheduler.count_waiting()["grammar"] == scheduler.num_waiting == 2
    assert scheduler.awaits_grammar("x") is not None
    grammar_ready(driver, "y")
    assert scheduler.awaits_grammar("y") is None
    assert scheduler.count_waiting()["grammar"] == 1
    while not scheduler.is_resting or driver.in_flight:
        driver.step()
    assert set(driver.finish) == {"plain", "y"}
    grammar_ready(driver, "x")
    driver.run()
    driver.check_tokens("x")
    driver.check_replay()


def test_a_refused_grammar_ends_its_request_alone(open_driver: Driver) -> None:
    driver = open_driver
    refusal = FinishReason("abort", message="regex: no", status_code=400, param="regex")
    grammar_ready(driver, "x", refusal)
    assert driver.finish["x"] == refusal
    grammar_ready(driver, "y")
    driver.run()
    for rid in ("plain", "y"):
        driver.check_tokens(rid)
    driver.check_replay()


def test_a_grammar_that_is_late_changes_nothing(open_driver: Driver) -> None:
    driver = open_driver
    driver.abort("x")
    grammar_ready(driver, "x")
    grammar_ready(driver, "x", FinishReason("abort", message="late", status_code=400))
    grammar_ready(driver, "y")
    grammar_ready(driver, "y", FinishReason("abort", message="late", status_code=400))
    grammar_ready(driver, "plain")
    driver.run()
    assert driver.finish["y"].type == "length"
    driver.check_replay()


def test_programs_and_grammars_may_come_in_any_order(driver: Driver) -> None:
    driver.submit(generate("z", [3, 4, 5], 4, regex="b+"))
    assert driver.scheduler.why_waiting("x").kind == "program"
    assert driver.scheduler.why_waiting("z").kind == "grammar"
    counts = driver.scheduler.count_waiting()
    assert (counts["grammar"], counts["program"]) == (1, 2)
    open_gate(driver)
    assert driver.scheduler.why_waiting("z").kind == "grammar"
    grammar_ready(driver, "z")
    driver.run()
    for rid in ("x", "y", "z"):
        driver.check_tokens(rid)
    driver.check_replay()
