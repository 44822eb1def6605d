"""Settings that change between two steps."""

from dataclasses import replace
from typing import Any

import pytest

from sgl_jax.core.scheduler_args import SchedulerArgs
from sgl_jax.scheduler.events import Configure
from tests.scheduler.driver import Driver, generate, make_sizes


def configure(driver: Driver, chunk_tokens: int = 8, **settings: Any) -> None:
    driver.scheduler.handle(Configure(replace(driver.scheduler.args, **settings), chunk_tokens))


def test_deadlines_hold_for_requests_that_are_there_and_can_be_lifted() -> None:
    driver = Driver(make_sizes(num_rows=2, num_pages=100))
    driver.tick(0.0)
    driver.submit(generate("a", [1], 50))
    driver.submit(generate("b", [2], 50))
    driver.step()
    driver.tick(100.0)
    assert not driver.scheduler.needs_tick(10_000.0)
    configure(driver, waiting_timeout=150.0)
    assert driver.scheduler.needs_tick(151.0)
    driver.tick(151.0)
    assert set(driver.finish) == {"b"}
    configure(driver, waiting_timeout=0.0, request_timeout=200.0)
    driver.tick(199.0)
    configure(driver, request_timeout=0.0)
    driver.tick(1000.0)
    assert set(driver.finish) == {"b"}
    driver.run()
    driver.check_tokens("a")
    driver.check_replay()


@pytest.mark.parametrize(("chunk_tokens", "most"), [(3, 3), (8, 8), (99, 8)])
def test_steps_hold_no_more_prompt_tokens_than_that(chunk_tokens: int, most: int) -> None:
    driver = Driver(make_sizes(num_pages=100))
    configure(driver, chunk_tokens)
    driver.submit(generate("a", list(range(24)), 2))
    driver.run()
    assert max(int(plan.ranks[0].q_lens.sum()) for plan in driver.plans) == most
    driver.check_tokens("a")
    driver.check_replay()


def test_the_order_of_the_queue_is_the_new_one() -> None:
    driver = Driver(make_sizes(num_rows=2, num_pages=100), SchedulerArgs(schedule_policy="fcfs"))
    driver.submit(generate("known", list(range(12)), 2))
    driver.run()
    driver.submit(generate("runs", [40], 8))
    driver.step()
    driver.submit(generate("older", [41] * 12, 2))
    driver.submit(generate("cached", list(range(13)), 2))
    configure(driver, schedule_policy="lpm")
    while not {"older", "cached"} & driver.finish.keys():
        driver.step()
    assert "older" not in driver.finish
    driver.run()
    driver.check_replay()
