"""Under pressure each preemption is progress, and each priority and tenant gets its share."""

from collections.abc import Callable

import pytest

from sgl_jax.core.scheduler_args import SchedulerArgs
from sgl_jax.core.shares import Tenant
from sgl_jax.scheduler.tenants import OUTPUT_WEIGHT, PROMPT_WEIGHT
from sgl_jax.scheduler.waiting.waiting_queue import MAX_SKIP_COUNT
from tests.scheduler.driver import Driver, generate, make_sizes

LOW, HIGH = 0, 50


def priority_driver(**settings: object) -> Driver:
    """Pages of 4 tokens; priorities preempt from a difference of 11 on; nothing is reserved."""
    sizes = {"num_pages": 41, "max_context_len": 400, "max_chunk_tokens": 16} | settings
    args = SchedulerArgs(schedule_conservativeness=0.0, enable_priority_scheduling=True)
    return Driver(make_sizes(**sizes), args)  # type: ignore[arg-type]


def step_until(driver: Driver, condition: Callable[[], object], most: int = 200) -> int:
    """Step until `condition` is true; how many steps that took."""
    for count in range(most):
        if condition():
            return count
        driver.step()
    pytest.fail(f"not so after {most} steps")


def runs(driver: Driver, rid: str) -> bool:
    request = driver.scheduler._requests.get(rid)
    return request is not None and request.lease is not None


def num_preempted(driver: Driver) -> int:
    return driver.scheduler.counters()["requests_preempted"]


def shared_prefix_driver() -> Driver:
    """40 pages. A low request reads 20 pages that a high one reads as well."""
    driver = priority_driver()
    stem = [i % 47 for i in range(80)]
    driver.submit(generate("high", [*stem, 48], 60, priority=HIGH))
    step_until(driver, lambda: driver.tokens["high"])
    driver.submit(generate("low", [*stem, 49], 60, priority=LOW))
    step_until(driver, lambda: driver.tokens["low"])
    return driver


def test_what_frees_nothing_is_not_preempted() -> None:
    alone, beside = shared_prefix_driver(), shared_prefix_driver()
    # It takes 21 pages, and the low one would leave the few that are its own.
    beside.submit(generate("second", [7] * 80, 10, priority=HIGH))
    for _ in range(24):
        alone.step()
        beside.step()
    assert len(beside.tokens["low"]) >= 0.9 * len(alone.tokens["low"])
    assert num_preempted(beside) == 0
    step_until(beside, lambda: "high" in beside.finish)
    assert step_until(beside, lambda: runs(beside, "second")) <= 2
    beside.run()
    for rid in beside.prompts:
        beside.check_tokens(rid)


def test_the_pages_of_its_own_prefix_are_no_gain_of_a_preemption() -> None:
    """Only the low request reads 20 pages that the high one begins with."""
    driver = priority_driver()
    stem = [i % 47 for i in range(80)]
    driver.submit(generate("important", [3] * 36, 20, priority=HIGH))
    driver.submit(generate("low", [*stem, 49], 30, priority=LOW))
    step_until(driver, lambda: driver.tokens["important"] and driver.tokens["low"])
    driver.submit(generate("high", [*stem, *[5] * 60], 4, priority=HIGH))  # 16 pages beside them
    driver.step()
    assert num_preempted(driver) == 0
    driver.run()


def test_what_is_preempted_on_a_rank_makes_room_for_a_request_that_starts_there() -> None:
    """Rank 0 has the prefix and soon has room, too; on rank 1 a low request is in the way."""
    driver = priority_driver(dp_size=2, max_context_len=640, num_pages=161)
    stem = [i % 47 for i in range(320)]
    driver.submit(generate("busy", [*stem, *[3] * 100], 20, priority=HIGH, dp_rank=0))
    driver.submit(generate("low", [4] * 400, 100, priority=LOW, dp_rank=1))
    step_until(driver, lambda: driver.tokens["busy"] and driver.tokens["low"])
    driver.submit(generate("high", [*stem, *[5] * 240], 4, priority=HIGH))
    for _ in range(6):
        driver.step()
        assert runs(driver, "low") or runs(driver, "high")
    assert num_preempted(driver) <= 1
    driver.run()


def test_a_request_pinned_to_a_full_rank_stops_no_other_of_its_priority() -> None:
    driver = priority_driver(dp_size=2)
    driver.submit(generate("important", [1] * 130, 25, priority=HIGH, dp_rank=0))
    driver.submit(generate("low", [2] * 130, 25, priority=LOW, dp_rank=1))
    step_until(driver, lambda: driver.tokens["important"] and driver.tokens["low"])
    driver.submit(generate("pinned", [3] * 100, 4, priority=HIGH, dp_rank=0))
    driver.submit(generate("other", [4] * 100, 4, priority=HIGH))
    driver.step()
    assert runs(driver, "other")
    assert not runs(driver, "pinned")
    driver.run()


def test_a_high_prompt_is_computed_before_the_rest_of_a_low_one() -> None:
    driver = priority_driver(num_pages=161, max_context_len=600)
    driver.submit(generate("low", [1] * 500, 4, priority=LOW))  # 32 steps of 16 tokens
    driver.step()
    driver.submit(generate("high", [2] * 12, 4, priority=HIGH))
    assert step_until(driver, lambda: driver.tokens["high"]) <= 2
    assert num_preempted(driver) == 0
    driver.run()
    for rid in driver.prompts:
        driver.check_tokens(rid)


def num_finished_in(driver: Driver, num_steps: int) -> int:
    """High requests that finish while ten wait at any time."""
    for i in range(num_steps):
        while driver.scheduler.num_waiting < 10:
            rid = f"high {len(driver.prompts)}"
            driver.submit(generate(rid, [i % 47] * 12, 4, priority=HIGH))
        driver.step()
    return sum(rid.startswith("high") for rid in driver.finish)


def test_no_rank_is_held_for_a_low_request_against_high_ones() -> None:
    without, beside = priority_driver(), priority_driver()
    for driver in (without, beside):
        driver.submit(generate("running", [1] * 20, 130, priority=HIGH))
        step_until(driver, lambda driver=driver: driver.tokens["running"])  # type: ignore[misc]
    beside.submit(generate("large", [2] * 140, 4, priority=LOW))
    for i in range(MAX_SKIP_COUNT + 10):  # of its own priority
        beside.submit(generate(f"low {i}", [3] * 5, 1, priority=LOW))
    for driver in (without, beside):
        for _ in range(50):
            driver.step()
    counts = [num_finished_in(driver, 200) for driver in (without, beside)]
    assert counts[1] >= 0.95 * counts[0]


@pytest.mark.parametrize("aging_s", [0.0, 1.0])
def test_ageing_ends_the_wait_of_a_low_request_if_it_is_set(aging_s: float) -> None:
    args = SchedulerArgs(
        schedule_conservativeness=0.0, enable_priority_scheduling=True, priority_aging_s=aging_s
    )
    driver = Driver(make_sizes(num_rows=3, max_chunk_tokens=16), args)
    driver.tick(0.0)
    driver.submit(generate("low", [1] * 8, 4, priority=-5))
    for i in range(40):
        driver.tick(i / 2)
        while driver.scheduler.num_waiting < 6:
            rid = f"high {len(driver.prompts)}"
            driver.submit(generate(rid, [len(driver.prompts) % 49, i] * 4, 4, priority=5))
        driver.step()
    assert bool(driver.tokens["low"]) == (aging_s > 0)
    driver.run()


# -- tenants --------------------------------------------------------------------------------------


def share_driver(**settings: object) -> Driver:
    args = SchedulerArgs(schedule_conservativeness=0.0, fair_share="tokens")
    return Driver(make_sizes(num_pages=400, num_rows=9, max_chunk_tokens=64), args)


def test_a_queue_of_one_tenant_is_not_that_of_another() -> None:
    driver = share_driver()
    a, b = Tenant(name="a"), Tenant(name="b")
    for i in range(2000):
        driver.submit(generate(f"a{i}", [i % 47] * 12, 20, tenant=a))
    for _ in range(30):
        driver.step()
    driver.submit(generate("b", [48] * 12, 20, tenant=b))
    # One round of those that run, each of 20 tokens, and its own prompt.
    assert step_until(driver, lambda: driver.tokens["b"]) <= 22
    counts = driver.scheduler.tenants()
    assert counts["a"].num_queued + counts["a"].num_running == 2000 - len(driver.finish)
    assert counts["b"].num_running == 1


def weighted_tokens(driver: Driver, tenant: str) -> int:
    """What counts of the tokens that a tenant was served."""
    counts = driver.scheduler.tenants()[tenant]
    computed = counts.prompt_tokens - counts.cached_tokens
    return PROMPT_WEIGHT * computed + OUTPUT_WEIGHT * counts.generated_tokens


def test_tenants_are_served_by_their_weights() -> None:
    driver = share_driver()
    tenants = [Tenant(name="one", weight=1.0), Tenant(name="three", weight=3.0)]
    for i in range(400):
        for tenant in tenants:
            driver.submit(generate(f"{tenant.name} {i}", [i % 47] * 12, 20, tenant=tenant))
    for _ in range(1000):
        driver.step()
    one, three = (weighted_tokens(driver, tenant.name) for tenant in tenants)
    assert 2.6 < three / one < 3.4  # what runs at once is a tenth of it


def test_a_tenant_that_was_away_has_saved_up_nothing() -> None:
    driver = share_driver()
    a, b = Tenant(name="a"), Tenant(name="b")
    for i in range(600):
        driver.submit(generate(f"a{i}", [i % 47] * 12, 20, tenant=a))
    for _ in range(300):
        driver.step()
    before = driver.scheduler.tenants()["a"].generated_tokens
    for i in range(300):
        driver.submit(generate(f"b{i}", [i % 47] * 12, 20, tenant=b))
    for _ in range(300):
        driver.step()
    counts = driver.scheduler.tenants()
    gained = counts["a"].generated_tokens - before
    assert 0.8 < gained / counts["b"].generated_tokens < 1.25


def test_a_lone_tenant_gets_everything() -> None:
    driver = share_driver()
    for i in range(40):
        driver.submit(generate(f"a{i}", [i % 47] * 12, 20, tenant=Tenant(name="a")))
    driver.step()
    driver.step()
    assert driver.scheduler.num_running == 8  # all rows
    driver.run()


def test_limits_of_a_tenant_count_what_waits_and_what_runs() -> None:
    driver = share_driver()
    limited = Tenant(name="limited", max_queued=3, max_running=2)
    for i in range(6):
        driver.submit(generate(f"r{i}", [i] * 12, 20, tenant=limited))
        driver.step()
    assert sum(runs(driver, rid) for rid in driver.prompts) == 2
    assert driver.scheduler.count_waiting()["tenant"] == 3
    assert driver.scheduler.why_waiting("r2").kind == "tenant"
    assert driver.finish["r5"].status_code == 429
    driver.submit(generate("other", [9] * 12, 20))
    driver.step()
    assert runs(driver, "other")
    driver.run()
    assert driver.scheduler.tenants()["limited"] == (0, 0, 60, 0, 100)


def test_priorities_go_before_shares() -> None:
    args = SchedulerArgs(enable_priority_scheduling=True, fair_share="tokens")
    driver = Driver(make_sizes(num_rows=2, max_chunk_tokens=16), args)
    for i in range(3):
        driver.submit(generate(f"a{i}", [i] * 8, 4, priority=1, tenant=Tenant(name="a")))
    driver.submit(generate("b", [9] * 8, 4, tenant=Tenant(name="b")))
    order = []
    while not driver.scheduler.is_idle:
        driver.step()
        order += [rid for rid in driver.finish if rid not in order]
    assert order == ["a0", "a1", "a2", "b"]
