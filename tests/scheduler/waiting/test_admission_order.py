"""However many wait, they are tried in one order: all, and none twice."""

import numpy as np
import pytest

from sgl_jax.core.step_plan import BoolArray
from sgl_jax.scheduler.forecast.fits import NEVER
from sgl_jax.scheduler.forecast.output_lengths import Int64Array
from sgl_jax.scheduler.waiting.admission_order import _sorted_part
from sgl_jax.scheduler.waiting.queue_loops import LAST, MOST_ARRIVALS, order_keys
from sgl_jax.scheduler.waiting.waiting_columns import Lines
from tests.scheduler.waiting.test_waiting_queue import Queue

# Around the size of the first part, 64, which is sorted by itself.
COUNTS = [0, 1, 63, 64, 65, 66, 200]


@pytest.mark.parametrize("num_left_out", [0, 1, 100])
@pytest.mark.parametrize("count", COUNTS)
def test_lines_come_by_their_keys_and_those_without_one_are_left_out(
    count: int, num_left_out: int
) -> None:
    keys = np.full(count + num_left_out, LAST, np.int64)
    lines = np.random.default_rng(count).permutation(len(keys))[:count]
    keys[lines] = np.arange(count) << 40
    first, rest = _sorted_part((keys != LAST).nonzero()[0], keys, 64)
    last, none = _sorted_part(rest, keys, len(rest))
    assert np.concatenate((first, last)).tolist() == lines.tolist()
    assert len(first) >= min(count, 5)
    assert count < 200 or len(first) < count
    assert not len(none)


@pytest.mark.parametrize("count", COUNTS)
def test_all_are_tried_once_in_their_order(count: int) -> None:
    queue = Queue("fcfs", dp_size=2)
    expected = []
    for arrival in range(count):
        priority = arrival * 37 % 5
        queue.add(arrival, priority=priority)
        queue.add(1000 + arrival, priority=priority, dp_rank=0)  # is not tried
        expected.append((-priority, arrival))
    assert queue.order(open_ranks=(1,)) == [arrival for _, arrival in sorted(expected)]


def test_one_that_fits_is_found_behind_many_that_do_not_as_is_one_that_is_due() -> None:
    queue = Queue("fcfs", cached_len=0)
    for arrival in range(100):
        queue.add(arrival, 32, priority=1)
    for arrival in (100, 101, 102):
        queue.add(arrival, 32 if arrival == 101 else 0)
    queue.waiting._columns.lines.skip_count[queue.waiting._requests["r101"].line] = 2**30
    tried = queue.waiting.candidates(queue.offer(3), 0, [], 0)
    found = [(request.arrival, may_start) for request, may_start in tried]
    assert found == [(101, False), (100, True), (102, True)]


# -- keys ---------------------------------------------------------------------------------------


def keys_of(arrivals: list[int], may_start: BoolArray | None = None) -> Int64Array:
    """The keys of requests that differ by their arrivals alone."""
    count = len(arrivals)
    least, lines = np.ones((1, count), np.int32), Lines.empty(1, count)
    lines.arrival[:] = arrivals
    if may_start is not None:
        least[0, ~may_start] = NEVER
    keys, lines_with_keys = order_keys(
        least,
        False,
        False,
        np.zeros(count, np.int64),
        np.zeros(count, np.int32),
        np.zeros(count, np.bool_),
        lines,
    )
    assert lines_with_keys.tolist() == (keys != LAST).nonzero()[0].tolist()
    return keys


def test_keys_are_in_the_order_of_arrival() -> None:
    arrivals = [7, 5, MOST_ARRIVALS - 5, 6]
    assert keys_of(arrivals).argsort().tolist() == [1, 3, 0, 2]


def test_arrivals_count_from_the_first_that_may_start() -> None:
    far = 2**40
    keys = keys_of([0, far + 2, far, far + 1], np.array([False, True, True, True]))
    assert keys[0] == LAST
    assert keys.argsort().tolist() == [2, 3, 1, 0]


@pytest.mark.parametrize("is_thrashing", [False, True])
def test_due_requests_come_by_arrival_and_the_rest_by_tokens(*, is_thrashing: bool) -> None:
    least, lines = np.ones((1, 4), np.int32), Lines.empty(1, 4)
    lines.arrival[:] = [0, 1, 2, 3]
    lines.needs["pages"] = 9
    lines.most_cached[:] = [1, 5, 1, 5]
    keys, _ = order_keys(
        least,
        True,
        is_thrashing,
        np.zeros(4, np.int64),
        np.zeros(4, np.int32),
        np.array([False, False, True, True]),
        lines,
    )
    assert keys.argsort().tolist() == [2, 3, 1, 0]
