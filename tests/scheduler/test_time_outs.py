"""Requests that take too long end, by the ticks alone, with a reason that says which limit."""

from typing import Any

import pytest

from sgl_jax.core.scheduler_args import SchedulerArgs
from sgl_jax.scheduler.deadlines import Deadlines
from tests.scheduler.driver import Driver, generate, make_sizes

MOST = 100  # expiries at a time


def make_driver(waiting_s: float, request_s: float, **sizes: Any) -> Driver:
    config = SchedulerArgs(waiting_timeout=waiting_s, request_timeout=request_s)
    driver = Driver(make_sizes(**{"num_pages": 60, "num_rows": 2, **sizes}), config)
    driver.tick(1000.0)
    return driver


def test_a_request_that_waits_too_long_to_start_ends_with_503() -> None:
    driver = make_driver(5.0, 0.0)
    driver.submit(generate("runs", [1], 100))
    driver.step()
    driver.tick(1001.0)
    driver.submit(generate("waits", [2], 5))
    driver.tick(1006.0)  # exactly 5 s are not longer than 5 s
    assert "waits" not in driver.finish
    driver.tick(1006.5)
    assert driver.finish["waits"].status_code == 503
    assert "waited longer than 5 s to start" in driver.finish["waits"].message
    driver.run()
    assert driver.finish["runs"].type == "length"
    assert driver.scheduler.counters()["requests_timed_out"] == 1


def test_a_retract_neither_restarts_the_wait_nor_counts_as_one() -> None:
    driver = make_driver(5.0, 0.0)
    driver.submit(generate("a", [1, 2, 3], 30))
    for _ in range(5):
        driver.step()
    driver.tick(1004.0)
    driver.retract("a")
    driver.tick(1060.0)
    assert "a" not in driver.finish
    driver.run()
    driver.check_tokens("a")
    assert driver.finish["a"].type == "length"


@pytest.mark.parametrize("state", ["waiting", "running", "retracted"])
def test_a_request_too_old_ends_wherever_it_is_and_keeps_its_output(state: str) -> None:
    driver = make_driver(0.0, 10.0)
    if state == "waiting":
        driver.submit(generate("other", [9], 100))
        driver.step()
    driver.submit(generate("a", [1, 2, 3], 100))
    for _ in range(8):
        driver.step()
    if state == "retracted":
        driver.retract("a")
    got = list(driver.tokens["a"])
    driver.tick(1011.0)
    assert driver.finish["a"].status_code == 504
    assert driver.finish["a"].type == "abort"
    assert "did not finish within 10 s" in driver.finish["a"].message
    assert driver.tokens["a"] == got
    assert bool(got) == (state != "waiting")
    driver.check_tokens("a")
    driver.run()


def test_its_pages_are_kept_for_the_next_try() -> None:
    driver = make_driver(0.0, 10.0)
    driver.submit(generate("a", list(range(20)), 100))
    for _ in range(6):
        driver.step()
    driver.tick(1011.0)
    driver.submit(generate("b", list(range(20)), 2))
    driver.run()
    assert driver.cached["b"] == 16
    driver.check_tokens("b")


def test_the_first_tick_sets_the_clock_for_those_already_there() -> None:
    driver = Driver(make_sizes(), SchedulerArgs(request_timeout=3.0))
    driver.submit(generate("a", [1], 50))
    driver.tick(5e6)
    assert not driver.finish
    driver.tick(5e6 + 4)
    assert driver.finish["a"].status_code == 504
    driver.run()


def test_time_never_goes_back() -> None:
    deadlines = Deadlines(0.0, 3.0)
    deadlines.tick(100.0, MOST)
    deadlines.tick(50.0, MOST)
    deadlines.add("a")
    assert deadlines.tick(102.0, MOST).to_finish == []
    assert deadlines.tick(103.5, MOST).to_finish == ["a"]
    assert deadlines.tick(200.0, MOST).to_finish == []


def test_those_that_ended_are_forgotten() -> None:
    deadlines = Deadlines(1.0, 2.0)
    deadlines.tick(0.0, MOST)
    deadlines.add("a")
    deadlines.add("b")
    deadlines.forget("a")
    assert deadlines.tick(9.0, MOST) == (["b"], ["b"])


def test_a_tick_is_needed_when_a_request_has_taken_too_long_and_no_sooner() -> None:
    deadlines = Deadlines(2.0, 5.0)
    assert not deadlines.needs_tick(100.0)
    deadlines.add("early")
    assert deadlines.needs_tick(100.0)  # the first says when it arrived
    deadlines.tick(100.0, MOST)
    deadlines.add("a")
    for now_s, expected in ((102.0, False), (102.5, True)):
        assert deadlines.needs_tick(now_s) == expected
    assert deadlines.tick(102.5, MOST).to_start == ["early", "a"]
    for now_s, expected in ((102.5, False), (105.0, False), (105.1, True)):
        assert deadlines.needs_tick(now_s) == expected
    for rid in ("early", "a"):
        deadlines.forget(rid)
    assert not deadlines.needs_tick(1e9)
    assert not Deadlines(0.0, 0.0).needs_tick(1e9)


def test_without_limits_a_tick_changes_nothing() -> None:
    driver = Driver(make_sizes())
    driver.submit(generate("a", [1], 5))
    for now_s in (1.0, 1e6, 1e12):
        driver.tick(now_s)
    driver.run()
    assert driver.finish["a"].type == "length"
