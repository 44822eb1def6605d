"""While most evicted prefixes return, prompts do not evict prefixes that were used lately."""

from typing import Any

import numpy as np

from sgl_jax.core.scheduler_args import SchedulerArgs
from sgl_jax.scheduler.request import RequestState
from sgl_jax.scheduler.waiting.waiting_queue import MAX_SKIP_COUNT
from sgl_jax.scheduler.working_set import HOLD_STEPS, num_pages_in_use
from tests.scheduler.driver import Driver, generate, make_sizes

MAX_WAIT_S = SchedulerArgs().working_set_max_wait_s
PROMPTS = {name: [number] * 64 for number, name in enumerate("abcde", 1)}


def thrashing_driver(dp_size: int = 1, **settings: object) -> Driver:
    """Ranks of 60 pages of 4 tokens. The tree of the first holds the last of five conversations of
    64 tokens: each came back after it was evicted."""
    driver = Driver(
        make_sizes(num_pages=61, max_chunk_tokens=16, dp_size=dp_size),
        SchedulerArgs(**{"schedule_conservativeness": 0.0} | settings),  # type: ignore[arg-type]
    )
    driver.tick(0.0)
    for turn in range(4):
        for name, prompt in PROMPTS.items():
            driver.submit(generate(f"{name}{turn}", prompt, 2, dp_rank=0))
            driver.run()
            driver.tick(driver.scheduler._live.deadlines.now_s + 1.0)
    return driver


def now_s(driver: Driver) -> float:
    return driver.scheduler._live.deadlines.now_s


def is_thrashing(driver: Driver) -> bool:
    return driver.scheduler.ranks[0].working_set.is_thrashing


def steps_until_started(driver: Driver, rid: str, most: int) -> int:
    for step in range(most):
        if driver.tokens[rid]:
            return step
        driver.step()
    raise AssertionError(f"{rid} did not start within {most} steps")


def cached_names(driver: Driver) -> dict[str, int]:
    cache = driver.scheduler.ranks[0].memory.cache
    return {name: cache.peek(np.array(each[:-1], np.int32)) for name, each in PROMPTS.items()}


def run_beside(driver: Driver, rid: str, prompt: list[int]) -> None:
    """Submit a request next to one that generates for long."""
    driver.submit(generate("long", [9] * 4, 150))
    for _ in range(3):
        driver.step()
    driver.submit(generate(rid, prompt, 2))


def test_a_prompt_waits_while_it_would_evict_what_returns_soon() -> None:
    driver = thrashing_driver()
    assert is_thrashing(driver)
    assert cached_names(driver)["a"] == 0
    run_beside(driver, "new", PROMPTS["a"])
    for _ in range(2 * HOLD_STEPS + 3):
        driver.step()
    assert not driver.tokens["new"]
    assert driver.scheduler.why_waiting("new").kind == "working_set"
    assert driver.scheduler.count_waiting()["working_set"] == 1
    driver.submit(generate("next", [*PROMPTS["e"], 7], 2))  # of a conversation that is cached
    assert steps_until_started(driver, "next", 6) > 0
    assert driver.cached["next"] >= 60
    assert not driver.tokens["new"]


def test_it_waits_no_longer_than_the_bound() -> None:
    driver = thrashing_driver()
    run_beside(driver, "new", PROMPTS["a"])
    driver.step()
    start = now_s(driver)
    driver.tick(start + MAX_WAIT_S - 1)
    # What was used before is old by now, so it is used again.
    driver.submit(generate("again", PROMPTS["e"], 1))
    driver.submit(generate("again too", PROMPTS["d"], 1))
    driver.submit(generate("and again", PROMPTS["c"], 1))
    for _ in range(HOLD_STEPS - 3):
        driver.step()
    driver.tick(start + MAX_WAIT_S)
    steps_until_started(driver, "new", 2 * HOLD_STEPS)


def test_after_the_bound_it_starts_before_prompts_with_fewer_tokens_to_compute() -> None:
    driver = thrashing_driver(working_set_max_wait_s=20.0)
    run_beside(driver, "new", PROMPTS["a"])
    driver.step()
    start = now_s(driver)
    assert driver.scheduler.why_waiting("new").kind == "working_set"
    driver.tick(start + 20.0)
    for number in range(4):
        driver.submit(generate(f"next{number}", [*PROMPTS["e"][:40], *[number + 10] * 20], 1))
    driver.step()
    assert driver.scheduler._requests["new"].state is RequestState.RUNNING
    assert driver.scheduler.why_waiting("next3").kind == "step"


def test_it_starts_when_what_it_evicts_was_not_used_for_the_window() -> None:
    driver = thrashing_driver(working_set_s=30.0)
    run_beside(driver, "new", PROMPTS["a"])
    for _ in range(HOLD_STEPS):
        driver.step()
    driver.tick(now_s(driver) + 10.0)
    for _ in range(HOLD_STEPS):
        driver.step()
    assert not driver.tokens["new"]
    driver.tick(now_s(driver) + 31.0)
    steps_until_started(driver, "new", 2 * HOLD_STEPS)


def test_it_starts_at_once_on_a_rank_that_runs_nothing() -> None:
    driver = thrashing_driver()
    run_beside(driver, "new", PROMPTS["a"])
    for _ in range(HOLD_STEPS // 2):
        driver.step()
    assert not driver.tokens["new"]
    driver.abort("long")
    assert steps_until_started(driver, "new", 8) <= 6


def test_it_does_not_wait_if_that_is_off_or_first_come_is_served_first() -> None:
    for settings in ({"working_set_s": 0.0}, {"schedule_policy": "fcfs"}):
        driver = thrashing_driver(**settings)
        run_beside(driver, "new", PROMPTS["a"])
        assert steps_until_started(driver, "new", 8) <= 6


def test_it_does_not_wait_while_evicted_prefixes_do_not_return() -> None:
    driver = thrashing_driver()
    number = 10
    while is_thrashing(driver):
        driver.submit(generate(f"other{number}", [number, 1, 2, 3] * 14, 1))
        driver.run()
        driver.tick(now_s(driver) + 1.0)
        number += 1
        assert number < 49
    run_beside(driver, "new", PROMPTS["a"])
    assert steps_until_started(driver, "new", 8) <= 6


def test_more_important_requests_do_not_wait() -> None:
    driver = thrashing_driver(enable_priority_scheduling=True)
    driver.submit(generate("long", [9] * 4, 150))
    for _ in range(3):
        driver.step()
    driver.submit(generate("new", PROMPTS["a"], 2, priority=1))
    assert steps_until_started(driver, "new", 8) <= 6


def test_requests_that_start_do_not_pass_over_one_that_waits_for_the_working_set() -> None:
    driver = thrashing_driver()
    run_beside(driver, "new", PROMPTS["a"])
    driver.step()
    request = driver.scheduler._requests["new"]
    for turn in range(5):
        driver.submit(generate(f"next{turn}", PROMPTS["e"], 1))
        steps_until_started(driver, f"next{turn}", 6)
    assert driver.scheduler._waiting._columns.lines.skip_count[request.line] == 0


def test_a_path_is_used_with_the_nodes_below_it() -> None:
    driver = Driver(make_sizes(num_pages=61))
    memory = driver.scheduler.ranks[0].memory
    for rid, tail in (("first", [1] * 8), ("second", [2] * 8)):
        driver.submit(generate(rid, [5] * 8 + tail, 1))
        driver.run()
    tree = memory.cache.tree
    clock = tree.clock
    assert num_pages_in_use(tree, clock, 0.0) == 0
    assert num_pages_in_use(tree, 0, 0.0) == 6
    driver.submit(generate("third", [5] * 8 + [2] * 8 + [3] * 4, 1))
    driver.run()
    assert num_pages_in_use(tree, clock, 0.0) == 5  # not the end of the first
    driver.submit(generate("fourth", [5] * 8 + [2] * 8 + [4] * 4, 9))
    driver.step()
    assert num_pages_in_use(tree, clock, 0.0) == 1  # the rest is locked


def test_a_due_request_does_not_wait() -> None:
    driver = thrashing_driver()
    run_beside(driver, "new", PROMPTS["a"])
    for _ in range(4):
        driver.step()
    waiting, request = driver.scheduler._waiting, driver.scheduler._requests["new"]
    assert driver.scheduler.why_waiting("new").kind == "working_set"
    waiting._columns.lines.skip_count[request.line] = MAX_SKIP_COUNT
    steps_until_started(driver, "new", HOLD_STEPS + 8)


def test_a_path_is_used_until_the_end_of_its_last_request() -> None:
    driver = Driver(make_sizes(num_pages=61))
    tree = driver.scheduler.ranks[0].memory.cache.tree
    driver.submit(generate("first", [5] * 16, 1))
    driver.run()
    driver.submit(generate("second", [5] * 16 + [6] * 3, 9))
    for _ in range(3):
        driver.step()
    driver.submit(generate("other", [7] * 8, 1))
    driver.step()
    clock = tree.clock
    driver.run()
    assert num_pages_in_use(tree, clock, 0.0) == 6  # with the answer, and not the other's


def test_it_is_tried_again_after_some_steps_only() -> None:
    driver = thrashing_driver()
    admission, num_tried = driver.scheduler._admission, 0
    holds_back = admission._holds_back

    def counted(*arguments: Any) -> bool:
        nonlocal num_tried
        num_tried += 1
        return holds_back(*arguments)

    admission._holds_back = counted
    run_beside(driver, "new", PROMPTS["a"])
    num_tried = 0
    for _ in range(3 * HOLD_STEPS):
        driver.step()
    assert num_tried in (3, 4)


def test_a_prompt_does_not_wait_for_a_rank_while_another_does_not_thrash() -> None:
    driver = thrashing_driver(dp_size=2)
    assert is_thrashing(driver)
    driver.submit(generate("long", [9] * 4, 150, dp_rank=0))
    for _ in range(3):
        driver.step()
    # Some cached tokens make the thrashing rank the cheapest.
    driver.submit(generate("new", [*PROMPTS["e"][:8], *[31] * 56], 2))
    assert steps_until_started(driver, "new", 10) < 10


def test_passes_over_a_request_count_once_its_wait_has_ended() -> None:
    driver = thrashing_driver()
    run_beside(driver, "new", PROMPTS["a"])
    driver.step()
    driver.step()
    waiting = driver.scheduler._waiting
    (request,) = waiting
    lines, step = waiting._columns.lines, driver.scheduler._steps
    assert lines.held_until[request.line] > step
    # From now on it does not fit, so no new wait begins.
    lines.needs["pages"][request.line] = 10**6
    for _ in range(HOLD_STEPS + 1):
        driver.step()
    assert lines.held_until[request.line] == 0
