"""The forecast follows the lengths of outputs, those that still run among them."""

import numpy as np
import pytest

from sgl_jax.core.messages import StopRequest
from sgl_jax.core.scheduler_args import SchedulerArgs
from sgl_jax.scheduler.events import Configure, Resume
from sgl_jax.scheduler.forecast.output_lengths import MOMENTS, OutputLengths, _bucket_of
from sgl_jax.scheduler.running_rows import RowColumns
from tests.scheduler.driver import Driver, generate, make_sizes
from tests.scheduler.liveness import pages_in_use

CLASS = 0


def chance_to_pass(lengths: OutputLengths, num_tokens: int) -> float:
    """Of an output that has begun, to reach so many tokens; updated without running requests."""
    lengths.update(RowColumns.empty(1, 8, 1), np.zeros(0, np.intp))
    return chance_now(lengths, num_tokens)


def chance_now(lengths: OutputLengths, num_tokens: int) -> float:
    bucket = int(np.searchsorted(lengths.starts, num_tokens, "right")) - 1
    return float(lengths.survival[CLASS, bucket])


def test_buckets_are_an_eighth_of_a_doubling() -> None:
    starts = OutputLengths().starts
    assert starts[:18].tolist() == [*range(16), 16, 18]
    assert (np.diff(starts) > 0).all()
    assert (np.diff(starts)[16:] <= starts[16:-1] / 8).all()


def test_the_bucket_of_a_length_is_the_last_that_starts_up_to_it() -> None:
    starts = OutputLengths().starts
    for start in starts.tolist():
        for num_tokens in (start, start + 1, max(start - 1, 0)):
            expected = int(np.searchsorted(starts, num_tokens, "right")) - 1
            assert _bucket_of(num_tokens, len(starts)) == expected
    for num_tokens in (2 * int(starts[-1]), 2**31 - 1):
        assert _bucket_of(num_tokens, len(starts)) == len(starts) - 1


def test_a_prior_expects_that_what_has_come_far_goes_on() -> None:
    lengths = OutputLengths()
    assert chance_to_pass(lengths, 32) == 1
    assert chance_to_pass(lengths, 64) == pytest.approx(0.5**0.5, rel=0.01)
    assert chance_to_pass(lengths, 128) == pytest.approx(0.5, rel=0.01)


def test_outputs_that_ended_are_expected_again() -> None:
    lengths = OutputLengths()
    for _ in range(60):
        lengths.add(CLASS, 100, has_ended=True)
    assert chance_to_pass(lengths, 96) > 0.97
    assert chance_to_pass(lengths, 112) < 0.1


def test_an_output_that_was_cut_off_counts_as_far_as_it_came() -> None:
    lengths = OutputLengths()
    for _ in range(60):
        lengths.add(CLASS, 2000, has_ended=False)
    assert chance_to_pass(lengths, 1900) > 0.9
    assert chance_to_pass(lengths, 8192) < 0.6


def test_later_outputs_count_more() -> None:
    lengths = OutputLengths()
    for num_tokens in (1000, 50):
        for _ in range(300):
            lengths.add(CLASS, num_tokens, has_ended=True)
    assert chance_to_pass(lengths, 64) < 0.15


def test_running_requests_count_before_any_has_ended() -> None:
    lengths, columns = OutputLengths(), RowColumns.empty(40, 8, 1)
    columns.planned_len[:] = 3000
    lengths.update(columns, np.arange(40))
    assert chance_now(lengths, 2048) > 0.9


def growth_of(driver: Driver, conservativeness: float = 1.0) -> float:
    """The pages by which the running requests are forecast to grow, at the peak."""
    ranks = driver.scheduler._all_ranks
    ranks._empty_rooms["conservativeness"] = conservativeness
    (room,) = ranks.forecast_rooms()
    return float(room.pages.max()) - int(room.num_in_use)


def test_the_forecast_shrinks_where_outputs_are_short_and_scales() -> None:
    driver = Driver(make_sizes(num_pages=140, max_context_len=300), SchedulerArgs())
    lengths = driver.scheduler._all_ranks.output_lengths
    assert growth_of(driver) == 0
    for rid in "abc":
        driver.submit(generate(rid, [1] * 4, 200))
        driver.step()
    before = growth_of(driver)
    assert growth_of(driver, 0.5) == pytest.approx(before / 2)
    assert growth_of(driver, 0.0) <= 3  # the next tokens of those that run
    for _ in range(100):
        lengths.add(1, 20, has_ended=True)
    lengths.update(driver.scheduler._all_ranks.running, np.zeros(0, np.intp))
    assert 0 < growth_of(driver) < before / 3


def test_the_forecast_is_the_mean_and_a_part_of_the_deviation_of_all_requests() -> None:
    """Two share a prefix of 10 pages: each gives back its part of these as it ends."""
    driver = Driver(
        make_sizes(num_pages=400, max_context_len=300, max_chunk_tokens=64), SchedulerArgs()
    )
    shared = list(range(40))
    driver.submit(generate("first", [*shared, 41], 120))
    for _ in range(4):
        driver.step()
    driver.submit(generate("second", [*shared, 42, 43], 40))
    for _ in range(4):
        driver.step()
    ranks = driver.scheduler._all_ranks
    lengths, running, rows = ranks.output_lengths, ranks.running, ranks.ranks[0].running.active
    (room,) = ranks.forecast_rooms()
    tables = -(-ranks.tables.kv_allocated_len[rows] // 4)
    assert room.num_in_use == len(pages_in_use(ranks.ranks[0])) < tables.sum() - 8
    part = room.num_in_use / tables.sum()
    for j in range(1, len(MOMENTS) - 1):
        ahead, mean, variance, most = int(MOMENTS[j] + MOMENTS[j + 1]) // 2, 0.0, 0.0, 0.0
        for row, listed in zip(rows, tables, strict=True):
            left = int(running.max_len[row] - running.planned_len[row])
            if MOMENTS[j] >= left:
                continue
            output_len = int(running.planned_len[row] - running.prompt_len[row])
            number = int(running.length_class[row])
            bucket = int(np.searchsorted(lengths.starts, output_len, "right")) - 1
            max_len = int(running.max_len[row]) - 1  # with KV
            next_len = min(int(running.planned_len[row]) + 1, max_len)
            known = -(-next_len // 4) - int(listed)
            growth = -(-max_len // 4) - int(listed) - known
            chance = lengths.chances[number, bucket][MOMENTS[:-1] <= ahead][-1]
            pages = part * listed + known + growth * min(ahead / left, 1)
            mean += chance * pages
            variance += chance * (1 - chance) * pages**2
            most += pages * (chance > 0)
        expected = min(mean + variance**0.5 / 4, most)
        assert room.pages[j] == pytest.approx(expected), MOMENTS[j]


def test_the_sums_of_a_step_equal_those_of_all_requests() -> None:
    driver = Driver(
        make_sizes(num_pages=400, max_context_len=300, max_chunk_tokens=64), SchedulerArgs()
    )
    for number, max_new_tokens in enumerate((250, 3)):
        driver.submit(generate(f"r{number}", [number] * 4, max_new_tokens))
    driver.step()
    ranks = driver.scheduler._all_ranks
    running = ranks.ranks[0].running.active
    assert len(running) == 2
    forecast, rooms = ranks.forecast(), ranks.rooms()
    forecast.recount(0, running[:1])
    forecast.start(0, int(running[1]))
    forecast.write(0, rooms)
    (room,), (expected,) = rooms, ranks.forecast_rooms()
    assert room.pages.tolist() == expected.pages.tolist()
    assert (room.most, room.num_in_use, room.peak) == (
        expected.most,
        expected.num_in_use,
        expected.peak,
    )


@pytest.mark.parametrize("most", [8, 64])
def test_a_prompt_that_takes_many_steps_is_expected_to_stay_as_long(most: int) -> None:
    """Its limit of three tokens counts from the end of its prompt, in 25 steps."""
    driver = Driver(
        make_sizes(num_pages=400, max_context_len=300, max_chunk_tokens=most), SchedulerArgs()
    )
    driver.scheduler.handle(Configure(SchedulerArgs(), chunk_tokens=8))
    driver.submit(generate("long", list(range(200 % 50)) + [1] * 200, 3))
    driver.step()
    (room,) = driver.scheduler._all_ranks.forecast_rooms()
    is_held = room.pages * 4 >= 200
    assert MOMENTS[: len(is_held)][is_held].max() == 24
    assert room.pages[-1] == 0


@pytest.mark.parametrize("way", ["aborted", "timed out", "stopped"])
def test_an_output_that_its_client_ends_is_expected_again(way: str) -> None:
    driver = Driver(
        make_sizes(num_pages=400, max_context_len=300),
        SchedulerArgs(request_timeout=1.0 if way == "timed out" else None),
    )
    lengths = driver.scheduler._all_ranks.output_lengths
    for number in range(40):
        rid = f"r{number}"
        driver.tick(10.0 * number)
        driver.submit(generate(rid, [1] * 4, 200))
        while len(driver.tokens[rid]) < 20:
            driver.step()
        if way == "aborted":
            driver.abort(rid)
        elif way == "timed out":
            driver.tick(10.0 * number + 2)
        else:
            driver.scheduler.handle(StopRequest(rid=rid, num_output_tokens=20))
        driver.run()
    assert chance_to_pass(lengths, 16) > 0.9
    assert chance_to_pass(lengths, 32) < 0.3


def test_an_output_that_came_to_its_limit_was_only_cut_off() -> None:
    driver = Driver(make_sizes(num_pages=400, max_context_len=300))
    for number in range(40):
        driver.submit(generate(f"r{number}", [1] * 4, 20))
        driver.run()
    assert chance_to_pass(driver.scheduler._all_ranks.output_lengths, 32) > 0.9


def test_what_the_engine_itself_ends_was_only_cut_off() -> None:
    driver = Driver(make_sizes(num_pages=400, max_context_len=300))
    lengths = driver.scheduler._all_ranks.output_lengths
    for number in range(40):
        driver.submit(generate(f"r{number}", [1] * 4, 200))
        while len(driver.tokens[f"r{number}"]) < 20:
            driver.step()
        driver.pause("abort")
        driver.scheduler.handle(Resume())
        driver.run()
    assert chance_to_pass(lengths, 32) > 0.9
