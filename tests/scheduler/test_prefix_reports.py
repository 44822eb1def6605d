"""Public bug reports about prefix caches of SGLang and vLLM, on models with windows and states.

Every step is checked by the oracle (`driver.py`): a row that reads a wrong page or state, or a page
without an owner, fails the test.

    shorter than a page      sglang 26450, 28692: it ended the scheduler, or broke the tree
    whole pages              sglang 22935, 27291, vllm 51094: the last token is computed again, so a
                             repeated prompt ended between two positions that can be resumed
    the last page differs    vllm 57610: a window was kept only for the end of the longer prompt
    in turn                  vllm 48435, sglang 35515: a shortage of windows ended all prefixes
    idle and busy            sglang 35515: growth of one conversation ended that of an idle one
    a full pool              vllm 42948: a prompt's own prefix was evicted for the rest of it
    priorities               vllm 52897: no prefix with states was found in this order
    aborted fetches          sglang 9874, 16369, 30053, 40262: each left host memory in use
    a fetch for two fails    sglang fork of bytedance-iaas 768: the other one read its pages
"""

import numpy as np
import pytest

from sgl_jax.core.engine_sizes import FULL_ATTENTION, LAST_VALUE, CacheGroup
from sgl_jax.core.scheduler_args import SchedulerArgs
from tests.scheduler.driver import Driver, generate, make_sizes
from tests.support.long import long_but

PAGE = 4
GROUPS = {
    "full": FULL_ATTENTION,
    "a window": (*FULL_ATTENTION, CacheGroup(9, 1)),
    "a window below a page": (*FULL_ATTENTION, CacheGroup(2, 1)),
    "states": (*FULL_ATTENTION, CacheGroup(LAST_VALUE, 1, is_recurrent=True)),
}


def make_driver(
    groups: str,
    args: SchedulerArgs | None = None,
    *,
    num_pages: int = 200,
    second_pool: int | None = None,
    host_ratio: float = 0.0,
) -> Driver:
    """An engine with so many pages, and windows' pages or snapshots in the second pool."""
    states = (second_pool or 60, 1, 1) if groups == "states" else None
    sizes = make_sizes(
        page_size=PAGE,
        num_pages=num_pages,
        max_chunk_tokens=16,
        groups=GROUPS[groups],
        states=states,
        host_ratio=host_ratio,
    )
    if second_pool is not None and states is None:
        sizes = sizes._replace(pool_pages=(num_pages, 1 + second_pool))
    return Driver(sizes, args)


def numbers(seed: int, count: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(0, 50, count).tolist()
    return tokens


def run(driver: Driver, rid: str, prompt: list[int], num_new: int = 1, priority: int = 0) -> int:
    """Serve a prompt alone; return its cached tokens."""
    driver.submit(generate(rid, prompt, num_new, priority=priority))
    driver.run()
    driver.check_tokens(rid)
    return driver.cached[rid]


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("length", long_but([1, 3, 4, 5], 3, 4))
def test_a_prompt_about_as_long_as_a_page(groups: str, length: int) -> None:
    driver = make_driver(groups)
    long = numbers(1, 16)
    run(driver, "long", long)
    whole = (length - 1) // PAGE * PAGE
    assert run(driver, "beginning", long[:length]) == whole
    assert run(driver, "other", numbers(2, length)) == 0
    assert run(driver, "again", numbers(2, length)) == whole
    memory = driver.scheduler.ranks[0].memory
    memory.cache.evict(100, 0)
    assert memory.allocator.num_tree == 0


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("has_host", [False, True])
def test_a_prompt_of_whole_pages_is_found_up_to_its_last_page(groups: str, has_host: bool) -> None:
    args = SchedulerArgs(hicache_fetch_policy="always")
    driver = make_driver(groups, args, host_ratio=4.0 if has_host else 0.0)
    if has_host:
        driver.oracle.host.end_rate = 1.0
    prompt = numbers(1, 40)
    run(driver, "first", prompt)
    if has_host:
        driver.scheduler.ranks[0].memory.cache.reset()
    assert run(driver, "second", prompt) == 36
    assert run(driver, "third", prompt) == 36


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("num_other", long_but([1, 2, 3, 4, 5, 8], 1, 5))
def test_a_prompt_whose_end_was_changed_finds_the_pages_before_it(
    groups: str, num_other: int
) -> None:
    driver = make_driver(groups)
    prompt = numbers(1, 40)
    run(driver, "first", prompt)
    changed = prompt[:-num_other] + [(each + 1) % 50 for each in prompt[-num_other:]]
    shared = (40 - num_other) // PAGE * PAGE
    assert run(driver, "second", changed) == shared


@pytest.mark.parametrize("groups", ["a window", "states"])
def test_conversations_in_turn_keep_what_each_needs(groups: str) -> None:
    """Their second pool has place for the ends of all, and for the row of one turn."""
    ends = 12 * (3 if groups == "a window" else 1)
    driver = make_driver(groups, num_pages=400, second_pool=ends + 12)
    histories = [numbers(seed, 41) for seed in range(12)]
    for turn in range(4):
        for number, history in enumerate(histories):
            cached = run(driver, f"{number} {turn}", history)
            if turn:
                assert cached >= len(history) - 12, (number, turn)
            histories[number] = history + numbers(100 * turn + number, 7)


@pytest.mark.parametrize("groups", ["a window", "states"])
def test_a_busy_conversation_leaves_an_idle_one_its_end(groups: str) -> None:
    driver = make_driver(groups, num_pages=400, second_pool=24)
    idle, busy = numbers(1, 41), numbers(2, 41)
    run(driver, "idle", idle)
    for turn in range(24):
        run(driver, f"busy {turn}", busy)
        busy = busy + numbers(10 + turn, 7)
    assert run(driver, "back", idle) == 40


@pytest.mark.parametrize("groups", long_but(GROUPS, "states"))
def test_a_prompts_prefix_stays_while_the_rest_takes_the_last_pages(groups: str) -> None:
    driver = make_driver(groups, num_pages=32)
    prompt = numbers(1, 61)
    run(driver, "first", prompt)
    run(driver, "other", numbers(2, 61))  # the pool is full, and the first prompt is the oldest
    assert run(driver, "second", prompt + numbers(3, 52)) == 60


@pytest.mark.parametrize("groups", long_but(GROUPS, "states"))
def test_prefixes_are_found_with_priorities(groups: str) -> None:
    driver = make_driver(groups, SchedulerArgs(enable_priority_scheduling=True))
    prompt = numbers(1, 41)
    run(driver, "first", prompt, priority=3)
    assert run(driver, "second", prompt + numbers(2, 9), priority=1) == 40


@pytest.mark.parametrize("groups", long_but(GROUPS, "a window"))
def test_aborts_during_fetches_leave_the_host_as_it_was(groups: str) -> None:
    driver = make_driver(groups, SchedulerArgs(hicache_fetch_policy="always"), host_ratio=4.0)
    driver.oracle.host.end_rate = 1.0
    prompt = numbers(1, 41)
    run(driver, "first", prompt)
    (rank,) = driver.scheduler.ranks
    rank.memory.cache.reset()
    for number in range(20):
        driver.oracle.host.end_rate = 0.0
        driver.submit(generate(f"aborted {number}", prompt, 4))
        driver.step()
        assert driver.scheduler.why_waiting(f"aborted {number}").kind == "fetch"
        driver.abort(f"aborted {number}")
        driver.oracle.host.end_rate = 1.0
        driver.run()
        rank.memory.cache.reset()
    assert run(driver, "last", prompt) == 40


@pytest.mark.parametrize("groups", long_but(GROUPS, "a window"))
def test_two_requests_compute_what_a_failed_fetch_would_have_brought(groups: str) -> None:
    driver = make_driver(groups, SchedulerArgs(hicache_fetch_policy="always"), host_ratio=4.0)
    driver.oracle.host.end_rate = 1.0
    prompt = numbers(1, 41)
    run(driver, "first", prompt)
    driver.scheduler.ranks[0].memory.cache.reset()
    driver.oracle.host.failure_rate = 1.0
    for number in range(2):
        driver.submit(generate(f"r{number}", [*prompt, number], 4))
    driver.run()
    for number in range(2):
        driver.check_tokens(f"r{number}")
    assert driver.cached["r0"] == 0
