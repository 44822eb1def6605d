"""A pause: no step, nothing lost, memory exact; afterwards the tokens are as without one."""

from typing import Any

import pytest

from sgl_jax.core.messages import OpenSession, PauseMode, SessionTurn
from sgl_jax.core.scheduler_args import SchedulerArgs
from sgl_jax.scheduler.events import Flush, NewWeights, Resume
from tests.scheduler.driver import Driver, generate, make_sizes


def started(num_steps: int, **settings: Any) -> Driver:
    """Six requests on two ranks that have run for some steps, two more than have a row."""
    sizes = make_sizes(dp_size=2, num_rows=3, num_pages=60, max_chunk_tokens=32)
    driver = Driver(sizes, SchedulerArgs(**settings))
    driver.tick(0.0)
    for i in range(6):
        driver.submit(generate(f"r{i}", list(range(i, i + 12)), 10, dp_rank=i % 2))
    for _ in range(num_steps):
        driver.step()
    assert driver.scheduler.num_running == 4
    return driver


def rest(driver: Driver) -> None:
    """Let what is in flight be read, and the engine look for work."""
    for _ in range(5):
        driver.step()
    assert not driver.in_flight
    driver.scheduler.audit()


@pytest.mark.parametrize("mode", ["in_place", "retract"])
@pytest.mark.parametrize("num_steps", [1, 2, 7])
def test_requests_go_on_with_the_same_tokens(mode: PauseMode, num_steps: int) -> None:
    driver = started(num_steps)
    driver.pause(mode)
    rest(driver)
    assert len(driver.plans) == num_steps
    assert driver.scheduler.num_running == (4 if mode == "in_place" else 0)
    driver.scheduler.handle(Resume())
    driver.run()
    for rid in driver.prompts:
        driver.check_tokens(rid)
        assert len(driver.tokens[rid]) == 10
    counters = driver.scheduler.counters()
    assert counters["requests_retracted"] == (4 if mode == "retract" else 0)
    assert counters["requests_force_retracted"] == 0
    driver.check_replay()


def test_in_place_leaves_every_page_where_it_is() -> None:
    driver = started(3)
    before = driver.scheduler.memory_views()
    driver.pause("in_place")
    rest(driver)
    assert driver.scheduler.memory_views() == before


def test_a_retract_keeps_what_was_computed_for_those_that_go_on() -> None:
    driver = started(3)
    driver.pause("retract")
    for view in driver.scheduler.memory_views():
        assert view.leased_pages == 0
        assert view.free_rows == view.total_rows
        assert view.cached_pages > 0


def test_an_abort_ends_what_runs_and_what_waits() -> None:
    driver = started(3)
    driver.pause("abort")
    rest(driver)
    assert {driver.finish[f"r{i}"].type for i in range(6)} == {"abort"}
    assert driver.finish["r0"].message == "generation was paused"
    assert driver.tokens["r0"]
    driver.check_idle()
    driver.submit(generate("late", [1, 2], 2))
    rest(driver)
    assert driver.scheduler.num_waiting == 1
    driver.scheduler.handle(Resume())
    driver.run()
    driver.check_tokens("late")
    driver.check_replay()


def test_requests_that_come_wait_for_the_end_of_the_pause_as_far_as_the_queue_goes() -> None:
    driver = started(1, max_queued_requests=3)
    driver.pause("retract")
    driver.submit(generate("late", [1], 1))
    assert driver.scheduler.why_waiting("late").kind == "paused"
    assert driver.scheduler.count_waiting() == {"paused": 7}
    driver.submit(generate("too many", [1], 1))
    assert driver.finish["too many"].status_code == 503
    driver.scheduler.handle(Resume())
    driver.run()
    driver.check_tokens("late")


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_time_and_clients_still_end_requests(mode: PauseMode) -> None:
    driver = started(2, request_timeout=10.0)
    driver.pause(mode)
    driver.abort("r0")
    assert driver.finish["r0"].type == "abort"
    driver.tick(11.0)
    assert {driver.finish[f"r{i}"].status_code for i in range(1, 6)} == {504}
    rest(driver)
    driver.check_idle()


def test_caches_are_flushed_though_requests_wait_but_not_while_they_run() -> None:
    driver = started(4)
    driver.pause("in_place")
    assert not driver.scheduler.handle(Flush())
    driver.pause("retract")
    assert driver.scheduler.handle(Flush())
    for view in driver.scheduler.memory_views():
        assert view.free_pages == view.total_pages - view.reserved_pages
    driver.scheduler.handle(Resume())
    driver.run()
    for rid in driver.prompts:
        driver.check_tokens(rid)
    driver.check_replay()


def test_a_turn_that_is_flushed_while_it_waits_is_computed_anew() -> None:
    driver = Driver(make_sizes(num_pages=60))
    driver.session(OpenSession(rid="", session_id="s", streaming=True))
    driver.submit(generate("first", [1, 2, 3, 4, 5], 4, session=SessionTurn(id="s")))
    driver.run()
    history = driver.prompts["first"] + driver.tokens["first"]
    driver.submit(generate("second", [6, 7], 8, session=SessionTurn(id="s")), history)
    for _ in range(4):
        driver.step()
    driver.pause("retract")
    assert driver.scheduler.handle(Flush())
    assert driver.scheduler.memory_views()[0].session_rows == 0
    driver.scheduler.handle(Resume())
    driver.run()
    assert len(driver.tokens["second"]) == 8
    driver.check_tokens("second")


def test_a_pause_outlasts_a_lost_device() -> None:
    driver = started(3)
    driver.pause("in_place")
    driver.fail_all("the device is gone")
    driver.submit(generate("late", [1], 2))
    rest(driver)
    assert not driver.tokens["late"]
    driver.scheduler.handle(Resume())
    driver.run()
    driver.check_tokens("late")


def test_a_request_that_keeps_its_kv_over_new_weights_gives_it_to_no_other() -> None:
    """Nor does the session whose turn it is; a request that computes its prompt begins again."""
    driver = Driver(make_sizes(num_pages=60, max_chunk_tokens=16))
    for name in ("s", "t"):
        assert driver.session(OpenSession(rid="", session_id=name, streaming=True)).ok
    prompt, other = list(range(1, 13)), list(range(21, 33))
    driver.submit(generate("before", prompt, 2))
    driver.submit(generate("other", other, 2))
    driver.run()
    turn, second = SessionTurn(id="s"), SessionTurn(id="t")
    driver.submit(generate("turn", prompt, 20, session=turn))
    # Without a cached prefix: less than a page.
    driver.submit(generate("short", [30, 31], 20))
    driver.submit(generate("second", [41, 42], 20, session=second))
    for _ in range(4):
        driver.step()
    driver.submit(generate("long", list(range(40)), 4))
    driver.step()
    driver.pause("in_place")
    rest(driver)
    kept = driver.scheduler.handle(NewWeights(keeps_running=True))
    assert sorted(kept) == ["second", "short", "turn"]
    driver.scheduler.handle(Resume())
    driver.submit(generate("same", prompt, 2))
    driver.submit(generate("same other", other, 2))
    driver.run()
    history = [41, 42, *driver.tokens["second"]]
    driver.submit(generate("next of second", [9], 2, session=second), history)
    driver.submit(generate("longer", [30, 31, *driver.tokens["short"]], 2))
    driver.submit(generate("next", [9], 2, session=turn), [*prompt, *driver.tokens["turn"]])
    driver.run()
    assert driver.cached["turn"] == 12 - 4
    for rid in ("same", "same other", "next of second", "longer"):
        assert driver.cached[rid] == 0
    assert driver.cached["next"] == 12  # of "same"
    for rid in driver.prompts:
        driver.check_tokens(rid)
    driver.check_replay()
