"""Who gets memory next: retracted ones, then the longest cached prefix, but nobody never."""

import pytest

from sgl_jax.core.messages import GenerateRequest
from sgl_jax.core.sampling_params import SamplingParams
from sgl_jax.scheduler.request import Request
from sgl_jax.scheduler.waiting_queue import MAX_LOOKUPS, MAX_PASSED_OVER, WaitingQueue


def make_request(arrival: int, *, prompt_len: int = 1, dp_rank: int | None = None) -> Request:
    """The tests' cache is as long as the prompt."""
    message = GenerateRequest(
        rid=f"r{arrival}", input_ids=[0] * prompt_len, sampling=SamplingParams(), dp_rank=dp_rank
    )
    return Request(message, arrival, max_len=100)


def make_queue(policy: str, dp_size: int = 1) -> WaitingQueue:
    return WaitingQueue(policy, dp_size, cached_len=lambda request: request.prompt_len)


def order(queue: WaitingQueue, open_ranks: tuple[int, ...] = (0,)) -> list[int]:
    return [request.arrival for request in queue.ordered(open_ranks)]


def test_fcfs_is_the_order_of_arrival() -> None:
    queue = make_queue("fcfs")
    for arrival, prompt_len in enumerate([3, 9, 5]):
        queue.add(make_request(arrival, prompt_len=prompt_len))
    assert order(queue) == [0, 1, 2]


def test_lpm_is_the_longest_cached_prefix_then_arrival() -> None:
    queue = make_queue("lpm")
    for arrival, prompt_len in enumerate([3, 9, 5, 9]):
        queue.add(make_request(arrival, prompt_len=prompt_len))
    assert order(queue) == [1, 3, 2, 0]


@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
def test_retracted_requests_come_first_and_oldest_first(policy: str) -> None:
    queue = make_queue(policy)
    queue.add(make_request(0, prompt_len=50))
    for arrival in (5, 4):
        request = make_request(arrival)
        request.num_retractions = 1
        queue.add(request)
    assert order(queue) == [4, 5, 0]
    assert len(queue) == 3


def test_a_stream_of_cached_prompts_does_not_starve_an_uncached_one() -> None:
    queue = make_queue("lpm")
    queue.add(make_request(0, prompt_len=1))
    queue.add(make_request(1, prompt_len=9))
    for arrival in range(2, 3 * MAX_PASSED_OVER):
        first = queue.ordered([0])[0]
        queue.remove(first)
        if first.arrival == 0:
            assert arrival == MAX_PASSED_OVER + 2
            return
        queue.add(make_request(arrival, prompt_len=9))
    pytest.fail("the oldest request was passed over forever")


def test_requests_pinned_to_a_full_rank_do_not_hold_up_the_rest() -> None:
    queue = make_queue("lpm", dp_size=2)
    for arrival in range(MAX_LOOKUPS + 10):
        queue.add(make_request(arrival, dp_rank=0))
    queue.add(make_request(1000))
    queue.add(make_request(1001, dp_rank=1))
    assert order(queue, open_ranks=(1,)) == [1000, 1001]


@pytest.mark.parametrize("dp_size", [1, 4, 8])
def test_the_lookups_of_a_long_queue_are_limited_over_all_ranks(dp_size: int) -> None:
    looked_up = []

    def cached_len(request: Request) -> int:
        looked_up.append(request.arrival)
        return 0

    queue = WaitingQueue("lpm", dp_size, cached_len)
    for arrival in range(2000):
        queue.add(make_request(arrival))
    assert order(queue) == list(range(MAX_LOOKUPS // dp_size))
    assert len(looked_up) * dp_size <= MAX_LOOKUPS
