"""What the scheduler refuses to start with, and what it does when a rank has nothing to give."""

import numpy as np
import pytest

from sgl_jax.core.scheduler_args import SchedulerArgs
from sgl_jax.scheduler.events import PlanStep, ResultRead
from sgl_jax.scheduler.scheduler import Scheduler
from tests.scheduler.driver import Driver, generate, make_sizes


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_a_step_must_hold_every_decode_row_with_its_drafts_and_a_token_more(
    num_drafts: int,
) -> None:
    sizes = make_sizes(num_rows=9, max_draft_tokens=num_drafts)
    least = 8 * (1 + num_drafts) + 1
    Scheduler(sizes._replace(max_step_tokens=least), SchedulerArgs())
    with pytest.raises(ValueError, match=f"holds {least - 1} tokens and has none .* 8 requests"):
        Scheduler(sizes._replace(max_step_tokens=least - 1), SchedulerArgs())


def test_with_every_row_decoding_a_step_of_just_enough_tokens_goes_on() -> None:
    driver = Driver(make_sizes(max_chunk_tokens=1, num_pages=100))
    for i in range(12):
        driver.submit(generate(f"r{i}", [i] * 5, 12))
    driver.run()
    for rid in driver.prompts:
        driver.check_tokens(rid)
        assert len(driver.tokens[rid]) == 12


@pytest.mark.parametrize("overlap", [False, True])
def test_a_request_alone_on_a_rank_without_pages_ends_once_with_an_error(overlap: bool) -> None:
    """Pages are gone that no request holds; the only request has nothing to wait for."""
    driver = Driver(make_sizes(num_pages=12, page_size=4), overlap=overlap)
    driver.submit(generate("a", [1, 2, 3], 30))
    while len(driver.tokens["a"]) < 3:
        driver.step()
    memory = driver.scheduler.ranks[0].memory
    lost = memory.allocator.alloc(memory.allocator.num_free, owner=8)
    for _ in range(20):
        plan = driver.scheduler.handle(PlanStep())
        if plan is not None:
            driver.in_flight.append((plan, driver.executor.launch(plan)))
        if driver.in_flight:
            done, handle = driver.in_flight.popleft()
            driver.scheduler.handle(ResultRead(done.step_id, driver.executor.result(handle)))
        driver.collect()
    assert driver.finish["a"].status_code == 500
    assert "needs more KV memory than rank 0 can free" in driver.finish["a"].message
    memory.allocator.free(lost, owner=8)
    driver.check_idle()


def test_a_cached_prefix_is_not_counted_as_room_for_the_rest() -> None:
    """Six pages of the prefix can be evicted, but not by the request that is to read them."""
    driver = Driver(make_sizes(num_pages=13), SchedulerArgs(schedule_conservativeness=0.0))
    driver.submit(generate("seed", [1] * 25, 2))
    driver.run()
    driver.submit(generate("other", [2] * 12, 8))
    while not driver.tokens["other"]:
        driver.step()
    rank = driver.scheduler.ranks[0]
    assert rank.memory.cache.num_evictable[0] == 6
    driver.submit(generate("long", [1] * 38, 2))
    driver.step()
    assert driver.scheduler.num_waiting == 1
    driver.run()
    assert driver.scheduler.counters()["requests_retracted"] == 0
    for rid in driver.prompts:
        driver.check_tokens(rid)


def test_the_forecast_never_exceeds_what_running_requests_may_still_use() -> None:
    driver = Driver(make_sizes(num_pages=60), SchedulerArgs(schedule_conservativeness=10.0))
    driver.submit(generate("a", [1] * 8, 20))
    rank = driver.scheduler.ranks[0]
    for _ in range(6):
        driver.step()
        most = int(rank.memory.pages_to_grow(rank.running.active, np.array([28], np.int32)).sum())
        (room,) = driver.scheduler._all_ranks.forecast_rooms()
        assert room.most - room.num_in_use == most
        assert room.pages.max() <= room.most
    driver.run()
