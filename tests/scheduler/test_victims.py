"""Short of memory, the request goes that costs least to bring back, and none is robbed for ever."""

from typing import Any

import numpy as np

from sgl_jax.core.scheduler_args import SchedulerArgs
from sgl_jax.scheduler.events import Flush
from sgl_jax.scheduler.preemption import by_cost, is_protected, recompute_cost
from sgl_jax.scheduler.rank_scheduler import RankScheduler
from tests.scheduler.driver import Driver, generate, make_sizes

STEM = list(range(16))


def make_driver(**sizes: Any) -> Driver:
    """A rank that reserves nothing, without unread steps."""
    settings: dict[str, Any] = {"num_pages": 33, "max_chunk_tokens": 64} | sizes
    return Driver(
        make_sizes(**settings), SchedulerArgs(schedule_conservativeness=0.0), max_unread=0
    )


def row_of(driver: Driver, rid: str) -> int:
    lease = driver.scheduler._requests[rid].lease
    assert lease is not None, f"{rid} does not run"
    return lease.row


def rows_of(driver: Driver, *rids: str) -> tuple[RankScheduler, np.ndarray]:
    return driver.scheduler.ranks[0], np.array([row_of(driver, rid) for rid in rids])


def test_a_shared_prefix_costs_nothing() -> None:
    driver = make_driver()
    driver.submit(generate("first", [*STEM, 40, 41, 42, 43], 20))
    driver.step()
    driver.submit(generate("second", [*STEM, 44, 45], 20))
    driver.submit(generate("alone", list(range(20, 40)), 20))
    driver.step()
    rank, rows = rows_of(driver, "first", "second", "alone")
    assert recompute_cost(rank.memory, rows).tolist() == [21 - 16, 18 - 16, 20]
    assert by_cost(rank.memory, rank.running, rows).tolist() == [1, 0, 2]
    driver.abort("second")
    rank, rows = rows_of(driver, "first", "alone")
    assert recompute_cost(rank.memory, rows).tolist() == [21, 20]


def test_of_equals_the_youngest_goes() -> None:
    driver = make_driver()
    for rid in "abc":
        driver.submit(generate(rid, [ord(rid) % 50] * 8, 20))
    driver.step()
    rank, rows = rows_of(driver, "a", "b", "c")
    assert by_cost(rank.memory, rank.running, rows).tolist() == [2, 1, 0]


def test_what_lost_tokens_is_spared_until_it_has_gained_as_many() -> None:
    driver = make_driver()
    driver.submit(generate("a", list(range(10)), 40))
    for _ in range(3):
        driver.step()
    driver.retract("a")
    driver.scheduler.handle(Flush())  # the tree has none of it any more
    driver.step()
    spared = []
    for _ in range(20):
        rank, rows = rows_of(driver, "a")
        gained = int(rank.columns.known_len[rows[0]]) - 13
        spared.append((gained, bool(is_protected(rank.running, rows)[0])))
        driver.step()
    assert spared == [(n, n < 12) for n in range(1, 21)]


def test_a_debt_outlives_a_retract_that_could_not_be_helped() -> None:
    driver = make_driver()
    driver.submit(generate("a", list(range(10)), 60))
    lost = 0
    for computed in (9 + 3, 9 + 3 + 2):
        for _ in range(3 if computed == 12 else 2):
            driver.step()
        driver.retract("a")
        driver.scheduler.handle(Flush())
        lost += computed
    driver.step()
    rank, rows = rows_of(driver, "a")
    assert int(rank.columns.regained_len[rows[0]]) == 10 + 5 + lost - 2


def test_what_the_tree_kept_is_not_lost() -> None:
    driver = make_driver()
    driver.submit(generate("a", list(range(12)), 40))
    for _ in range(2):
        driver.step()
    driver.retract("a")
    driver.step()
    rank, rows = rows_of(driver, "a")
    assert int(rank.columns.regained_len[rows[0]]) == 14 + 13 - 12
