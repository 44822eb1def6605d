"""On which rank a request starts, when, and for which request a rank is held."""

from typing import Any

import pytest

from sgl_jax.core.scheduler_args import SchedulerArgs
from sgl_jax.scheduler.admission.admission import Hold
from sgl_jax.scheduler.admission.rank_capacity import RankCapacity
from sgl_jax.scheduler.forecast.fits import MAX_SKEW_REQUESTS
from sgl_jax.scheduler.request import Request
from tests.scheduler.driver import (
    Driver,
    forecast_always,
    generate,
    make_sizes,
    price_retracts_fully,
)
from tests.scheduler.liveness import due_of
from tests.sessions.test_sessions import talk


def make_driver(
    *, num_running: int = 8, chunk: int = 16, config: dict[str, Any] | None = None, **sizes: Any
) -> Driver:
    """Two ranks that run so many requests at most; nothing is reserved."""
    settings: dict[str, Any] = {
        "schedule_conservativeness": 0.0,
    }
    settings |= config or {}
    sizes: dict[str, Any] = {  # type: ignore[no-redef]
        "dp_size": 2,
        "num_pages": 101,
        "max_context_len": 400,
        "max_chunk_tokens": chunk,
    } | sizes
    return Driver(
        make_sizes(num_rows=num_running + 1, **sizes),
        SchedulerArgs(**settings),
        max_skip_count=2,
    )


def start(driver: Driver, rid: str, prompt: list[int], max_new_tokens: int, dp_rank: int) -> None:
    """Run a request on a rank until it decodes."""
    driver.submit(generate(rid, prompt, max_new_tokens, dp_rank=dp_rank))
    for _ in range(60):
        driver.step()
        if driver.tokens[rid]:
            return
    raise AssertionError(f"{rid} has no output after 60 steps")


def rank_of(driver: Driver, rid: str) -> int | None:
    """Where a request runs; None if it waits."""
    request = driver.scheduler._requests[rid]
    return None if request.lease is None else request.lease.dp_rank


def finish(driver: Driver) -> None:
    driver.run()
    for rid in driver.prompts:
        driver.check_tokens(rid)


# -- a request that is due ----------------------------------------------------------------------


def test_a_rank_is_held_for_a_due_request_where_it_lacks_least_and_stays_the_same() -> None:
    driver = make_driver(num_pages=21)
    start(driver, "a", [1] * 41, 30, 0)
    start(driver, "b", [2] * 33, 30, 1)
    start(driver, "c", [3] * 21, 30, 1)
    driver.submit(generate("big", [4] * 61, 2))  # 16 pages: a third of these is there at most
    for i in range(2):
        driver.submit(generate(f"passes {i}", [5 + i], 1))
        driver.step()
    driver.step()
    driver.abort("c")  # now it lacks less on rank 1
    for dp_rank in range(2):
        driver.submit(generate(f"pinned to {dp_rank}", [8 + dp_rank] * 3, 60, dp_rank=dp_rank))
    driver.step()
    assert rank_of(driver, "big") is None
    assert rank_of(driver, "pinned to 0") is None
    assert rank_of(driver, "pinned to 1") == 1
    driver.abort("a")
    driver.step()
    assert rank_of(driver, "big") == 0
    finish(driver)


def test_due_requests_hold_a_rank_each() -> None:
    driver = make_driver(num_pages=21, num_running=12)
    for dp_rank in range(2):
        start(driver, f"on {dp_rank}", [1 + dp_rank] * 41, 30, dp_rank)
    for i in range(3):
        driver.submit(generate(f"big {i}", [3 + i] * 61, 2))
    for i in range(4):
        driver.submit(generate(f"passes {i}", [7 + i], 1))
        driver.step()
    driver.step()
    assert len(due_of(driver.scheduler._waiting)) == 3
    holds = driver.scheduler._admission.holds
    assert {rid: hold.dp_rank for rid, hold in holds.items()} == {"big 0": 0, "big 1": 1}
    finish(driver)


def test_a_due_request_holds_a_rank_that_is_not_held_though_it_lacks_more_there() -> None:
    driver = make_driver(num_pages=21, num_running=12)
    start(driver, "on 0", [1] * 33, 36, 0)
    start(driver, "on 1", [2] * 41, 36, 1)
    for i in range(2):
        driver.submit(generate(f"big {i}", [3 + i] * 61, 2))  # ends before the first may start
    for i in range(2):
        driver.submit(generate(f"passes {i}", [7 + i], 1))
        driver.step()
    holds: dict[str, Hold] = {}
    while not holds:
        driver.step()
        holds = driver.scheduler._admission.holds
    assert {rid: hold.dp_rank for rid, hold in holds.items()} == {"big 0": 0, "big 1": 1}
    finish(driver)


@pytest.mark.parametrize(("conservativeness", "held_pages"), [(0.0, 16), (1.0, 18)])
def test_a_hold_leaves_a_due_request_the_pages_that_it_grows_to(
    monkeypatch: pytest.MonkeyPatch, conservativeness: float, held_pages: int
) -> None:
    config = {"schedule_conservativeness": conservativeness}
    driver = make_driver(dp_size=1, num_pages=21, config=config)
    price_retracts_fully(driver.scheduler)
    held: list[int] = []
    hold = RankCapacity.hold

    def watched(room: RankCapacity, request: Request, num_pages: int, num_steps: int) -> None:
        hold(room, request, num_pages, num_steps)
        held.append(int(room._rooms[0].held_pages))

    monkeypatch.setattr(RankCapacity, "hold", watched)
    start(driver, "a", [1] * 41, 24, 0)
    driver.submit(generate("big", [4] * 61, 12))  # 16 pages at its start, 18 eight tokens later
    for i in range(2):
        driver.submit(generate(f"passes {i}", [5 + i], 1))
        driver.step()
    driver.step()
    assert set(held) == {held_pages}
    reason = driver.scheduler.why_waiting("big")
    assert reason.kind == "pages"
    finish(driver)


def test_the_step_of_a_due_request_is_fixed_as_its_rank_is_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = make_driver(dp_size=1, num_pages=21)
    holds: list[tuple[int, int, int]] = []
    hold = RankCapacity.hold

    def watched(room: RankCapacity, request: Request, num_pages: int, num_steps: int) -> None:
        hold(room, request, num_pages, num_steps)
        until_step = driver.scheduler._steps + num_steps
        holds.append((until_step, num_pages, int(room._rooms[0].held_most)))

    monkeypatch.setattr(RankCapacity, "hold", watched)
    start(driver, "a", [1] * 41, 30, 0)  # ends in 30 steps: at moment 32 it is gone
    driver.submit(generate("big", [4] * 64, 12))  # and a page for its first new token
    for i in range(2):
        driver.submit(generate(f"passes {i}", [5 + i], 1))
        driver.step()
    first = driver.scheduler._steps
    while rank_of(driver, "big") is None:
        driver.step()
    until_steps, held_pages, held_most = (set(values) for values in zip(*holds, strict=True))
    assert len(holds) > 20
    assert len(until_steps) == 1
    assert 24 <= until_steps.pop() - first <= 33
    assert (held_pages, held_most) == ({17}, {19})  # the last of 76 tokens takes no page
    finish(driver)


def test_a_held_rank_says_what_waits_for_the_due_request_and_what_does_not() -> None:
    """What ends before the due request is to start may start; on another rank pages are lacking."""
    driver = make_driver(num_pages=21, chunk=64)
    for dp_rank in range(2):
        start(driver, f"on {dp_rank}", [1 + dp_rank] * (41 + 20 * dp_rank), 15, dp_rank)
    driver.submit(generate("big", [4] * 61, 2, dp_rank=0))
    for i in range(2):
        driver.submit(generate(f"passes {i}", [5 + i], 1, dp_rank=0))
        driver.step()
    driver.step()
    (hold,) = driver.scheduler._admission.holds.values()
    num_left = hold.until_step - driver.scheduler._steps
    assert num_left > 4
    driver.submit(generate("ends before", [7] * 29, num_left, dp_rank=0))
    driver.submit(generate("ends later", [8] * 29, num_left + 2))
    for rid, kind in (("ends before", "step"), ("ends later", "order")):
        assert driver.scheduler.why_waiting(rid).kind == kind, rid
    counts = driver.scheduler.count_waiting()
    assert (counts["step"], counts["order"], counts["pages"]) == (1, 1, 1)
    driver.step()
    assert rank_of(driver, "ends before") == 0
    assert rank_of(driver, "ends later") is None
    finish(driver)


def test_a_due_request_does_not_start_before_the_prefix_that_it_waits_for_is_there() -> None:
    driver = make_driver(max_prompt_logprob_tokens=8)
    shared = [i % 40 for i in range(64)]
    driver.submit(generate("leader", [*shared, 48], 9, dp_rank=0))
    # Its prompt is scored, so that it leaves half of each step of rank 1 to others.
    driver.submit(generate("scored", [47] * 200, 9, dp_rank=1, logprob_start_len=0))
    driver.submit(generate("follower", [*shared, 49], 9))
    for i in range(4):
        driver.submit(generate(f"passes {i}", [41 + i] * 3, 2, dp_rank=1))
    for _ in range(4):  # 64 tokens in chunks of 16
        driver.step()
        assert rank_of(driver, "follower") is None
    assert [request.rid for request in due_of(driver.scheduler._waiting)] == ["follower"]
    driver.step()
    assert rank_of(driver, "follower") == 0
    finish(driver)
    assert driver.cached["follower"] == 64


# -- what is not waited for ---------------------------------------------------------------------


def test_what_another_namespace_computes_is_not_waited_for() -> None:
    driver = make_driver(dp_size=1)
    prompt = list(range(13))  # of a chunk of 16
    driver.submit(generate("red", prompt, 9, namespace="red"))
    driver.submit(generate("plain", prompt, 9))
    driver.step()
    assert rank_of(driver, "red") == rank_of(driver, "plain") == 0
    finish(driver)
    assert driver.cached["plain"] == 0


def test_what_a_turn_publishes_at_its_end_is_not_waited_for() -> None:
    s = talk(chunk=8)
    s.say("s", [5] * 20, 2)
    history, new = s.of["s"].tokens, [6, 7, 8, 9]
    turn = s.begin("s", new, 30)
    s.driver.submit(generate("plain", history + new + [3] * 3, 2))
    s.driver.step()
    assert rank_of(s.driver, turn) == rank_of(s.driver, "plain") == 0
    s.run()
    s.driver.check_tokens("plain")
    s.close_all()


# -- which rank ---------------------------------------------------------------------------------


def cached_on_rank_0(**kwargs: Any) -> tuple[Driver, list[int]]:
    """Two ranks, and a prompt of 200 tokens that the first of them has cached."""
    driver = make_driver(**kwargs)
    prompt = [i % 40 for i in range(200)]
    driver.submit(generate("seed", prompt, 1, dp_rank=0))
    driver.run()
    return driver, prompt


def test_a_request_waits_once_for_its_best_rank_and_no_longer_than_that_saves() -> None:
    driver, prompt = cached_on_rank_0(num_running=1, chunk=8)
    start(driver, "long", [41] * 8, 42, 0)  # may end in 20 steps: of 8 tokens, that is less
    driver.submit(generate("waits", [*prompt, 42], 2))
    driver.step()
    assert driver.scheduler.why_waiting("waits").kind == "rank"
    for _ in range(10):
        driver.step()
    assert "long" not in driver.finish
    assert rank_of(driver, "waits") == 1
    finish(driver)


def test_of_two_that_wait_for_a_rank_the_second_reckons_with_the_second_end_there() -> None:
    driver, prompt = cached_on_rank_0(num_running=2, chunk=8, num_pages=400)
    start(driver, "far from its end", [41] * 8, 160, 0)
    start(driver, "near its end", [42] * 8, 12, 0)
    for i in range(2):
        driver.submit(generate(f"waits {i}", [*prompt, 43 + i], 2))
    driver.step()
    assert driver.scheduler.why_waiting("waits 0").kind == "rank"
    assert rank_of(driver, "waits 1") == 1
    finish(driver)
    assert driver.dp_rank["waits 0"] == 0


@pytest.mark.parametrize(("num_pages", "num_waiting"), [(201, 1), (301, 2)])
def test_of_two_that_wait_for_pages_of_a_rank_the_second_reckons_with_those_of_the_first(
    num_pages: int, num_waiting: int
) -> None:
    """As the long one ends there are pages for one of them, or two, beside their prefix. Rows are
    free."""
    driver = make_driver(chunk=16, num_pages=num_pages, max_context_len=1000)
    prefix = [i % 40 for i in range(300)]  # 75 pages
    start(driver, "reads the prefix", [*prefix, 41], 150, 0)
    start(driver, "long", [42] * (4 * (num_pages - 140) + 1), 8, 0)
    for i in range(2):
        driver.submit(generate(f"waits {i}", [*prefix, *[43 + i] * 250], 2))  # 63 pages
    driver.step()
    assert driver.scheduler.count_waiting()["rank"] == num_waiting
    assert rank_of(driver, "waits 1") == (1 if num_waiting == 1 else None)
    finish(driver)
    assert driver.dp_rank["waits 0"] == 0


def test_of_two_ranks_alike_the_one_with_more_free_pages_is_chosen() -> None:
    driver = make_driver(chunk=64)
    start(driver, "many pages", [1] * 340, 30, 0)
    start(driver, "few pages", [2] * 20, 30, 1)
    driver.submit(generate("other", [3] * 40, 2))
    driver.step()
    assert rank_of(driver, "other") == 1
    finish(driver)


def test_a_request_does_not_wait_for_a_rank_that_has_no_more_of_its_prefix() -> None:
    """A rank runs 13 more than the other, which lacks pages for some steps."""
    driver = make_driver(num_running=16, chunk=32, num_pages=301, max_context_len=1300)
    for i in range(14):
        driver.submit(generate(f"on rank 0 {i}", [1 + i] * 4, 90, dp_rank=0))
    start(driver, "on rank 1", [20] * 1140, 9, 1)
    driver.submit(generate("other", [30] * 80, 2))
    driver.step()
    assert rank_of(driver, "other") == 0
    finish(driver)


def test_a_cached_prefix_draws_no_more_requests_than_a_rank_may_be_ahead_by() -> None:
    driver, prompt = cached_on_rank_0(num_running=12, chunk=256, num_pages=200)
    ranks = driver.scheduler.ranks
    most_ahead = 0
    for i in range(12):
        driver.submit(generate(f"r{i}", [*prompt, 40 + i % 10], 60))
        driver.step()
        most_ahead = max(most_ahead, len(ranks[0].running) - len(ranks[1].running))
    assert most_ahead == MAX_SKEW_REQUESTS + 1
    assert driver.scheduler.num_running == 12
    finish(driver)


def test_a_rank_that_prefills_a_long_prompt_is_left_to_it() -> None:
    driver = make_driver()
    start(driver, "decodes", [1] * 4, 90, 1)
    driver.submit(generate("long", [2] * 200, 2, dp_rank=0))
    driver.step()
    driver.submit(generate("other", [3] * 12, 2))
    driver.step()
    assert rank_of(driver, "other") == 1
    finish(driver)


def test_a_turn_returns_to_the_lease_that_has_its_history_though_more_run_there() -> None:
    s = talk(dp_size=2, page_size=4, pool_tokens=512, chunk=8, disable_radix_cache=True)
    s.say("s", [5] * 40, 2)
    home = next(r for r in s.driver.scheduler.ranks if r.memory.sessions.lease_of("s")).dp_rank
    start(s.driver, "decodes", [10] * 4, 30, home)
    rid = s.begin("s", [1], 2)
    s.run()
    assert s.driver.dp_rank[rid] == home
    assert s.driver.cached[rid] == 41
    s.close_all()


def test_in_turn_a_request_goes_where_the_prefix_is_that_it_waited_for() -> None:
    driver = make_driver(config={"load_balance_method": "round_robin"})
    shared = list(range(12))
    driver.submit(generate("leader", [*shared, 48], 9))
    driver.submit(generate("on rank 1", [41] * 3, 2))
    driver.submit(generate("follower", [*shared, 49], 9))
    driver.submit(generate("on rank 0", [42] * 3, 2))  # so that it would be the turn of rank 1
    driver.step()
    assert rank_of(driver, "follower") is None
    assert rank_of(driver, "on rank 0") == 0
    finish(driver)
    assert driver.dp_rank["follower"] == driver.dp_rank["leader"] == 0
    assert driver.cached["follower"] == 12


# -- room ---------------------------------------------------------------------------------------


def test_two_requests_that_fit_one_by_one_but_not_together_do_not_start_together() -> None:
    driver = make_driver(dp_size=1, num_pages=21, chunk=128)
    for i in range(2):
        driver.submit(generate(f"r{i}", [1 + i] * 45, 4))
    driver.step()
    assert driver.scheduler.num_running == 1
    finish(driver)
    assert driver.scheduler.counters()["requests_retracted"] == 0


def test_the_last_token_of_a_request_takes_no_page() -> None:
    """Of 29 tokens, 28 have KV: a quarter of the 28 pages of 4 tokens."""
    config = {"schedule_conservativeness": 1.0}
    driver = make_driver(dp_size=1, num_pages=29, chunk=128, config=config)
    price_retracts_fully(driver.scheduler)
    for number in range(4):
        driver.submit(generate(f"r{number}", [1 + number] * 6, 23))
    driver.step()
    assert driver.scheduler.num_running == 4
    finish(driver)
    assert driver.scheduler.counters()["requests_retracted"] == 0


def test_a_request_of_one_token_takes_the_pages_of_its_prompt() -> None:
    driver = make_driver(dp_size=1, num_pages=9, chunk=128)  # 8 pages of 4 tokens
    for number in range(2):
        driver.submit(generate(f"r{number}", [1 + number] * 16, 1))
    driver.step()
    assert driver.scheduler.num_running == 2
    finish(driver)


def test_what_fits_beside_another_because_it_shares_its_prefix_starts_in_the_same_step() -> None:
    driver = make_driver(dp_size=1, num_pages=25, chunk=128)  # 24 pages of 4 tokens
    shared = [i % 40 for i in range(64)]
    driver.submit(generate("before", [*shared, 48], 2))
    finish(driver)
    start(driver, "uses 4 of 5 pages", [*shared[:16], 47, 47, 47], 9, dp_rank=0)
    driver.submit(generate("18 pages", [*shared, *[41] * 7], 1))
    driver.submit(generate("20 pages", [*shared, *[42] * 15], 1))
    driver.step()
    assert rank_of(driver, "18 pages") == rank_of(driver, "20 pages") == 0
    finish(driver)


@pytest.mark.parametrize(("limit", "starts"), [(4, True), (30, False)])
def test_a_request_fits_by_its_own_limit_next_to_what_starts_in_the_same_step(
    limit: int, starts: bool
) -> None:
    """The first may generate 60 tokens, and nothing is known of how many it will."""
    driver = make_driver(
        dp_size=1, num_pages=21, chunk=128, config={"schedule_conservativeness": 1.0}
    )
    price_retracts_fully(driver.scheduler)
    driver.submit(generate("first", [1] * 5, 60))
    driver.submit(generate("second", [2] * 45, limit))  # 12 pages of 18 that are free
    driver.step()
    assert rank_of(driver, "first") == 0
    assert rank_of(driver, "second") == (0 if starts else None)
    finish(driver)


def test_a_rank_with_room_for_all_is_forecast_as_soon_as_it_has_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each may come to hold 45 pages of 200."""
    started = []
    for is_always in (False, True):
        if is_always:
            forecast_always(monkeypatch)
        driver = make_driver(
            dp_size=1,
            num_pages=201,
            num_running=24,
            chunk=512,
            max_context_len=200,
            config={"schedule_conservativeness": 1.0},
        )
        price_retracts_fully(driver.scheduler)
        for i in range(24):
            driver.submit(generate(f"r{i}", [1 + i] * 20, 160))
        driver.step()
        started.append(driver.scheduler.num_running)
    assert started[0] == started[1] < 20


def test_a_request_goes_where_it_fits_and_evicts_no_session_where_it_does_not_even_so() -> None:
    s = talk(dp_size=2, pool_tokens=80, chunk=8, schedule_conservativeness=0.0)
    s.say("s", [5] * 18, 2)
    home = next(r for r in s.driver.scheduler.ranks if r.memory.sessions.lease_of("s")).dp_rank
    start(s.driver, "long", [6] * 37, 30, home)
    for i in range(2):
        start(s.driver, f"small {i}", [7 + i] * 5, 30, 1 - home)
    s.driver.submit(generate("other", [9] * 50, 2))  # less runs beside the session
    s.driver.step()
    assert rank_of(s.driver, "other") == 1 - home
    assert s.driver.scheduler.counters()["sessions_evicted"] == 0
    s.run()
    s.close_all()
