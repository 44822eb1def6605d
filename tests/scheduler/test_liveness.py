"""Every request that fits runs, and what two requests share is computed once."""

import pytest

from sgl_jax.core.messages import AbortRequest
from sgl_jax.core.scheduler_args import SchedulerArgs
from sgl_jax.scheduler.waiting.waiting_queue import MAX_SKIP_COUNT
from tests.scheduler.driver import Driver, generate, make_sizes
from tests.scheduler.liveness import pages_in_use
from tests.sessions.test_sessions import talk


def num_prefilled(driver: Driver) -> int:
    """Prompt tokens computed in all steps so far."""
    return sum(
        int(rank.q_lens[rank.num_decode :].sum()) for plan in driver.plans for rank in plan.ranks
    )


def short_driver(max_skip_count: int = MAX_SKIP_COUNT, **config: object) -> Driver:
    """One rank of 40 pages of 4 tokens, 25 of them taken by a request that goes on for long."""
    settings: dict[str, object] = {"schedule_conservativeness": 0.0}
    driver = Driver(
        make_sizes(num_pages=41, max_chunk_tokens=16),
        SchedulerArgs(**(settings | config)),  # type: ignore[arg-type]
        max_skip_count=max_skip_count,
    )
    driver.submit(generate("long", [1] * 60, 40))
    while len(driver.tokens["long"]) < 2:
        driver.step()
    return driver


# -- admission ----------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["abort", "time-out"])
def test_a_request_that_fits_starts_when_one_that_did_not_is_gone(ending: str) -> None:
    driver = short_driver(waiting_timeout=5.0)
    driver.tick(0.0)
    driver.submit(generate("big", [2] * 130, 4))
    driver.step()
    assert not driver.tokens["big"]
    if ending == "abort":
        driver.abort("big")
    else:
        driver.tick(6.0)
    assert driver.finish["big"].type == "abort"
    driver.submit(generate("small", [3] * 4, 2))
    for _ in range(3):
        driver.step()
    assert driver.tokens["small"], "it waited beside free pages"


def test_a_request_that_fits_starts_beside_one_that_does_not() -> None:
    driver = short_driver()
    driver.submit(generate("big", [2] * 130, 4))
    driver.step()
    driver.submit(generate("small", [3] * 4, 2))
    for _ in range(3):
        driver.step()
    assert driver.tokens["small"]
    driver.run()
    assert driver.finish["big"].type == "length"


def test_a_request_starts_when_a_running_one_has_published_what_it_lacked() -> None:
    driver = Driver(
        make_sizes(num_pages=33),
        SchedulerArgs(schedule_conservativeness=0.0),
    )
    shared = list(range(30)) * 3
    driver.submit(generate("first", shared, 8))
    driver.step()
    driver.submit(generate("second", [*shared, 49, 48], 8))  # alone it would not fit beside it
    for _ in range(20):
        driver.step()
        if "first" in driver.finish:
            break
    assert driver.tokens["second"], "the prefix that it reads was there, so it fitted"
    driver.run()
    driver.check_tokens("second")


def test_a_request_too_large_for_what_is_free_is_not_passed_over_for_ever() -> None:
    driver = short_driver()
    driver.submit(generate("big", [2] * 130, 4))
    for i in range(600):
        if driver.scheduler.num_waiting < 4:
            driver.submit(generate(f"small{i}", [3 + i % 40] * 12, 6))
        driver.step()
        if driver.tokens["big"]:
            return
    pytest.fail("the big request starved")


# -- sharing ------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("chunk", [64, 512, 1024])
def test_requests_that_arrive_at_once_compute_what_they_share_once(
    overlap: bool, chunk: int
) -> None:
    sizes = make_sizes(
        page_size=16,
        num_pages=400,
        num_rows=33,
        max_context_len=512,
        max_chunk_tokens=chunk,
        vocab_size=1000,
    )
    driver = Driver(sizes, SchedulerArgs(), overlap=overlap)
    shared = list(range(400))
    for i in range(16):
        driver.submit(generate(f"r{i}", shared + [500 + i] * 20, 4))
    driver.run()
    assert num_prefilled(driver) == 400 + 16 * 20
    for rid in driver.prompts:
        driver.check_tokens(rid)


def sharing_driver(chunk: int, prompts: list[list[int]]) -> Driver:
    """One rank with pages of 2 tokens for all `prompts` at once, which have arrived together."""
    sizes = make_sizes(
        page_size=2,
        num_pages=sum(map(len, prompts)),
        num_rows=len(prompts) + 1,
        max_context_len=2048,
        max_chunk_tokens=chunk,
        vocab_size=4096,
    )
    driver = Driver(sizes, SchedulerArgs())
    for i, prompt in enumerate(prompts):
        driver.submit(generate(f"r{i}", prompt, 4))
    return driver


@pytest.mark.parametrize(
    ("chunk", "num_requests", "num_shared"),
    [(4096, 16, 400), (8192, 64, 1000), (2048, 50, 250), (512, 24, 60)],
)
def test_what_is_little_for_each_is_waited_for_if_it_is_much_for_all(
    chunk: int, num_requests: int, num_shared: int
) -> None:
    prompts = [[*range(num_shared), *[2000 + i] * 20] for i in range(num_requests)]
    driver = sharing_driver(chunk, prompts)
    driver.run()
    computed, ideal = num_prefilled(driver), num_shared + 20 * num_requests
    print(f"chunk {chunk}: {computed} prompt tokens computed, {ideal} would do")
    assert computed <= 1.15 * ideal


def test_what_a_part_of_those_that_wait_share_beyond_the_rest_is_computed_once() -> None:
    """All share a page, which is not worth a wait; every fourth shares much more."""
    prompts = [[1] * 4 + [10 + i % 4] * 200 + [20 + i] * 20 for i in range(16)]
    driver = sharing_driver(4096, prompts)
    driver.run()
    assert num_prefilled(driver) == 4 * 204 + 16 * 20
    for rid in driver.prompts:
        driver.check_tokens(rid)


def test_what_the_step_has_no_room_for_does_not_count_as_shared_by_all() -> None:
    """Many share a page, of which the step could start three: those lose more than they save."""
    prompts = [[1] * 4 + [10 + i] * 60 for i in range(30)]
    driver = sharing_driver(256, prompts)
    driver.step()
    assert driver.scheduler.num_running == 4
    driver.run()


def test_what_the_step_cannot_complete_waits_for_however_little_is_shared() -> None:
    """The second would begin with the few tokens that the step has left."""
    driver = sharing_driver(256, [[1] * 8 + [2] * 244, [1] * 8 + [3] * 60])
    driver.step()
    assert driver.scheduler.num_running == 1
    driver.run()
    assert driver.cached["r1"] == 8


def test_what_is_shared_is_waited_for_no_longer_than_its_request_needs() -> None:
    """The second starts in the step after the one that computes the last page they share."""
    sizes = make_sizes(num_pages=200, max_context_len=300, max_chunk_tokens=16)
    driver = Driver(sizes, SchedulerArgs())
    shared = [i % 47 for i in range(64)]
    driver.submit(generate("first", shared + [48] * 8, 2))
    driver.submit(generate("second", shared + [49] * 8, 2))
    for _ in range(4):  # 64 tokens in chunks of 16
        driver.step()
        assert driver.scheduler.num_running == 1
    driver.step()
    assert driver.scheduler.num_running == 2
    driver.run()
    assert driver.cached["second"] == 64


def computing_driver(prompt_len: int = 164) -> Driver:
    """One rank that has computed 160 tokens of a prompt, 16 in each step."""
    sizes = make_sizes(num_pages=200, max_context_len=300, max_chunk_tokens=16)
    driver = Driver(sizes, SchedulerArgs())
    driver.submit(generate("first", [i % 47 for i in range(prompt_len)], 2))
    for _ in range(10):
        driver.step()
    return driver


def test_a_prompt_goes_to_the_tree_when_it_is_complete_if_nothing_waits_for_it() -> None:
    driver = computing_driver()
    allocator = driver.scheduler.ranks[0].memory.allocator
    assert (allocator.num_tree, allocator.num_leased) == (0, 40)
    driver.step()
    assert allocator.num_tree == 41


def test_a_prompt_whose_last_token_is_computed_as_decode_rows_are_goes_to_the_tree() -> None:
    driver = computing_driver(prompt_len=161)
    assert driver.scheduler.ranks[0].memory.allocator.num_tree == 40


@pytest.mark.parametrize("num_shared", [8, 64, 160])
def test_what_was_computed_before_a_request_came_is_read_at_once(num_shared: int) -> None:
    driver = computing_driver()
    driver.submit(generate("second", driver.prompts["first"][:num_shared] + [49] * 8, 2))
    driver.step()
    assert driver.scheduler.num_running == 2, "the last 4 tokens leave room in their step"
    driver.run()
    assert driver.cached["second"] == num_shared
    driver.check_tokens("second")


def test_what_another_published_meanwhile_is_not_kept_twice() -> None:
    """One prompt twice; the first is scored and slow, so the second does not wait for it."""
    sizes = make_sizes(
        num_pages=200, max_context_len=300, max_chunk_tokens=16, max_prompt_logprob_tokens=2
    )
    driver = Driver(sizes, SchedulerArgs())
    prompt = [i % 47 for i in range(64)]
    driver.submit(generate("scored", prompt, 2, logprob_start_len=0))
    driver.submit(generate("plain", prompt, 2))
    allocator = driver.scheduler.ranks[0].memory.allocator
    while not driver.tokens["plain"]:
        driver.step()
    assert not driver.tokens["scored"]
    assert allocator.num_tree == 16
    assert allocator.num_leased <= 2, "pages of the scored prompt that the tree has, too"
    driver.run()


@pytest.mark.parametrize("ending", ["abort", "retract"])
def test_the_request_that_waited_for_a_prefix_computes_it_if_the_first_is_gone(ending: str) -> None:
    sizes = make_sizes(num_pages=200, max_context_len=300, max_chunk_tokens=16)
    driver = Driver(sizes, SchedulerArgs())
    shared = [i % 47 for i in range(64)]
    driver.submit(generate("first", shared + [48] * 100, 2))
    driver.submit(generate("second", shared + [49] * 8, 2))
    driver.step()
    assert driver.scheduler.num_waiting == 1
    if ending == "abort":
        driver.scheduler.handle(AbortRequest(rid="first"))
    else:
        driver.retract("first")
    driver.step()
    assert driver.scheduler.num_running >= 1
    driver.run()
    driver.check_tokens("second")
    assert num_prefilled(driver) <= 64 + 100 + 8 + 2 * 16


@pytest.mark.parametrize(
    ("scored_from", "num_prefilled_again"),
    [pytest.param(0, 64, id="all of it"), pytest.param(33, 32, id="its second half")],
)
def test_what_a_scored_prompt_computes_slowly_is_not_waited_for(
    scored_from: int, num_prefilled_again: int
) -> None:
    sizes = make_sizes(
        num_pages=200, max_context_len=300, max_chunk_tokens=16, max_prompt_logprob_tokens=2
    )
    driver = Driver(sizes, SchedulerArgs())
    shared = [i % 47 for i in range(64)]
    driver.submit(generate("scored", shared + [48] * 8, 2, logprob_start_len=scored_from))
    driver.submit(generate("plain", shared + [49] * 8, 2))
    num_steps = 0
    while not driver.tokens["plain"]:
        driver.step()
        num_steps += 1
    assert num_steps <= 8, "72 tokens beside 2 a step take 6 steps, and are read a step later"
    driver.run()
    assert num_prefilled(driver) == 64 + 8 + num_prefilled_again + 8
    driver.check_tokens("plain")


def test_a_little_that_is_shared_is_computed_again_rather_than_waited_for() -> None:
    sizes = make_sizes(page_size=1, num_pages=400, max_context_len=300, max_chunk_tokens=256)
    driver = Driver(sizes, SchedulerArgs())
    driver.submit(generate("first", [7] * 8 + [1] * 40, 2))
    driver.submit(generate("second", [7] * 8 + [2] * 40, 2))
    driver.step()
    assert driver.scheduler.num_running == 2
    driver.run()


# -- ranks --------------------------------------------------------------------------------------


def test_a_turn_leaves_its_busy_rank_when_computing_again_costs_less() -> None:
    s = talk(dp_size=2, page_size=4, pool_tokens=256, schedule_conservativeness=0.0)
    s.say("s", [5] * 40, 2)
    home = next(r for r in s.driver.scheduler.ranks if r.memory.sessions.lease_of("s")).dp_rank
    s.driver.submit(generate("long", [10] * 20, 150, dp_rank=home))
    while len(s.driver.tokens["long"]) < 20:
        s.driver.step()
    rid = s.begin("s", [1] * 170, 2)  # its rank has no room for so many until the other ends
    num_steps = 0
    while not s.driver.tokens[rid] and num_steps < 40:
        s.driver.step()
        num_steps += 1
    assert num_steps < 30, "it could have been computed again in 27 steps, on an empty rank"
    assert "long" not in s.driver.finish
    s.run()
    assert s.driver.dp_rank[rid] == 1 - home
    s.check()
    s.close_all()


def test_a_turn_waits_for_its_rank_when_that_costs_less_than_computing_again() -> None:
    s = talk(dp_size=2, page_size=4, pool_tokens=1024, num_rows=9, chunk=8)
    s.say("s", [5] * 200, 2)
    home = next(r for r in s.driver.scheduler.ranks if r.memory.sessions.lease_of("s")).dp_rank
    s.driver.submit(generate("other", [10] * 24, 2, dp_rank=home))  # three steps of prefill
    s.driver.step()
    rid = s.begin("s", [1], 2)
    s.run()
    assert s.driver.dp_rank[rid] == home
    assert s.driver.cached[rid] == 201
    s.close_all()


# -- reasons ------------------------------------------------------------------------------------


def test_a_request_without_pages_says_how_many_it_lacks_on_each_rank() -> None:
    sizes = make_sizes(dp_size=2, num_pages=21, max_chunk_tokens=32)
    driver = Driver(sizes, SchedulerArgs(schedule_conservativeness=0.0))
    driver.submit(generate("a", [1] * 40, 30, dp_rank=0))
    driver.submit(generate("b", [2] * 24, 30, dp_rank=1))
    while len(driver.tokens["a"]) < 2:
        driver.step()
    driver.submit(generate("big", [3] * 70, 4))  # 18 pages with its next token
    driver.step()
    reason = driver.scheduler.why_waiting("big")
    assert reason.kind == "pages"
    # Beside the pages in use, and those for the next tokens.
    rooms = driver.scheduler._all_ranks.forecast_rooms()
    assert reason.pages_short == {
        r: 18 - 20 + int(pages[0]) for r, pages in enumerate(rooms["pages"])
    }
    for rank, pages in zip(driver.scheduler.ranks, rooms["pages"], strict=True):
        assert 0 <= pages[0] - len(pages_in_use(rank)) <= 1
    assert min(reason.pages_short.values()) > 0
    assert driver.scheduler.count_waiting()["pages"] == 1
    driver.run()


def test_a_request_without_a_row_says_so_and_one_that_waits_for_the_next_step_too() -> None:
    driver = Driver(make_sizes(num_rows=3), SchedulerArgs())
    for i in range(4):
        driver.submit(generate(f"r{i}", [i] * 8, 9))
    driver.step()
    assert driver.scheduler.num_running == 1  # its chunk is the whole step
    assert driver.scheduler.why_waiting("r3").kind == "step"
    driver.step()
    driver.step()
    assert driver.scheduler.why_waiting("r3").kind == "rows"
    assert driver.scheduler.count_waiting()["rows"] == 2
    with pytest.raises(KeyError, match="does not wait"):
        driver.scheduler.why_waiting("r0")
    driver.run()


def test_a_request_that_waits_for_a_rank_or_behind_another_names_it() -> None:
    s = talk(dp_size=2, page_size=4, pool_tokens=1024, num_rows=9, chunk=8)
    s.say("s", [5] * 200, 2)
    home = next(r for r in s.driver.scheduler.ranks if r.memory.sessions.lease_of("s")).dp_rank
    s.driver.submit(generate("other", [10] * 24, 2, dp_rank=home))
    s.driver.step()
    rid = s.begin("s", [1] * 6, 2)  # too long for the part of short prompts
    s.driver.step()
    reason = s.driver.scheduler.why_waiting(rid)
    assert (reason.kind, reason.dp_rank) == ("rank", home)
    s.run()
    s.close_all()
    driver = short_driver(max_skip_count=2)
    driver.submit(generate("big", [2] * 130, 4))
    for i in range(3):
        driver.submit(generate(f"small{i}", [3 + i] * 8, 30))
    driver.submit(generate("other", [6] * 30, 60))
    for _ in range(5):
        driver.step()
    reason = driver.scheduler.why_waiting("other")
    assert (reason.kind, reason.behind) == ("order", "big")
    driver.run()
