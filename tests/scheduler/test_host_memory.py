"""Requests whose prefixes are in host memory: they wait for a fetch, and never for long."""

import pytest

from sgl_jax.core.scheduler_args import SchedulerArgs
from sgl_jax.scheduler.events import (
    FetchRate,
    Flush,
    PrefillRate,
    StoreRate,
    StoreSuspended,
)
from tests.scheduler.driver import Driver, generate, make_sizes

PROMPT = list(range(40))


def driver_with_prefix(num_pages: int = 33, fetch_policy: str = "always") -> Driver:
    """An engine whose host has `PROMPT`, and whose device has nothing."""
    sizes = make_sizes(num_pages=num_pages, max_chunk_tokens=16, host_ratio=4.0)
    driver = Driver(
        sizes, SchedulerArgs(hicache_fetch_policy=fetch_policy, schedule_conservativeness=0.0)
    )
    driver.oracle.host.end_rate = 1.0
    driver.submit(generate("first", PROMPT, 1))
    driver.run()
    driver.scheduler.ranks[0].memory.cache.reset()
    return driver


def test_a_request_waits_for_its_prefix_and_computes_the_rest() -> None:
    driver = driver_with_prefix()
    driver.oracle.host.end_rate = 0.0
    driver.submit(generate("second", [*PROMPT, 1, 2, 3], 4))
    for _ in range(3):
        driver.step()
    assert driver.scheduler.why_waiting("second").kind == "fetch"
    assert driver.scheduler.count_waiting()["fetch"] == 1
    driver.oracle.host.end_rate = 1.0
    driver.run()
    driver.check_tokens("second")
    assert driver.cached["second"] == len(PROMPT)
    assert driver.scheduler.counters()["host_fetched_tokens"] == len(PROMPT)


@pytest.mark.parametrize("policy", ["wait_complete", "best_effort"])
def test_a_request_waits_for_its_prefix_from_the_store(policy: str) -> None:
    sizes = make_sizes(num_pages=33, max_chunk_tokens=16, host_ratio=4.0, dp_size=2)
    driver = Driver(
        sizes,
        SchedulerArgs(
            hicache_fetch_policy="always",
            hicache_storage_backend="file",
            hicache_storage_prefetch_policy=policy,
        ),
    )
    driver.oracle.host.end_rate = 1.0
    driver.submit(generate("first", PROMPT, 1))
    driver.run()
    assert driver.scheduler.handle(Flush())
    driver.oracle.host.end_rate = 0.0
    driver.submit(generate("second", [*PROMPT, 1, 2, 3], 4))
    for _ in range(3):
        driver.step()
    if policy == "wait_complete":
        assert driver.scheduler.why_waiting("second").kind == "store"
        assert driver.scheduler.count_waiting()["store"] == 1
    driver.oracle.host.end_rate = 1.0
    driver.run()
    driver.check_tokens("second")
    assert driver.cached["second"] == (len(PROMPT) if policy == "wait_complete" else 0)


@pytest.mark.parametrize(("store_rate", "cached"), [(0.0, 40), (1e3, 0), (1e6, 40)])
def test_a_prefix_is_loaded_from_a_store_that_is_sooner(store_rate: float, cached: int) -> None:
    sizes = make_sizes(num_pages=33, max_chunk_tokens=16, host_ratio=4.0)
    args = SchedulerArgs(hicache_storage_backend="file")
    driver = Driver(sizes, args)
    driver.oracle.host.end_rate = 1.0
    driver.submit(generate("first", PROMPT, 1))
    driver.run()
    assert driver.scheduler.handle(Flush())
    driver.scheduler.handle(PrefillRate(1e4))
    if store_rate:
        driver.scheduler.handle(StoreRate(store_rate))
    driver.submit(generate("second", [*PROMPT, 1], 4))
    driver.run()
    driver.check_tokens("second")
    assert driver.cached["second"] == cached
    assert driver.scheduler.counters()["store_loaded_tokens"] == cached
    driver.check_replay()


def test_a_load_from_a_slow_store_ends_before_the_prompts_ahead() -> None:
    sizes = make_sizes(num_pages=65, max_chunk_tokens=16, host_ratio=4.0, num_rows=2)
    driver = Driver(sizes, SchedulerArgs(hicache_storage_backend="file"))
    driver.oracle.host.end_rate = 1.0
    driver.submit(generate("first", PROMPT, 1))
    driver.run()
    assert driver.scheduler.handle(Flush())
    driver.scheduler.handle(PrefillRate(1e4))
    driver.scheduler.handle(StoreRate(6e3))
    driver.submit(generate("running", [9] * 50, 1))
    driver.step()
    driver.submit(generate("waiting", [8] * 50, 1))
    driver.submit(generate("second", [*PROMPT, 1], 4))
    driver.run()
    driver.check_tokens("second")
    assert driver.cached["second"] == len(PROMPT)


def test_two_requests_wait_for_one_fetch() -> None:
    driver = driver_with_prefix()
    for number in range(2):
        driver.submit(generate(f"r{number}", [*PROMPT, number], 4))
    driver.run()
    assert driver.cached == {"first": 0, "r0": len(PROMPT), "r1": len(PROMPT)}
    assert driver.scheduler.counters()["host_fetched_tokens"] == len(PROMPT)


def test_a_request_starts_though_each_fetch_fails() -> None:
    driver = driver_with_prefix()
    driver.oracle.host.failure_rate = 1.0
    driver.submit(generate("second", [*PROMPT, 1], 4))
    driver.run(max_steps=100)
    driver.check_tokens("second")
    assert driver.cached["second"] == 0
    # Two fetches, and the copies of the two requests.
    assert 2 <= driver.scheduler.counters()["host_failed_transfers"] <= 4


def test_running_requests_take_the_pages_of_a_fetch_before_one_is_retracted() -> None:
    driver = driver_with_prefix(num_pages=17)  # 16 pages of 4 tokens
    driver.submit(generate("running", [7, 8, 9], 40))
    driver.step()
    driver.oracle.host.end_rate = 0.0
    driver.submit(generate("waiting", [*PROMPT, 1], 1))
    driver.step()
    assert driver.scheduler.why_waiting("waiting").kind == "fetch"
    for _ in range(40):
        driver.step()
    assert driver.finish["running"].type == "length"
    assert driver.scheduler.counters()["requests_retracted"] == 0
    driver.oracle.host.end_rate = 1.0
    driver.run()
    assert driver.scheduler.counters()["requests_retracted"] == 0
    driver.check_tokens("running")
    driver.check_tokens("waiting")


def test_a_prefix_is_computed_where_the_link_is_slower() -> None:
    driver = driver_with_prefix(fetch_policy="sooner")
    (rank,) = driver.scheduler.ranks
    driver.scheduler.handle(FetchRate(1000.0))
    driver.scheduler.handle(PrefillRate(10_000.0))
    driver.submit(generate("computed", [*PROMPT, 1], 1))
    driver.run()
    assert driver.cached["computed"] == 0
    rank.memory.cache.reset()
    driver.scheduler.handle(PrefillRate(100.0))
    driver.submit(generate("fetched", [*PROMPT, 2], 1))
    driver.run()
    assert driver.cached["fetched"] == len(PROMPT)


def test_fetches_belong_to_the_rank() -> None:
    sizes = make_sizes(dp_size=2, num_pages=33, max_chunk_tokens=16, host_ratio=4.0)
    driver = Driver(sizes, SchedulerArgs(hicache_fetch_policy="always"))
    driver.oracle.host.end_rate = 1.0
    driver.submit(generate("first", PROMPT, 1, dp_rank=1))
    driver.run()
    driver.scheduler.ranks[1].memory.cache.reset()
    driver.submit(generate("second", [*PROMPT, 5], 1))
    driver.run()
    assert driver.dp_rank["second"] == 1, "there it costs least"
    assert driver.cached["second"] == len(PROMPT)


def test_nothing_is_asked_of_a_suspended_store() -> None:
    sizes = make_sizes(num_pages=33, max_chunk_tokens=64, host_ratio=4.0)
    args = SchedulerArgs(
        hicache_fetch_policy="always",
        hicache_storage_backend="file",
        hicache_storage_prefetch_policy="wait_complete",
    )
    driver = Driver(sizes, args)
    host, (rank,) = driver.oracle.host, driver.scheduler.ranks
    host.end_rate = 1.0
    driver.scheduler.handle(StoreSuspended(answers=False))
    driver.scheduler.handle(StoreSuspended(answers=False))  # a probe has failed
    driver.submit(generate("first", PROMPT, 1))
    driver.step()
    assert rank.running.active.size == 1, "it waits for nothing"
    driver.run()
    assert not host.store
    assert driver.scheduler.counters()["store_failures"] == 2
    driver.fail_all("gone")  # the store is as it was
    driver.submit(generate("second", PROMPT, 1))
    driver.run()
    assert not host.store
    # What was left out is put once it answers, and the prefix is offered again.
    driver.scheduler.handle(StoreSuspended(answers=True))
    driver.submit(generate("third", [*PROMPT, 1, 2, 3, 4], 1))
    driver.run()
    assert len(host.store) == 11
    driver.check_replay()
