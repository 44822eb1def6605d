"""The reserve follows the lengths of outputs, those that still run among them."""

import numpy as np
import pytest

from sgl_jax.core.scheduler_args import SchedulerArgs
from sgl_jax.scheduler.admission.output_lengths import OutputLengths
from sgl_jax.scheduler.admission.reserve import AdmissionReserve
from sgl_jax.scheduler.running_rows import RowColumns
from tests.scheduler.driver import Driver, generate, make_sizes

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


def test_a_prior_expects_that_what_has_come_far_goes_on() -> None:
    lengths = OutputLengths()
    assert chance_to_pass(lengths, 256) == 1
    assert chance_to_pass(lengths, 512) == pytest.approx(0.5**0.5, rel=0.01)
    assert chance_to_pass(lengths, 1024) == pytest.approx(0.5, rel=0.01)


def test_outputs_that_ended_are_expected_again() -> None:
    lengths = OutputLengths()
    for _ in range(60):
        lengths.add(CLASS, 100, has_ended=True)
    assert chance_to_pass(lengths, 96) > 0.99
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


def reserve_of(driver: Driver, lengths: OutputLengths, conservativeness: float = 1.0) -> int:
    rank = driver.scheduler.ranks[0]
    return AdmissionReserve(lengths, conservativeness).pages(rank.memory, rank.running)


def test_the_reserve_shrinks_where_outputs_are_short_and_scales() -> None:
    driver = Driver(make_sizes(num_pages=140, max_context_len=300), SchedulerArgs())
    lengths = driver.scheduler._all_ranks.output_lengths
    assert reserve_of(driver, lengths) == 0
    for rid in "abc":
        driver.submit(generate(rid, [1] * 4, 200))
        driver.step()
    before = reserve_of(driver, lengths)
    assert abs(reserve_of(driver, lengths, 0.5) - before / 2) <= 1
    assert reserve_of(driver, lengths, 0.0) <= 3  # the next tokens of those that run
    for _ in range(100):
        lengths.add(1, 20, has_ended=True)
    lengths.update(driver.scheduler._all_ranks.running, np.zeros(0, np.intp))
    assert 0 < reserve_of(driver, lengths) < before / 3


def test_the_sums_of_a_step_count_one_more_like_the_youngest_alone() -> None:
    """A request with a short limit starts after one with a long limit, in the same step."""
    driver = Driver(
        make_sizes(num_pages=400, max_context_len=300, max_chunk_tokens=64), SchedulerArgs()
    )
    for number, max_new_tokens in enumerate((250, 3)):
        driver.submit(generate(f"r{number}", [number] * 4, max_new_tokens))
    driver.step()
    ranks = driver.scheduler._all_ranks
    running = ranks.ranks[0].running.active
    assert len(running) == 2
    forecast = ranks.forecast()
    forecast.recount(0, running[:1])
    forecast.start(0, int(running[1]))
    assert forecast.pages(slice(0, 1)) == [reserve_of(driver, ranks.output_lengths)]
