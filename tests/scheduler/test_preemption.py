"""A running request gives way to one that is more important, if that helps and is needed."""

from collections.abc import Sequence
from typing import Any

import pytest

from sgl_jax.core.scheduler_args import SchedulerArgs
from sgl_jax.mem_cache.tree.prefix_cursor import PrefixCursor
from sgl_jax.scheduler.admission.admission import Admission
from sgl_jax.scheduler.admission.rank_capacity import RankCapacities, RankCapacity
from sgl_jax.scheduler.admission.rank_options import RankOptions
from sgl_jax.scheduler.forecast.capacity import Rooms
from sgl_jax.scheduler.forecast.fits import NO_FLOOR
from sgl_jax.scheduler.preemption import Preemptible
from sgl_jax.scheduler.ranks import Ranks
from sgl_jax.scheduler.request import Request, RequestState
from sgl_jax.scheduler.step_builders import StepBuilders
from sgl_jax.scheduler.waiting.admission_order import Offer
from sgl_jax.scheduler.waiting.wait_reason import WaitReason
from sgl_jax.scheduler.waiting.waiting_queue import WaitingQueue
from tests.scheduler.driver import Driver, generate, make_sizes, price_retracts_fully
from tests.scheduler.liveness import due_of


def make_driver(*, num_running: int = 8, conservativeness: float = 0.0, **sizes: Any) -> Driver:
    """Ranks of 20 pages of 4 tokens that run so many requests at most."""
    config = SchedulerArgs(
        schedule_conservativeness=conservativeness,
        enable_priority_scheduling=True,
        priority_scheduling_preemption_threshold=10,
    )
    settings: dict[str, Any] = {"num_pages": 21, "max_chunk_tokens": 16} | sizes
    return Driver(make_sizes(num_rows=num_running + 1, **settings), config, max_skip_count=2)


def start(driver: Driver, rid: str, num_pages: int, priority: int, **kwargs: Any) -> None:
    """Run a request, of tokens of its own, that has just so many pages, until it decodes."""
    token = 1 + len(driver.prompts)
    prompt = [token] * (4 * num_pages - 3)
    message = generate(rid, prompt, 79 - len(prompt), priority=priority, **kwargs)
    driver.submit(message)
    decode(driver, rid)


def decode(driver: Driver, rid: str) -> None:
    """Step until a request has its first output."""
    for _ in range(20):
        driver.step()
        if driver.tokens[rid]:
            return
    pytest.fail(f"{rid} has no output after 20 steps")


def ask(driver: Driver, rid: str, num_pages: int, priority: int, **kwargs: Any) -> None:
    """A request, of tokens of its own, that needs so many pages."""
    token = 1 + len(driver.prompts)
    prompt = [token] * (4 * num_pages - 3)
    driver.submit(generate(rid, prompt, 2, priority=priority, **kwargs))


def waiting(driver: Driver, rid: str) -> tuple[Request, PrefixCursor]:
    """A waiting request, and its cursor on the first rank."""
    request = driver.scheduler._requests[rid]
    return request, driver.scheduler._waiting.cursor(request, 0)


def chosen(driver: Driver, rid: str, below: int, started: Sequence[int] = ()) -> list[int] | None:
    """The rows on the first rank that give way to a waiting request; None if it would not fit."""
    request, cursor = waiting(driver, rid)
    ranks, queue = driver.scheduler._all_ranks, driver.scheduler._waiting
    preemptible = Preemptible(ranks.ranks[0], started, ranks.forecast(), ranks.forecast_rooms()[:1])

    def fits(room: Rooms, num_pages: int) -> bool:
        return queue.pages_short(request, room, 0, num_pages) <= 0

    found = preemptible.choose(request, cursor, below, fits)
    return None if found is None else found.rows


def running(driver: Driver) -> set[str]:
    """Those that have memory."""
    requests = driver.scheduler._requests.values()
    return {request.rid for request in requests if request.state is RequestState.RUNNING}


def num_preempted(driver: Driver) -> int:
    return driver.scheduler.counters()["requests_preempted"]


def finish(driver: Driver) -> None:
    """All run to their ends, and what was taken is computed again."""
    driver.run()
    for rid in driver.prompts:
        driver.check_tokens(rid)


@pytest.mark.parametrize("threshold_excess", [0, 1])
def test_only_a_difference_above_the_threshold_preempts(threshold_excess: int) -> None:
    driver = make_driver(num_running=1)
    start(driver, "low", 3, priority=5)
    ask(driver, "high", 3, priority=5 + 10 + threshold_excess)
    driver.step()
    assert running(driver) == ({"high"} if threshold_excess else {"low"})
    assert num_preempted(driver) == threshold_excess
    finish(driver)


def test_what_is_within_the_threshold_stays_though_less_important_ones_do_not_suffice() -> None:
    driver = make_driver()
    start(driver, "low", 6, priority=0)
    start(driver, "nearly as important", 8, priority=45)
    ask(driver, "high", 15, priority=50)
    driver.step()
    assert running(driver) == {"low", "nearly as important"}
    assert num_preempted(driver) == 0
    finish(driver)


def test_only_rows_below_the_threshold_are_chosen() -> None:
    driver = make_driver()
    start(driver, "low", 6, priority=0)
    start(driver, "at the threshold", 8, priority=40)
    ask(driver, "high", 15, priority=50)
    assert chosen(driver, "high", below=40) is None
    rows = chosen(driver, "high", below=41)
    assert rows is not None
    assert len(rows) == 2


def test_a_request_that_started_in_this_step_is_not_chosen() -> None:
    driver = make_driver()
    start(driver, "low", 6, priority=0)
    start(driver, "just started", 8, priority=0)
    ask(driver, "high", 9, priority=50)
    (rank,) = driver.scheduler.ranks
    rows = {rank.running.request(row).rid: row for row in rank.running.active.tolist()}
    assert chosen(driver, "high", 50, started=[rows["just started"]]) == [rows["low"]]


def test_without_those_that_may_give_way_a_rank_has_their_pages_and_its_other_requests() -> None:
    driver = make_driver()
    for number, priority in enumerate((0, 0, 7)):
        start(driver, f"r{number}", 3 + number, priority=priority)
    ranks = driver.scheduler._all_ranks
    preemptible = Preemptible(ranks.ranks[0], [], ranks.forecast(), ranks.forecast_rooms()[:1])
    assert preemptible.levels.tolist() == [0, 7]
    assert preemptible.rooms["num_running"].tolist() == [1, 0]
    assert preemptible.rooms["num_in_use"].tolist() == [5, 0]
    assert preemptible.rooms["most"].tolist() == [20, 0]


def test_what_victims_would_come_to_hold_does_not_count() -> None:
    driver = make_driver(conservativeness=1.0)
    price_retracts_fully(driver.scheduler)
    start(driver, "low", 3, priority=0)
    (room,) = driver.scheduler._all_ranks.forecast_rooms()
    assert room.pages[room.peak] > 5
    driver.submit(generate("high", [40] * 57, 22, priority=50))
    driver.step()
    assert running(driver) == {"high"}
    finish(driver)


def test_a_request_preempts_beside_one_that_starts_in_the_same_step() -> None:
    driver = make_driver(max_chunk_tokens=128)
    start(driver, "low", 8, priority=0)
    ask(driver, "fits", 6, priority=50)
    ask(driver, "preempts", 10, priority=50)  # of 6 pages that are left, and 8
    driver.step()
    assert running(driver) == {"fits", "preempts"}
    assert num_preempted(driver) == 1
    finish(driver)


def test_two_requests_preempt_on_one_rank_in_the_same_step() -> None:
    driver = make_driver(max_chunk_tokens=128)
    for i in range(2):
        start(driver, f"low{i}", 8, priority=0)
    for i in range(2):
        ask(driver, f"high{i}", 10, priority=50)
    driver.step()
    assert running(driver) == {"high0", "high1"}
    assert num_preempted(driver) == 2
    finish(driver)


def test_what_fits_preempts_nothing() -> None:
    driver = make_driver(num_running=2)
    start(driver, "low", 3, priority=0)
    ask(driver, "high", 3, priority=50)
    driver.step()
    assert running(driver) == {"low", "high"}
    assert num_preempted(driver) == 0
    finish(driver)


def test_what_would_not_fit_even_so_preempts_nothing() -> None:
    driver = make_driver()
    start(driver, "small and low", 3, priority=0)
    start(driver, "large and as important", 12, priority=50)
    ask(driver, "high", 10, priority=50)
    driver.step()
    assert running(driver) == {"small and low", "large and as important"}
    assert num_preempted(driver) == 0
    finish(driver)


@pytest.mark.parametrize(
    ("priorities", "num_more_steps", "victim"),
    [
        ([1, 0, 2], [4, 4, 0], "r1"),  # the lowest priority, though it has more output
        ([0, 0, 0], [0, 2, 2], "r2"),  # then the fewest output tokens
        ([0, 0, 0], [0, 0, 0], "r2"),  # then the youngest
    ],
)
def test_the_least_important_with_the_least_to_lose_goes_first(
    priorities: list[int], num_more_steps: list[int], victim: str
) -> None:
    driver = make_driver(num_running=3)
    for i, (priority, more) in enumerate(zip(priorities, num_more_steps, strict=True)):
        start(driver, f"r{i}", 2, priority)
        for _ in range(more):
            driver.step()
    ask(driver, "high", 2, priority=50)
    driver.step()
    assert running(driver) == {"r0", "r1", "r2", "high"} - {victim}
    finish(driver)


def test_the_youngest_of_those_with_as_much_output_goes_first() -> None:
    driver = make_driver(num_running=2)
    for i in range(2):
        driver.submit(generate(f"r{i}", [1 + i] * 5, 30))
    decode(driver, "r1")
    assert len(driver.tokens["r0"]) == len(driver.tokens["r1"])
    ask(driver, "high", 2, priority=50)
    driver.step()
    assert running(driver) == {"r0", "high"}
    finish(driver)


def test_a_victim_that_another_makes_superfluous_stays() -> None:
    driver = make_driver()
    start(driver, "small", 3, priority=0)
    start(driver, "large", 10, priority=0)
    ask(driver, "high", 14, priority=50)  # 7 pages are free; the small one alone does not suffice
    driver.step()
    assert running(driver) == {"small", "high"}
    finish(driver)


def test_the_rank_is_chosen_where_the_fewest_have_to_go() -> None:
    driver = make_driver(dp_size=2)
    for i in range(2):
        start(driver, f"small{i}", 8, priority=0, dp_rank=0)
    start(driver, "large", 16, priority=0, dp_rank=1)
    ask(driver, "high", 13, priority=50)
    driver.step()
    assert running(driver) == {"small0", "small1", "high"}
    finish(driver)


def test_a_request_preempts_nothing_where_it_may_not_run() -> None:
    driver = make_driver(num_running=1, dp_size=2)
    start(driver, "low", 3, priority=0, dp_rank=0)
    start(driver, "as important", 3, priority=50, dp_rank=1)
    ask(driver, "high", 3, priority=50, dp_rank=1)
    driver.step()
    assert running(driver) == {"low", "as important"}
    assert num_preempted(driver) == 0
    finish(driver)


def test_each_may_preempt_on_a_rank_of_its_own() -> None:
    driver = make_driver(num_running=1, dp_size=2)
    for dp_rank in range(2):
        start(driver, f"low{dp_rank}", 3, priority=0, dp_rank=dp_rank)
    for dp_rank in (1, 0):
        ask(driver, f"high{dp_rank}", 3, priority=50, dp_rank=dp_rank)
    driver.step()
    assert running(driver) == {"high0", "high1"}
    finish(driver)


def test_a_pinned_request_preempts_on_its_own_rank_though_another_costs_less() -> None:
    driver = make_driver(num_running=1, dp_size=2)
    start(driver, "cheap", 3, priority=0, dp_rank=0)
    start(driver, "dear", 8, priority=0, dp_rank=1)
    ask(driver, "high", 3, priority=50, dp_rank=1)
    driver.step()
    assert running(driver) == {"cheap", "high"}
    finish(driver)


def test_no_request_preempts_where_the_step_has_no_tokens_left() -> None:
    driver = make_driver(num_running=2, dp_size=2, num_pages=60)
    start(driver, "cheap", 3, priority=0, dp_rank=0)
    start(driver, "dear", 8, priority=0, dp_rank=1)
    start(driver, "other", 3, priority=50, dp_rank=1)
    ask(driver, "long", 18, priority=50, dp_rank=0)  # each chunk of its prompt takes a whole step
    driver.step()
    ask(driver, "high", 6, priority=50)  # too long for the part of short prompts
    driver.step()
    assert running(driver) == {"cheap", "long", "other", "high"}
    finish(driver)


def test_no_request_preempts_where_the_step_has_retracted() -> None:
    def begin() -> Driver:
        driver = make_driver(num_running=2, dp_size=2)
        start(driver, "dear", 13, priority=0, dp_rank=1)
        for rid in ("first", "second"):
            start(driver, rid, 7, priority=0, dp_rank=0)
        return driver

    driver, num_steps = begin(), 0
    while not driver.scheduler.counters()["requests_retracted"]:
        driver.step()
        num_steps += 1
        assert num_steps < 50
    driver = begin()
    for _ in range(num_steps - 1):
        driver.step()
    assert running(driver) == {"first", "second", "dear"}
    ask(driver, "high", 12, priority=50)
    driver.step()
    assert len(running(driver)) == 2  # one of rank 0 was retracted
    assert "high" in running(driver)
    assert "dear" not in running(driver)
    finish(driver)


def test_prompts_as_important_as_a_request_come_before_it_in_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = make_driver(num_pages=60)
    start(driver, "low", 3, priority=0)
    ask(driver, "long", 18, priority=50)
    driver.step()
    left: list[int] = []
    begin = RankCapacities.__init__

    def watched(
        rooms: RankCapacities, ranks: Ranks, builders: StepBuilders, waiting: WaitingQueue
    ) -> None:
        begin(rooms, ranks, builders, waiting)
        left.extend(builders[0].num_tokens_left(priority, 0, 29) for priority in (0, 49, 50, 51))

    monkeypatch.setattr(RankCapacities, "__init__", watched)
    ask(driver, "as important", 8, priority=50)  # too long for the part of short prompts
    driver.step()
    assert left == [0, 0, 0, 16]
    assert running(driver) == {"low", "long"}
    finish(driver)


def test_a_rank_is_held_against_the_priority_of_the_due_request_and_no_higher_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    levels: list[int] = []
    hold = RankCapacity.hold

    def watched(room: RankCapacity, request: Request, num_pages: int, num_steps: int) -> None:
        hold(room, request, num_pages, num_steps)
        levels.append(int(room._rooms[room.dp_rank].held_above))

    monkeypatch.setattr(RankCapacity, "hold", watched)
    driver = make_driver()
    start(driver, "low", 10, priority=3)
    ask(driver, "due", 15, priority=3)
    for i in range(3):
        ask(driver, f"passes {i}", 1, priority=3)
    for _ in range(6):
        driver.step()
    assert set(levels) == {3}
    finish(driver)


def test_a_stream_with_pages_to_spare_does_not_give_way() -> None:
    """It has half of the pages, and the other, which ends soon, has enough beside it."""
    driver = make_driver(conservativeness=1.0, num_pages=41, max_context_len=160)
    price_retracts_fully(driver.scheduler)
    driver.submit(generate("stream", [1] * 8, 145, priority=0))
    decode(driver, "stream")
    for _ in range(70):
        driver.step()
    driver.submit(generate("high", [2] * 8, 8, priority=50))
    driver.step()
    assert running(driver) == {"stream", "high"}
    assert num_preempted(driver) == 0
    finish(driver)


def test_a_prompt_that_was_preempted_is_computed_no_further() -> None:
    driver = make_driver(num_running=1)
    ask(driver, "low", 15, priority=0)
    driver.step()
    ask(driver, "high", 1, priority=50)  # which leaves tokens of the step
    driver.step()
    assert running(driver) == {"high"}
    finish(driver)


def test_a_request_that_waits_for_a_prefix_in_flight_preempts_nothing_meanwhile() -> None:
    driver = make_driver(
        num_running=2, dp_size=2, num_pages=300, max_context_len=700, max_prompt_logprob_tokens=8
    )
    shared = [i % 40 for i in range(64)]
    start(driver, "other 0", 10, priority=0, dp_rank=0)
    driver.submit(generate("leader", shared + [48] * 4, 9, priority=50, dp_rank=0))
    # Its prompt is scored, so that it leaves half of each step of rank 1 to others.
    scored = generate("scored", [47] * 600, 9, priority=50, dp_rank=1, logprob_start_len=0)
    driver.submit(scored)
    driver.submit(generate("high", shared + [49] * 4, 9, priority=50))
    driver.submit(generate("other 1", [46] * 3, 30, dp_rank=1))
    for _ in range(4):  # 64 tokens in chunks of 16
        driver.step()
        assert running(driver) == {"leader", "other 0", "scored", "other 1"}
    assert num_preempted(driver) == 0
    driver.step()
    assert running(driver) == {"leader", "high", "scored", "other 1"}
    assert num_preempted(driver) == 1
    finish(driver)


def test_a_request_follows_a_prefix_in_flight_rather_than_preempt_elsewhere() -> None:
    driver = make_driver(
        num_running=2, dp_size=2, num_pages=300, max_context_len=700, max_prompt_logprob_tokens=8
    )
    shared = [i % 40 for i in range(64)]
    start(driver, "other 0", 10, priority=0, dp_rank=0)
    start(driver, "other 1", 10, priority=0, dp_rank=1)
    # Its prompt is scored, so that it leaves half of each step of rank 1 to others.
    scored = generate("scored", [47] * 600, 9, priority=50, dp_rank=1, logprob_start_len=0)
    driver.submit(scored)
    driver.submit(generate("leader", shared + [48] * 4, 9, priority=50, dp_rank=0))
    driver.step()
    driver.submit(generate("high", shared + [49] * 4, 9, priority=50))
    driver.step()
    assert running(driver) == {"leader", "other 0", "scored", "other 1"}
    assert num_preempted(driver) == 0
    finish(driver)


def test_what_is_due_is_held_for_against_its_own_priority_alone() -> None:
    driver = make_driver()
    start(driver, "low", 10, priority=0)
    ask(driver, "due", 15, priority=0)
    for i in range(2):
        ask(driver, f"passes {i}", 1, priority=0)
    for _ in range(6):
        driver.step()
    assert [request.rid for request in due_of(driver.scheduler._waiting)] == ["due"]
    driver.submit(generate("as low", [40], 60, priority=0))
    ask(driver, "high", 2, priority=1)
    driver.step()
    assert running(driver) == {"low", "high"}
    assert driver.scheduler.why_waiting("as low") == WaitReason("order", behind="due")
    driver.abort("low")
    driver.abort("high")
    driver.step()
    assert "due" in running(driver)
    finish(driver)
    assert num_preempted(driver) == 0


def test_after_a_preemption_no_rank_is_held_until_its_due_request_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = make_driver(dp_size=2)
    start(driver, "high 0", 15, priority=90, dp_rank=0)
    start(driver, "high 1", 10, priority=90, dp_rank=1)
    start(driver, "low", 6, priority=0, dp_rank=1)
    ask(driver, "due", 12, priority=20, dp_rank=0)
    for i in range(2):
        ask(driver, f"passes {i}", 1, priority=20, dp_rank=0)
    for _ in range(6):
        driver.step()
    assert [request.rid for request in due_of(driver.scheduler._waiting)] == ["due"]
    ask(driver, "preempts", 6, priority=20, dp_rank=1)
    held: list[tuple[list[int], list[int]]] = []  # before and after each pass over the queue
    inner = Admission._start_some

    def start_some(
        self: Admission,
        rooms: RankCapacities,
        options: RankOptions,
        offer: Offer,
        step: int,
    ) -> bool:
        before = offer.rooms["held_above"].tolist()
        is_changed = inner(self, rooms, options, offer, step)
        held.append((before, offer.rooms["held_above"].tolist()))
        return is_changed

    monkeypatch.setattr(Admission, "_start_some", start_some)
    driver.step()
    assert held == [([NO_FLOOR, NO_FLOOR], [20, NO_FLOOR])] * 2
    assert running(driver) == {"high 0", "high 1", "preempts"}
    finish(driver)


@pytest.mark.parametrize("dp_size", [1, 2])
def test_a_rank_is_held_for_the_most_important_of_the_due_requests(dp_size: int) -> None:
    driver = make_driver(num_pages=41, num_running=12, dp_size=dp_size)
    for dp_rank in range(dp_size):
        prompt = [45] * (69 + 40 * dp_rank)
        driver.submit(generate(f"on {dp_rank}", prompt, 46, priority=90, dp_rank=dp_rank))
        decode(driver, f"on {dp_rank}")
    for priority in (0, 5):  # the less important one is due first
        ask(driver, f"due {priority}", 25, priority=priority)
        for i in range(2):
            ask(driver, f"passes {priority} {i}", 1, priority=priority, dp_rank=0)
        for _ in range(4):
            driver.step()
    assert {r.rid for r in due_of(driver.scheduler._waiting)} == {"due 0", "due 5"}
    holds = driver.scheduler._admission.holds
    assert [hold.dp_rank for hold in holds.values()] == [0, 0]
    holds["due 0"] = holds.pop("due 0")  # as if it had begun while the other awaited a prefix
    driver.submit(generate("between", [40], 110, priority=3, dp_rank=0))
    driver.step()
    assert running(driver) == {f"on {dp_rank}" for dp_rank in range(dp_size)}
    assert driver.scheduler.why_waiting("between") == WaitReason("order", behind="due 5")
    assert driver.scheduler.count_waiting()["order"] == 1
    finish(driver)


def test_nothing_waits_for_a_prefix_in_flight_of_lower_priority() -> None:
    """Prompt tokens go by priority: between the two, others would hold up what computes it."""
    driver = make_driver(num_pages=600, num_running=40, max_context_len=700)
    shared = [i % 40 for i in range(64)]
    driver.submit(generate("low", shared + [48] * 4, 2, priority=0))
    driver.step()
    for i in range(20):
        driver.submit(generate(f"middle {i}", [41 + i % 7] * 16 + [i] * 16, 2, priority=4))
    driver.submit(generate("high", shared + [49] * 4, 2, priority=8))
    driver.step()
    assert running(driver) == {"low", "high"}
    finish(driver)


def test_of_two_that_compute_one_prefix_the_more_important_is_waited_for() -> None:
    driver = make_driver(num_pages=600, max_context_len=700, max_chunk_tokens=64)
    shared = [i % 40 for i in range(100)]
    driver.submit(generate("low", shared + [48] * 100, 2, priority=0))
    driver.step()
    driver.submit(generate("high", shared + [49] * 4, 2, priority=8))
    driver.submit(generate("as high", shared + [47] * 4, 2, priority=8))
    driver.step()
    assert running(driver) == {"low", "high"}
    finish(driver)
    assert driver.cached["as high"] == 100
