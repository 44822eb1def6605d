"""Who is tried next: by priority, those that are due, retracted ones, the longest cached prefix."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from sgl_jax.core.messages import GenerateRequest
from sgl_jax.core.sampling_params import SamplingParams
from sgl_jax.core.scheduler_args import SchedulerArgs
from sgl_jax.core.shares import Tenant
from sgl_jax.mem_cache.rank_memory import RankMemory
from sgl_jax.mem_cache.release import publish_prefix, release_kv_cache
from sgl_jax.mem_cache.tree.cache_walk import audit_cache
from sgl_jax.scheduler.ranks import Ranks
from sgl_jax.scheduler.request import Request
from sgl_jax.scheduler.tenants import MAX_TENANTS
from sgl_jax.scheduler.waiting.admission_order import Offer, _sorted_part
from sgl_jax.scheduler.waiting.queue_loops import LAST, MOST_ARRIVALS, order_keys
from sgl_jax.scheduler.waiting.waiting_columns import Lines
from sgl_jax.scheduler.waiting.waiting_queue import MAX_SKIP_COUNT, WaitingQueue
from tests.scheduler.driver import make_sizes
from tests.scheduler.liveness import due_of

STEM = list(range(32))
PLENTY = 1000  # pages


class Queue:
    """A queue before ranks whose trees hold the first tokens of `STEM`, rank r 8 * r of them."""

    def __init__(
        self,
        policy: str = "lpm",
        dp_size: int = 1,
        cached_len: int = 32,
        fair_share: str = "off",
    ) -> None:
        sizes = make_sizes(dp_size=dp_size, num_pages=64)
        ranks = Ranks(sizes, SchedulerArgs(fair_share=fair_share))
        self.memories, self.tenants = ranks.memories, ranks.tenants
        self._rooms = ranks.rooms()
        self.waiting = WaitingQueue(
            policy,
            self.memories,
            ranks.tables,
            capacity=2048,
            tenants=ranks.tenants,
            lengths=ranks.output_lengths,
        )
        if cached_len:
            cache(self.memories[-1], STEM[:cached_len])

    def add(
        self, arrival: int, prefix_len: int = 0, tokens: list[int] | None = None, **kwargs: Any
    ) -> Request:
        """A request of `tokens`, or one that begins with so much of the stem."""
        settings: dict[str, Any] = {"num_retractions": 0, "priority": 0} | kwargs
        message = GenerateRequest(
            rid=f"r{arrival}",
            input_ids=STEM[:prefix_len] + [49] * 5 if tokens is None else tokens,
            sampling=SamplingParams(),
            dp_rank=settings.pop("dp_rank", None),
        )
        request = Request(message, arrival, max_len=100)
        for name, value in settings.items():
            setattr(request, name, value)
        self.waiting.add(request)
        return request

    def order(self, room: int = 60, open_ranks: tuple[int, ...] | None = None) -> list[int]:
        return [r.arrival for r in self.tried(self.offer(room, open_ranks))]

    def offer(self, room: int, open_ranks: tuple[int, ...] | None = None) -> Offer:
        count = len(self.memories)
        rooms = self._rooms.copy()
        rooms["conservativeness"] = 0.0
        rooms["most"] = rooms["total"]  # no request fits by its limit
        rooms["pages"] = (rooms["total"] - room)[:, None]
        is_open = range(count) if open_ranks is None else open_ranks
        rooms["is_open"] = np.isin(np.arange(count), is_open)
        open_tenants = np.zeros((count, MAX_TENANTS + 1), np.bool_)
        return Offer(rooms, np.zeros(count, np.bool_), open_tenants, passed_by=[], started_on=[])

    def tried(self, offer: Offer) -> Iterator[Request]:
        return (request for request, _ in self.waiting.candidates(offer, 0, [], 0))


def leave(offer: Offer, room: int) -> None:
    """Only so many pages are left on the first rank."""
    offer.rooms["pages"][0] = offer.rooms["total"][0] - room


def cache(memory: RankMemory, tokens: list[int]) -> None:
    """Put the whole pages of `tokens` on the tree."""
    array = np.array(tokens, np.int32)
    lease = memory.open_lease(array[:0])
    assert memory.grow_rows(np.array([lease.row]), np.array([len(tokens)]))
    memory.commit_rows(np.array([lease.row]), np.array([len(tokens)]))
    release_kv_cache(memory, lease, array, insert=True)


def test_fcfs_is_the_order_of_arrival() -> None:
    queue = Queue("fcfs")
    for arrival, prefix_len in enumerate([3, 16, 8]):
        queue.add(arrival, prefix_len)
    assert queue.order() == [0, 1, 2]


def test_lpm_is_the_longest_cached_prefix_then_arrival() -> None:
    queue = Queue("lpm")
    for arrival, prefix_len in enumerate([4, 16, 8, 16]):
        queue.add(arrival, prefix_len)
    assert queue.order() == [1, 3, 2, 0]


def test_while_a_rank_thrashes_the_fewest_pages_to_compute_come_first() -> None:
    queue = Queue("lpm")
    queue.add(0, tokens=[*STEM, *[49] * 40])  # ten pages
    queue.add(1, tokens=[48] * 20)
    queue.add(2, tokens=[*STEM[:16], *[49] * 8])
    assert queue.order() == [0, 2, 1]
    tried = queue.waiting.candidates(queue.offer(60), 0, [], 0, is_thrashing=True)
    assert [request.arrival for request, _ in tried] == [2, 1, 0]
    assert queue.order() == [0, 2, 1]


def test_what_is_cached_is_known_when_it_changes_without_a_lookup() -> None:
    queue = Queue("lpm", cached_len=0)
    queue.add(0)
    queue.add(1, 16)
    assert queue.order() == [0, 1]
    cache(queue.memories[0], STEM)
    assert queue.order() == [1, 0]
    queue.memories[0].cache.reset()
    assert queue.order() == [0, 1]


@pytest.mark.parametrize(
    ("policy", "fair_share", "order"),
    [
        ("lpm", "tokens", [6, 3, 4, 1, 2, 7, 5, 8]),
        ("lpm", "off", [6, 1, 2, 3, 4, 5, 7, 8]),
        ("fcfs", "tokens", [1, 2, 3, 4, 6, 5, 7, 8]),
    ],
)
def test_of_a_tenant_those_go_first_that_others_would_read(
    policy: str, fair_share: str, order: list[int]
) -> None:
    queue = Queue(policy, fair_share=fair_share)
    alone, other, shared = ([first + i for i in range(16)] for first in (50, 70, 90))
    a, b = (queue.tenants.enter(Tenant(name=name)) for name in "ab")
    queue.tenants.serve_prompt(b, 10, 0)  # less than a quantum
    queue.add(1, tokens=alone, tenant=a)
    queue.add(2, tokens=alone[:4] * 4, tenant=a)  # begins as another does, and goes on alone
    queue.add(3, tokens=shared, tenant=a)
    queue.add(4, tokens=[*shared, *alone], tenant=a)
    queue.add(5, tokens=other[-5:], tenant=b)
    queue.add(6, 8, tenant=a)  # is cached
    queue.add(7, tokens=shared, tenant=b)
    queue.add(8, tokens=other * 2, tenant=b)
    assert queue.order() == order


def test_a_beginning_counts_for_all_prompts_that_part_behind_it() -> None:
    queue = Queue("lpm", fair_share="tokens")
    tenant = queue.tenants.enter(Tenant(name="a"))
    begin = list(range(50, 62))
    queue.add(0, tokens=list(range(70, 86)), tenant=tenant)
    queue.add(1, tokens=[*begin, *range(90, 98)], tenant=tenant)
    queue.add(2, tokens=[*begin, *range(100, 108)], tenant=tenant)
    assert queue.order() == [1, 2, 0]


@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
def test_retracted_requests_come_first_and_oldest_first(policy: str) -> None:
    queue = Queue(policy)
    queue.add(0, 32)
    for arrival in (5, 4):
        queue.add(arrival, num_retractions=1)
    assert queue.order() == [4, 5, 0]
    assert len(queue.waiting) == 3


def test_a_higher_priority_comes_before_all_of_a_lower_one() -> None:
    queue = Queue()
    queue.add(0, 32, priority=-(2**31))
    queue.add(1, num_retractions=1)
    queue.add(2, priority=2**31 - 1)
    queue.add(3, 8, priority=7)
    queue.add(4, priority=7)
    assert queue.order() == [2, 3, 4, 1, 0]


def test_a_stream_of_better_requests_does_not_starve_another() -> None:
    queue = Queue("lpm")
    oldest = queue.add(0)
    queue.add(1, 16)
    for arrival in range(2, 3 * MAX_SKIP_COUNT):
        first = queue.order()[0]
        if first == 0:
            assert arrival == MAX_SKIP_COUNT + 2
            assert due_of(queue.waiting) == [oldest]
            return
        (request,) = (r for r in queue.waiting if r.arrival == first)
        queue.waiting.started(request, 0, PLENTY)
        queue.add(arrival, 16)
    pytest.fail("the oldest request was passed over without end")


@pytest.mark.parametrize("priority", [1, 2**40])
def test_requests_of_a_higher_priority_pass_over_none(priority: int) -> None:
    queue = Queue()
    queue.add(0)
    for arrival in range(1, 2 * MAX_SKIP_COUNT):
        queue.waiting.started(queue.add(arrival, priority=priority), 0, PLENTY)
    assert due_of(queue.waiting) == []


def test_a_floor_leaves_out_its_own_priority_and_lower_ones() -> None:
    queue = Queue("fcfs")
    for arrival, priority in enumerate([3, 1, 2]):
        queue.add(arrival, priority=priority)
    offer = queue.offer(60)
    offer.rooms["floor"][0] = 1
    tried = queue.tried(offer)
    assert next(tried).arrival == 0
    offer.rooms["floor"][0] = 2
    assert list(tried) == []
    assert [request.arrival for request in queue.tried(offer)] == [0]


def test_a_floor_leaves_out_due_requests_as_well() -> None:
    queue = Queue("fcfs")
    queue.add(0)
    for arrival in range(1, MAX_SKIP_COUNT + 1):
        queue.waiting.started(queue.add(arrival), 0, PLENTY)
    assert [request.arrival for request in due_of(queue.waiting)] == [0]
    offer = queue.offer(0)
    assert [request.arrival for request in queue.tried(offer)] == [0]
    offer.rooms["floor"][0] = 0
    assert list(queue.tried(offer)) == []


def test_a_limit_of_tokens_leaves_out_longer_requests_of_the_lowest_priority_that_starts() -> None:
    queue = Queue(cached_len=0)
    queue.add(0, 8)
    queue.add(1, 0)
    queue.add(2, 8, priority=1)
    queue.add(3, 8, tenant=1)
    offer = queue.offer(60)
    offer.rooms["floor"] = -1
    lengths = [len(request.tokens) for request in queue.waiting]
    offer.rooms["most_tokens"] = min(lengths)
    assert min(lengths) < max(lengths)
    assert [request.arrival for request in queue.tried(offer)] == [2, 1]
    offer.open_tenants[0, 1] = True
    assert [request.arrival for request in queue.tried(offer)] == [2, 1, 3]


def test_a_limit_of_tokens_counts_those_that_the_rank_lacks() -> None:
    queue = Queue(dp_size=2)
    queue.add(0, 16)  # 21 tokens, of which rank 1 has 16
    offer = queue.offer(60)
    offer.rooms["floor"] = -1
    offer.rooms["most_tokens"] = 5
    assert [request.arrival for request in queue.tried(offer)] == [0]
    offer.rooms["floor"][1] = 0
    assert list(queue.tried(offer)) == []


def test_a_request_that_becomes_due_in_a_step_is_tried_in_it() -> None:
    queue = Queue("lpm", cached_len=32)
    queue.add(0, tokens=[7] * 60)  # fits nowhere
    for arrival in range(1, MAX_SKIP_COUNT):
        queue.waiting.started(queue.add(arrival), 0, PLENTY)
    queue.add(MAX_SKIP_COUNT, 16)  # has a longer prefix
    tried = queue.tried(queue.offer(6))
    first = next(tried)
    assert first.arrival == MAX_SKIP_COUNT
    queue.waiting.started(first, 0, PLENTY)
    assert [request.arrival for request in tried] == [0]


@pytest.mark.parametrize("num_equal", [0, 10, 200])
def test_lines_with_equal_keys_are_tried_in_their_order(num_equal: int) -> None:
    keys = np.random.default_rng(num_equal).permutation(300)
    keys[:num_equal] = 50
    keys[100:120] = LAST
    lines = (keys != LAST).nonzero()[0]
    order = np.argsort(keys, kind="stable")[: len(lines)]
    first, rest = _sorted_part(lines, keys, 64)
    last, none = _sorted_part(rest, keys, len(rest))
    assert [*first.tolist(), *last.tolist()] == order.tolist()
    assert len(first) >= min(5, len(lines))
    assert not len(none)


def test_more_requests_wait_than_a_key_tells_apart() -> None:
    end = MOST_ARRIVALS + 2
    lines, zeros = Lines.empty(1, end), np.zeros(end, np.int32)
    lines.arrival[:] = np.arange(end)
    no, least = np.zeros(end, np.bool_), np.zeros((1, end), np.int32)
    keys, _ = order_keys(least, False, False, zeros.astype(np.int64), zeros, no, lines)
    assert (np.diff(keys[:-1]) > 0).all()
    assert keys[-1] == keys[-2]


def test_what_a_start_brings_into_use_counts_for_those_behind_it() -> None:
    queue, other = Queue("fcfs"), [50 + token for token in STEM]
    cache(queue.memories[0], other)
    queue.add(0, tokens=other + [49] * 20)  # 14 pages, 8 of them cached, and none in use
    queue.add(1, 32)  # 10 pages, 8 of them cached
    queue.add(2, 16)  # 6 pages, 4 of them cached
    offer = queue.offer(10)
    tried = queue.tried(offer)
    first = next(tried)
    assert first.arrival == 1
    queue.memories[0].open_lease(np.array(STEM[:16], np.int32))
    queue.waiting.started(first, 0, PLENTY)  # the node is split, and the place of the rest unused
    offer.started_on.append(0)
    leave(offer, 2)
    assert [request.arrival for request in tried] == [2]


def test_requests_pinned_to_a_full_rank_do_not_hold_up_the_rest() -> None:
    queue = Queue("lpm", dp_size=2)
    for arrival in range(300):
        queue.add(arrival, dp_rank=0)
    queue.add(1000)
    queue.add(1001, dp_rank=1)
    assert queue.order(open_ranks=(1,)) == [1000, 1001]


def test_what_is_cached_makes_room_for_a_request_once_a_running_one_reads_it() -> None:
    queue = Queue("lpm")
    queue.add(0, 16)  # 22 tokens with the next: 6 pages, 4 of them cached
    assert queue.order(room=5) == []
    assert queue.order(room=6) == [0]
    queue.memories[0].open_lease(np.array(STEM[:16], np.int32))
    assert queue.order(room=1) == []
    assert queue.order(room=2) == [0]


def test_pages_of_a_prefix_are_in_use_on_their_rank_alone() -> None:
    queue = Queue("lpm", dp_size=2)  # cached on the last rank
    queue.add(0, 16)
    assert queue.order(room=5) == []
    queue.memories[0].open_lease(np.array(STEM[:16], np.int32))
    assert queue.order(room=5) == []
    queue.memories[1].open_lease(np.array(STEM[:16], np.int32))
    assert queue.order(room=1) == []
    assert queue.order(room=2) == [0]
    assert queue.order(room=5, open_ranks=(0,)) == []


def test_those_whose_prefix_is_in_use_are_found_among_many_with_a_cached_one() -> None:
    queue = Queue("fcfs", cached_len=0)
    (memory,), in_use = queue.memories, (5, 33, 39)
    for arrival in range(40):
        prefix = [50 + arrival] * 4
        cache(memory, prefix)
        queue.add(arrival, tokens=[*prefix, *[49] * 5])  # 3 pages, one of them cached
        if arrival in in_use:
            memory.open_lease(np.array(prefix, np.int32))
    assert queue.order(room=2) == [*in_use]
    assert queue.order(room=3) == [*range(40)]


def test_room_that_is_taken_meanwhile_leaves_out_what_follows() -> None:
    queue = Queue("fcfs")
    for arrival in range(200):
        queue.add(arrival)
    offer = queue.offer(5)
    candidates = queue.tried(offer)
    assert next(candidates).arrival == 0
    leave(offer, 0)
    assert len(list(candidates)) < 100


def test_what_fits_the_room_that_is_left_is_found_behind_hundreds_that_do_not() -> None:
    queue = Queue("fcfs", cached_len=0)
    for arrival in range(600):
        queue.add(arrival, 32)
    queue.add(600)
    offer = queue.offer(60)
    tried = queue.tried(offer)
    assert next(tried).arrival == 0
    leave(offer, 3)
    assert [request.arrival for request in tried] == [600]


def test_lines_are_used_again() -> None:
    queue = Queue()
    for arrival in range(5000):
        request = queue.add(arrival, 4 * (arrival % 8))
        assert request.line < 3
        if arrival % 3 == 2:
            for each in list(queue.waiting):
                queue.waiting.remove(each)
    audit_cache(queue.memories[0].cache, [])


def test_a_line_that_is_used_again_stays_for_no_rank() -> None:
    queue = Queue("fcfs", dp_size=2, cached_len=0)
    first = queue.add(0)
    queue.waiting.delays.stay(first, 1, 100)
    queue.waiting.remove(first)
    second = queue.add(1)
    assert second.line == first.line
    ranks, no_tenants = np.arange(2), np.zeros((2, MAX_TENANTS + 1), np.bool_)
    assert queue.waiting.has_short(ranks, np.array([5, 5]), no_tenants, 50)
    assert not queue.waiting.delays.is_staying(second, 50)


# -- passed over ------------------------------------------------------------------------------


def test_requests_are_due_by_their_arrival_whenever_they_were_added() -> None:
    queue = Queue()
    queue.add(0, arrived_s=2.0)
    behind_a_gate = queue.add(1, arrived_s=1.0)  # for a grammar, say
    retracted = queue.add(2, arrived_s=0.5, num_retractions=1)
    queue.waiting.make_due(arrived_s=1.0)
    assert queue.waiting.find_due("r1") is behind_a_gate
    assert queue.waiting.find_due("r0") is None
    assert queue.waiting.find_due(retracted.rid) is None


def pass_over(queue: Queue, arrivals: range, dp_rank: int = 0) -> None:
    """As many requests arrive and start at once on a rank."""
    for arrival in arrivals:
        queue.waiting.started(queue.add(arrival), dp_rank, PLENTY)


def test_a_request_is_passed_over_by_younger_ones_alone() -> None:
    queue = Queue()
    queue.add(10_000)
    pass_over(queue, range(2 * MAX_SKIP_COUNT))
    assert due_of(queue.waiting) == []
    pass_over(queue, range(10_001, 10_001 + MAX_SKIP_COUNT - 1))
    assert due_of(queue.waiting) == []
    pass_over(queue, range(20_000, 20_001))
    assert [request.arrival for request in due_of(queue.waiting)] == [10_000]


def test_what_starts_where_a_request_may_not_run_does_not_pass_it_over() -> None:
    queue = Queue(dp_size=2)
    pinned = queue.add(0, dp_rank=1)
    pass_over(queue, range(1, 2 * MAX_SKIP_COUNT), dp_rank=0)
    assert not queue.waiting.is_starved(pinned)
    pass_over(queue, range(1000, 1000 + MAX_SKIP_COUNT), dp_rank=1)
    assert queue.waiting.is_starved(pinned)


@pytest.mark.parametrize("num_tokens", [17, 21, 37])
def test_a_request_that_lacks_pages_is_due_by_the_service_that_later_ones_received(
    num_tokens: int,
) -> None:
    queue = Queue("fcfs", cached_len=0)
    tokens = [49] * 37
    oldest = queue.add(0, tokens=tokens)
    service = queue.waiting._columns.lines.service
    needed = float(service[oldest.line])
    for number in range(1, MAX_SKIP_COUNT):
        request = queue.add(number, tokens=tokens[:num_tokens])
        received = number * float(service[request.line])
        queue.waiting.started(request, 0, num_free=9)  # of 10 pages
        assert queue.waiting.is_starved(oldest) == (received >= needed)
        if received >= needed:
            return
    pytest.fail("it is due after as many passes as one that lacks no pages")


def test_the_service_of_requests_with_a_longer_prefix_makes_no_other_due() -> None:
    queue = Queue()
    queue.add(0, tokens=[49] * 37)
    for arrival in range(1, 4):
        queue.waiting.started(queue.add(arrival, 32), 0, num_free=9)
    assert due_of(queue.waiting) == []


def test_a_request_that_lacks_no_pages_beside_its_cached_prefix_is_due_by_passes_alone() -> None:
    queue = Queue("fcfs")
    queue.add(0, 32)  # 10 pages, 8 of them cached
    for arrival in range(1, MAX_SKIP_COUNT):
        queue.waiting.started(queue.add(arrival, 32), 0, num_free=2)
        assert due_of(queue.waiting) == []
    queue.waiting.started(queue.add(MAX_SKIP_COUNT, 32), 0, num_free=2)
    assert [request.arrival for request in due_of(queue.waiting)] == [0]


def test_a_request_is_not_due_because_another_was() -> None:
    queue = Queue()
    first = queue.add(0)
    pass_over(queue, range(1, 1 + MAX_SKIP_COUNT))
    assert queue.waiting.is_starved(first)
    queue.waiting.remove(first)
    second = queue.add(5000)
    assert second.line == first.line
    assert not queue.waiting.is_starved(second)


# -- waiting for a prefix, or for a rank ------------------------------------------------------


@pytest.mark.parametrize("dp_rank", [0, 1])
@pytest.mark.parametrize("ending", ["published", "gone"])
def test_a_request_is_not_tried_until_what_it_follows_has_published_or_is_gone(
    dp_rank: int, ending: str
) -> None:
    queue = Queue(dp_size=2, cached_len=0)
    memory, tokens = queue.memories[dp_rank], np.array(STEM, np.int32)
    if dp_rank:
        memory.open_lease(tokens[:0])  # so that rows of the two ranks differ
    lease = memory.open_lease(tokens)
    request = queue.add(0, 32)
    queue.waiting.delays.follow(request, dp_rank, lease.row, 16)
    assert queue.order() == []
    assert queue.waiting.delays.leader_of(request) == (dp_rank, lease.row)
    assert memory.grow_rows(np.array([lease.row]), np.array([32]))
    for length in (12, 16) if ending == "published" else (12,):
        assert queue.order() == []
        memory.commit_rows(np.array([lease.row]), np.array([length]))
        publish_prefix(memory, lease, tokens)
    if ending == "gone":
        release_kv_cache(memory, lease, tokens, insert=True)
    assert queue.order() == [0]
    assert queue.waiting.delays.leader_of(request) is None
    assert queue.waiting.delays.deferred_rank(request) == dp_rank


def test_a_request_that_stays_for_a_rank_is_tried_when_that_has_room_or_the_step_has_come() -> None:
    queue = Queue(dp_size=2)
    request = queue.add(0)
    assert queue.waiting.delays.deferred_rank(request) is None
    queue.waiting.delays.stay(request, 0, until_step=1)
    assert queue.order(open_ranks=(1,)) == []
    assert queue.order(open_ranks=(0,)) == queue.order(open_ranks=(0, 1)) == [0]
    assert queue.waiting.delays.is_staying(request, 0)
    queue.waiting.delays.stay(request, 0, until_step=0)
    assert queue.order(open_ranks=(1,)) == [0]
    assert not queue.waiting.delays.is_staying(request, 0)


def test_a_request_waits_for_nothing_that_the_last_one_of_its_line_waited_for() -> None:
    queue = Queue(dp_size=2)
    first = queue.add(0)
    row = queue.memories[0].open_lease(np.zeros(0, np.int32)).row
    queue.waiting.delays.follow(first, 0, row, 4)
    queue.waiting.delays.stay(first, 0, until_step=9)
    queue.waiting.remove(first)
    second = queue.add(1)
    assert second.line == first.line
    assert queue.waiting.delays.leader_of(second) is None
    assert queue.waiting.delays.deferred_rank(second) is None
    assert queue.order(open_ranks=(1,)) == [1]


# -- what is cached ---------------------------------------------------------------------------


def test_what_one_rank_caches_later_makes_no_room_on_another() -> None:
    queue = Queue(dp_size=2, cached_len=0)
    queue.add(0, 16)
    cache(queue.memories[1], STEM)
    queue.memories[1].open_lease(np.array(STEM[:16], np.int32))
    assert queue.order(room=2, open_ranks=(0,)) == []
    assert queue.order(room=2, open_ranks=(1,)) == [0]


def test_a_request_that_is_gone_is_followed_no_more() -> None:
    queue = Queue(cached_len=0)
    queue.waiting.remove(queue.add(0, 16))
    cache(queue.memories[0], STEM)
    assert not queue.memories[0].cache.cursors.take_has_moved()


def test_what_was_cached_of_a_request_that_is_gone_is_not_taken_for_the_next_ones() -> None:
    queue = Queue(cached_len=0)
    first = queue.add(0, 32)
    cache(queue.memories[0], STEM)
    queue.waiting.remove(first)
    second = queue.add(1)
    assert second.line == first.line
    assert queue.order(room=1) == []


def test_of_many_that_were_passed_over_one_starts_and_the_others_are_passed_over_anew() -> None:
    """Else a long queue would be served in order of arrival, against its policy and priorities."""
    queue = Queue()
    olds = [queue.add(arrival) for arrival in range(50)]
    for arrival in range(50, 50 + MAX_SKIP_COUNT):
        queue.waiting.started(queue.add(arrival, 16), 0, PLENTY)
    assert due_of(queue.waiting) == olds
    queue.waiting.started(olds[1], 0, PLENTY)
    assert due_of(queue.waiting) == olds[:1]  # it is older: nothing that was due passes it over
    queue.waiting.started(olds[0], 0, PLENTY)
    assert due_of(queue.waiting) == []
    for arrival in range(500, 500 + MAX_SKIP_COUNT):
        queue.waiting.started(queue.add(arrival, 16), 0, PLENTY)
    assert due_of(queue.waiting) == olds[2:]
