"""Requests that wait for an event, such as the end of a load from the store, delay no others."""

from typing import Any

import pytest

from sgl_jax.core.scheduler_args import SchedulerArgs
from sgl_jax.core.shares import Tenant
from sgl_jax.scheduler.events import (
    AwaitPrograms,
    Flush,
    GrammarReady,
    ProgramsReady,
    Rebuild,
    Resume,
    RetractAll,
)
from tests.scheduler.driver import Driver, generate, make_sizes

NUM_WAITING = 1000
PROMPT = list(range(40))

ORDERS: dict[str, dict[str, Any]] = {
    "fcfs": {},
    "lpm": {"schedule_policy": "lpm"},
    "priorities": {"enable_priority_scheduling": True},
    "fair": {"fair_share": "tokens"},
    "fair lpm": {"fair_share": "tokens", "schedule_policy": "lpm"},
}


def driver_with_store(dp_size: int = 1, chunk: int = 16, **settings: Any) -> Driver:
    """An engine whose transfers do not end before `end_rate` is set."""
    sizes = make_sizes(dp_size=dp_size, num_pages=129, max_chunk_tokens=chunk, host_ratio=4.0)
    args: dict[str, Any] = {
        "hicache_fetch_policy": "always",
        "hicache_storage_backend": "file",
        "hicache_storage_prefetch_policy": "wait_complete",
        "max_queued_requests": 4 * NUM_WAITING,
    }
    driver = Driver(sizes, SchedulerArgs(**args | settings))
    driver.oracle.host.end_rate = 0.0
    return driver


def distinct_prompt(number: int) -> list[int]:
    """Two pages that no other number has."""
    return [number % 50, number // 50 % 50, number // 2500, 1, 2, 3, 4, 5, 6]


def is_running(driver: Driver, rid: str) -> bool:
    return driver.scheduler._requests[rid].lease is not None


@pytest.mark.parametrize("order", list(ORDERS))
@pytest.mark.parametrize("dp_size", [1, 2])
def test_a_thousand_that_wait_for_the_store_delay_others_by_no_step(
    order: str, dp_size: int
) -> None:
    driver = driver_with_store(dp_size, **ORDERS[order])
    for number in range(NUM_WAITING):
        tenant = Tenant(name=f"t{number % 7}")
        driver.submit(generate(f"r{number}", distinct_prompt(number), 4, priority=5, tenant=tenant))
    driver.step()
    assert driver.scheduler.count_waiting()["store"] == NUM_WAITING
    driver.submit(generate("other", [7, 8, 9], 4, tenant=Tenant(name="t0")))
    driver.step()
    assert is_running(driver, "other")
    for _ in range(12):
        driver.step()
    assert driver.finish["other"].type == "length"
    assert driver.scheduler.count_waiting()["store"] == NUM_WAITING


def test_those_that_wait_use_up_no_preemption() -> None:
    driver = driver_with_store(enable_priority_scheduling=True)
    for number in range(8):  # all rows
        driver.submit(generate(f"low{number}", [number, 8, 9], 40))
    for _ in range(8):
        driver.step()
    for number in range(NUM_WAITING):
        driver.submit(generate(f"r{number}", distinct_prompt(number), 4, priority=100))
    driver.submit(generate("urgent", [7, 8, 9], 4, priority=50))
    driver.step()
    assert is_running(driver, "urgent")


@pytest.mark.parametrize("order", list(ORDERS))
def test_a_thousand_that_wait_for_a_prefix_delay_others_by_no_step(order: str) -> None:
    driver = driver_with_store(chunk=64, **ORDERS[order], hicache_storage_backend="none")
    driver.submit(generate("producer", [*PROMPT, *PROMPT], 4, priority=5))
    driver.step()
    for number in range(NUM_WAITING):
        prompt = [*PROMPT, *PROMPT[:38], number % 50, number // 50]
        driver.submit(generate(f"r{number}", prompt, 4, priority=5))
    driver.submit(generate("other", [7, 8, 9], 4, priority=5, tenant=Tenant(name="t0")))
    driver.step()
    assert is_running(driver, "other")
    assert not any(is_running(driver, f"r{number}") for number in range(NUM_WAITING))


def test_they_keep_their_places_in_the_order() -> None:
    driver = driver_with_store(chunk=1)  # which has no part for short prompts
    for number in range(20):
        driver.submit(generate(f"early{number}", distinct_prompt(number), 1))
    driver.step()
    for number in range(20):
        driver.submit(generate(f"late{number}", [number, 9, 9], 1))
    driver.oracle.host.end_rate = 1.0
    driver.run()
    ends = list(driver.finish)
    assert max(ends.index(f"early{n}") for n in range(20)) < min(
        ends.index(f"late{n}") for n in range(20) if n > 8
    )


def test_they_end_by_time_and_by_abort() -> None:
    driver = driver_with_store(waiting_timeout=5.0)
    driver.tick(100.0)
    driver.submit(generate("aborted", distinct_prompt(1), 4))
    driver.submit(generate("late", distinct_prompt(2), 4))
    driver.step()
    driver.abort("aborted")
    driver.tick(106.0)
    assert driver.finish["aborted"].type == "abort"
    assert driver.finish["late"].status_code == 503
    driver.oracle.host.end_rate = 1.0
    driver.run()
    driver.check_replay()


@pytest.mark.parametrize("what", ["retract", "pause", "rebuild", "fail", "flush"])
def test_they_outlive_other_events(what: str) -> None:
    driver = driver_with_store()
    driver.submit(generate("running", [1, 2, 3], 30))
    driver.step()
    driver.submit(generate("waiting", distinct_prompt(3), 4))
    driver.step()
    assert driver.scheduler.why_waiting("waiting").kind == "store"
    if what == "retract":
        driver.scheduler.handle(RetractAll())
    elif what == "pause":
        driver.pause("retract")
        assert driver.scheduler.count_waiting() == {"paused": 2}
        driver.scheduler.handle(Resume())
    elif what == "flush":
        driver.scheduler.handle(Flush())
    elif what == "fail":
        driver.fail_all("gone")
    else:
        driver.in_flight.clear()
        driver.oracle.host.forget()
        driver.scheduler.handle(Rebuild("wrong"))
        driver.collect()
    driver.submit(generate("after", [4, 5, 6], 4))
    driver.oracle.host.end_rate = 1.0
    driver.run()
    has_ended = what in ("fail", "rebuild")
    assert driver.finish["waiting"].type == ("abort" if has_ended else "length")
    assert driver.finish["after"].type == "length"
    assert driver.scheduler.count_waiting()["store"] == 0
    driver.check_replay()


def test_a_request_at_the_gate_for_programs_may_wait_for_the_store() -> None:
    driver = driver_with_store()
    driver.scheduler.handle(AwaitPrograms())
    driver.submit(generate("first", distinct_prompt(1), 4, regex="a*"))
    driver.step()
    driver.scheduler.handle(GrammarReady("first"))
    driver.scheduler.handle(ProgramsReady(""))
    driver.step()
    assert driver.scheduler.why_waiting("first").kind == "store"
    assert not is_running(driver, "first")
    driver.oracle.host.end_rate = 1.0
    driver.run()
    assert driver.finish["first"].type == "length"
