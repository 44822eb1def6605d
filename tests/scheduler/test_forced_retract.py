"""Retracts that nothing asked for: they reach every kind of request, and yet all of them finish."""

from collections import Counter
from typing import Any

import numpy as np
import pytest

from sgl_jax.core.scheduler_args import SchedulerArgs
from sgl_jax.core.step_plan import StepPlan
from tests.scheduler.driver import Driver, forced_retract, generate, make_sizes


def make_driver(
    interval: int, *, dp_size: int = 1, chunk: int = 8, overlap: bool = True, **config: Any
) -> Driver:
    return Driver(
        make_sizes(dp_size=dp_size, num_pages=100, max_chunk_tokens=chunk),
        SchedulerArgs(**forced_retract(interval), **config),
        overlap=overlap,
    )


@pytest.mark.parametrize("interval", [1, 2, 3])
@pytest.mark.parametrize("radix", [False, True])
@pytest.mark.parametrize("chunk", [1, 3, 16])
def test_every_request_gets_on_and_its_tokens_stay_right(
    interval: int, radix: bool, chunk: int
) -> None:
    """Even where a retract loses all that was computed, and a prompt takes dozens of steps."""
    driver = make_driver(interval, chunk=chunk, disable_radix_cache=not radix)
    for i in range(5):
        driver.submit(generate(f"r{i}", list(range(i, i + 15)), 8))
    driver.run()
    counters = driver.scheduler.counters()
    assert counters["requests_force_retracted"] > 5
    assert counters["requests_retracted"] >= counters["requests_force_retracted"]
    for rid in driver.prompts:
        driver.check_tokens(rid)
        assert len(driver.tokens[rid]) == 8
    driver.check_replay()


def test_half_of_those_that_run_are_taken_and_in_turn_everybody_is() -> None:
    driver = make_driver(4)
    for i in range(5):
        driver.submit(generate(f"r{i}", [i], 60))
    requests = dict(driver.scheduler._requests)
    taken: Counter[str] = Counter()
    before = dict.fromkeys(requests, 0)
    while len(driver.finish) < 5:
        driver.step()
        now = {rid: request.num_retractions for rid, request in requests.items()}
        victims = [rid for rid in now if now[rid] > before[rid]]
        if victims and not driver.finish:
            assert len(victims) == 3
        taken.update(victims)
        before = now
    assert min(taken.values()) >= 5
    assert max(taken.values()) <= 2 * min(taken.values())


def test_whom_it_takes_depends_on_the_events_alone() -> None:
    recordings = []
    for _ in range(2):
        driver = make_driver(2, dp_size=2)
        for i in range(7):
            driver.submit(generate(f"r{i}", [i] * (3 + i), 12))
        driver.run()
        recordings.append(driver.recording.getvalue())
    assert recordings[0] == recordings[1]


def test_a_request_in_the_midst_of_its_prefill_is_taken_once() -> None:
    driver = make_driver(3)
    driver.submit(generate("a", list(range(60)), 3))
    request = driver.scheduler._requests["a"]
    for _ in range(4):
        driver.step()
    assert request.num_retractions == 1
    assert request.num_output_tokens == 0
    while not driver.tokens["a"]:
        driver.step()
    assert request.num_retractions == 1
    driver.run()
    driver.check_tokens("a")


def test_a_request_that_waits_for_its_last_result_is_taken_and_samples_it_again() -> None:
    driver = make_driver(2)
    driver.submit(generate("a", [1, 2], 2))
    driver.step()
    driver.step()  # its last token was launched, the one before was read
    request, rank = driver.scheduler._requests["a"], driver.scheduler.ranks[0]
    assert len(rank.running.runnable()) == 0
    driver.step()
    assert request.num_retractions == 1
    driver.run()
    driver.check_tokens("a")
    assert len(driver.tokens["a"]) == 2


def test_each_rank_gives_up_half_of_its_own() -> None:
    driver = make_driver(6, dp_size=2)
    for i in range(6):
        driver.submit(generate(f"r{i}", [i], 40, dp_rank=0 if i < 4 else 1))
    while not driver.scheduler.counters()["requests_force_retracted"]:
        driver.step()
    assert [rank.num_force_retracted for rank in driver.scheduler.ranks] == [2, 1]
    driver.run()


@pytest.mark.parametrize("bound", [1, 2, 4])
def test_nothing_starts_while_more_run_than_allowed(bound: int) -> None:
    driver = make_driver(3, test_retract_no_prefill_bs=bound)
    for i in range(8):
        driver.submit(generate(f"r{i}", [i] * 6, 10))
    running_before = 0
    for _ in range(400):
        plans = len(driver.plans)
        running_before = driver.scheduler.num_running
        driver.step()
        if len(driver.plans) > plans and running_before > bound:
            assert num_admitted(driver.plans[-1]) == 0
        if driver.scheduler.is_idle and not driver.in_flight:
            break
    driver.check_idle()
    for rid in driver.prompts:
        driver.check_tokens(rid)
        assert len(driver.tokens[rid]) == 10


def num_admitted(plan: StepPlan) -> int:
    return sum(len(rank.admissions) for rank in plan.ranks)


def test_without_an_interval_the_bound_means_nothing() -> None:
    driver = make_driver(0, test_retract_no_prefill_bs=1)
    for i in range(4):
        driver.submit(generate(f"r{i}", [i], 4))
    driver.step()
    assert driver.scheduler.num_running == 4
    driver.run()
    assert driver.scheduler.counters()["requests_force_retracted"] == 0


def test_other_ranks_go_on_while_one_has_nothing_to_give() -> None:
    driver = make_driver(2, dp_size=2)
    driver.submit(generate("a", [1], 20, dp_rank=1))
    driver.run()
    retracted = np.array([rank.num_retracted for rank in driver.scheduler.ranks])
    assert retracted[0] == 0
    assert retracted[1] > 0
    driver.check_tokens("a")
