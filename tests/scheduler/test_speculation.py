"""Speculation: more tokens a step, the same tokens, and lengths that are right all along.

The oracle drafts tokens that are right three times out of four.
"""

from typing import Any

import pytest

from sgl_jax.core.engine_sizes import EngineSizes
from sgl_jax.core.scheduler_args import SchedulerArgs
from tests.scheduler.driver import Driver, generate, make_sizes
from tests.support.oracle_executor import OracleExecutor

K = 4


def make_driver(*, overlap: bool = True, num_drafts: int = K, **sizes: Any) -> Driver:
    sizes: dict[str, Any] = {"max_draft_tokens": num_drafts} | sizes  # type: ignore[no-redef]
    return Driver(make_sizes(**sizes), overlap=overlap)


def lengths(driver: Driver, rid: str) -> tuple[int, int]:
    """ResultRead and allocated length of a running request."""
    lease = driver.scheduler._requests[rid].lease
    assert lease is not None
    return lease.kv_committed_len, lease.kv_allocated_len


class UselessDrafts(OracleExecutor):
    """Never guesses right."""

    def _draft(self, state: int, count: int) -> list[int]:
        return [(self._sample(state) + 1) % self.sizes.vocab_size] * count


class PerfectDrafts(OracleExecutor):
    """Always guesses right."""

    def _draft(self, state: int, count: int) -> list[int]:
        return self._verify_all(state, count)

    def _verify_all(self, state: int, count: int) -> list[int]:
        drafts: list[int] = []
        for _ in range(count):
            drafts = self._verify(state, drafts)
        return drafts


def with_executor(driver: Driver, kind: type[OracleExecutor]) -> Driver:
    driver.executor = driver.oracle = kind(driver.scheduler.sizes)
    return driver


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_fewer_steps_bring_the_same_tokens(overlap: bool, page_size: int) -> None:
    num_steps = {}
    for num_drafts in (0, K):
        driver = make_driver(
            overlap=overlap,
            num_drafts=num_drafts,
            page_size=page_size,
            num_pages=1 + 512 // page_size,
        )
        for i in range(4):
            driver.submit(generate(f"r{i}", [i + 1] * (5 + i), 60))
        driver.run()
        for i in range(4):
            assert len(driver.tokens[f"r{i}"]) == 60
            driver.check_tokens(f"r{i}")
        num_steps[num_drafts] = len(driver.plans)
    assert num_steps[K] < 0.6 * num_steps[0]


def test_with_overlap_slots_are_held_for_two_steps_ahead() -> None:
    driver = make_driver(page_size=1, num_pages=200)
    driver.submit(generate("r", [1, 2, 3], 60))
    ahead = []
    for _ in range(12):
        driver.step()
        committed, allocated = lengths(driver, "r")
        ahead.append(allocated - committed)
    # The drafts of the step in flight, and those of the step before it, whose result was not read.
    assert max(ahead) == 2 * K
    driver.run()


def test_slots_of_the_next_drafts_are_held_too_but_none_past_the_end() -> None:
    sizes = make_sizes(max_draft_tokens=K, page_size=1, num_pages=200)
    driver = Driver(sizes._replace(lookahead_slots=K - 1), overlap=False)
    driver.submit(generate("r", [1, 2, 3], 20))
    held = []
    driver.step()
    while "r" in driver.scheduler._requests:
        _, allocated = lengths(driver, "r")
        rank = driver.plans[-1].ranks[0]
        end = int(rank.kv_starts[0] + rank.q_lens[0])
        assert allocated <= 23
        if rank.num_drafts[0]:
            held.append(allocated - end)
            assert rank.num_pages == end + K - 1
            assert allocated == min(end + K - 1, 23)
        driver.step()
    assert held[0] == K - 1
    assert held[-1] < K - 1


def test_lengths_are_exact_whenever_nothing_is_in_flight() -> None:
    driver = make_driver(overlap=False, page_size=1, num_pages=200)
    driver.submit(generate("r", [1, 2, 3], 60))
    for _ in range(12):
        driver.step()
        committed, allocated = lengths(driver, "r")
        assert committed == 3 + len(driver.tokens["r"]) - 1
        assert committed <= allocated <= committed + K
    driver.run()


@pytest.mark.parametrize("overlap", [True, False])
def test_a_stop_token_among_accepted_drafts_ends_the_output_there(overlap: bool) -> None:
    """Perfect drafts carry every step beyond the stop: output and KV are trimmed to it."""
    for wanted in range(2, 12):
        driver = with_executor(
            make_driver(overlap=overlap, page_size=1, num_pages=200), PerfectDrafts
        )
        expected = driver.oracle.expected_output([1, 2, 3], wanted)
        if expected[-1] in expected[:-1]:
            continue
        driver.submit(generate("r", [1, 2, 3], 60, stop_token_ids=(expected[-1],)))
        driver.run()
        assert driver.tokens["r"] == expected
        assert driver.finish["r"].type == "stop"
        assert driver.finish["r"].matched == expected[-1]
        # The cache holds what was written of the known tokens: never the overshoot. The KV of the
        # stop token itself was written only if drafts ran past it.
        (view,) = driver.scheduler.memory_views()
        assert view.cached_pages in (3 + wanted - 1, 3 + wanted)
        driver.submit(generate("again", [1, 2, 3, *expected], 5))
        driver.run()
        driver.check_tokens("again")


@pytest.mark.parametrize("overlap", [True, False])
def test_no_more_tokens_than_asked_for(overlap: bool) -> None:
    for max_new_tokens in range(1, 14):
        driver = with_executor(make_driver(overlap=overlap, num_pages=64), PerfectDrafts)
        driver.submit(generate("r", [1, 2, 3], max_new_tokens))
        driver.run()
        assert len(driver.tokens["r"]) == max_new_tokens
        driver.check_tokens("r")
        assert driver.finish["r"].type == "length"
        for plan in driver.plans:
            # After the query at the last position but one, the last token is drawn.
            (rank,) = plan.ranks
            assert ((rank.kv_starts + rank.q_lens) < 3 + max_new_tokens).all()


def test_a_request_that_fills_the_context_never_drafts_past_its_end() -> None:
    sizes: EngineSizes = make_driver(max_context_len=32).scheduler.sizes
    driver = with_executor(make_driver(max_context_len=32), PerfectDrafts)
    driver.submit(generate("r", [1, 2, 3], sizes.max_request_tokens - 3))
    driver.run()
    for plan in driver.plans:
        (rank,) = plan.ranks
        assert ((rank.kv_starts + rank.q_lens) <= 32).all()
    driver.check_tokens("r")


def test_short_of_memory_drafts_go_before_anybody_is_retracted() -> None:
    """Two requests that fit exactly, but for the slots of their drafts."""
    driver = make_driver(page_size=4, num_pages=1 + 2 * 5, overlap=False)
    for i in range(2):
        driver.submit(generate(f"r{i}", [i + 1] * 4, 16))
    driver.run()
    assert driver.scheduler.counters()["requests_retracted"] == 0
    for i in range(2):
        driver.check_tokens(f"r{i}")


def test_useless_drafts_are_given_up() -> None:
    driver = with_executor(make_driver(num_pages=64), UselessDrafts)
    driver.submit(generate("r", [1, 2, 3], 100))
    driver.run()
    counters = driver.scheduler.counters()
    assert counters["accepted_draft_tokens"] == 0
    assert 0 < counters["drafted_tokens"] < 0.3 * K * 100
    driver.check_tokens("r")


def test_a_retract_drops_what_unread_steps_accepted_and_loses_nothing() -> None:
    driver = make_driver(page_size=4, num_pages=64)
    driver.submit(generate("r", [1, 2, 3], 40))
    for _ in range(5):
        driver.step()
    scheduler = driver.scheduler
    request = scheduler._requests["r"]
    assert driver.in_flight
    assert request.lease is not None
    num_read = len(driver.tokens["r"])
    scheduler._waiting.add(scheduler.ranks[0].retract(request.lease.row))
    assert len(request.tokens) == 3 + num_read
    scheduler.audit()
    driver.run()
    driver.check_tokens("r")
    assert len(driver.tokens["r"]) == 40


def test_every_accepted_token_has_its_own_log_probability() -> None:
    driver = make_driver(num_pages=64)
    # Without `return_logprob` it is not told.
    driver.submit(generate("plain", [1, 2, 3], 40, token_ids_logprob=[8]))
    wanted = {"return_logprob": True, "top_logprobs_num": 3, "token_ids_logprob": [9, 3]}
    driver.submit(generate("r", [4, 5, 6], 40, **wanted))
    driver.run()
    driver.check_tokens("r")
    driver.check_logprobs("r")
    driver.check_logprobs("plain")


def test_refused_drafts_hold_no_memory_that_others_are_retracted_for() -> None:
    """Always wrong drafts, many of them, in a pool that suffices without any retract."""
    num_drafts = 32
    sizes = make_sizes(
        page_size=1,
        num_pages=1 + 640,
        max_chunk_tokens=56,
        max_draft_tokens=num_drafts,
    )
    config = SchedulerArgs(schedule_conservativeness=0.0)
    driver = with_executor(Driver(sizes, config), UselessDrafts)
    for i in range(40):
        # Stop tokens end the outputs early, here and there: far from the most they might be.
        prompt = [i % 13 + 1] * (10 + i % 30)
        driver.submit(generate(f"r{i}", prompt, 200, stop_token_ids=(1, 2)))
    driver.run()
    assert driver.scheduler.counters()["requests_retracted"] == 0
    for i in range(40):
        driver.check_tokens(f"r{i}")


def test_rows_go_on_drafting_beside_one_whose_prompt_is_scored() -> None:
    driver = with_executor(make_driver(max_prompt_logprob_tokens=2, num_pages=64), PerfectDrafts)
    driver.submit(generate("plain", [1, 2, 3], 100))
    driver.step()
    driver.submit(generate("scored", list(range(1, 30)), 10, logprob_start_len=0))
    driver.run()
    scoring = [plan.ranks[0] for plan in driver.plans if plan.ranks[0].num_scored is not None]
    assert len(scoring) == 15
    assert all(rank.num_drafts[0] == K for rank in scoring)
    driver.check_prompt_logprobs("scored", list(range(1, 30)))
    driver.check_tokens("plain")
