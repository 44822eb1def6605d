"""Prompt log-probabilities: every position asked for, once, also through retracts and aborts."""

import pytest

from sgl_jax.core.scheduler_args import SchedulerArgs
from sgl_jax.scheduler.events import NewWeights, PlanStep, Resume
from sgl_jax.scheduler.ranks import Ranks
from sgl_jax.scheduler.runnable import Runnable, choose_runnable
from tests.scheduler.driver import Driver, generate, make_sizes


@pytest.mark.parametrize("start", [0, 1, 7, 19, 20, 30])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_lone_request_reports_every_position_from_its_start(start: int, overlap: bool) -> None:
    driver = Driver(make_sizes(max_prompt_logprob_tokens=3), overlap=overlap)
    prompt = list(range(20))
    ids = [4, 40, 4]
    driver.submit(generate("a", prompt, 4, logprob_start_len=start, token_ids_logprob=ids))
    driver.run()
    driver.check_tokens("a")
    driver.check_prompt_logprobs("a", prompt)
    assert len(driver.prompt_logprobs["a"]) == max(20 - start, 0)


def test_a_lone_request_is_planned_at_once() -> None:
    driver = Driver(make_sizes())
    driver.submit(generate("a", [1, 2, 3], 2, logprob_start_len=0))
    plan = driver.scheduler.handle(PlanStep())
    assert plan is not None
    assert [admission.row for admission in plan.ranks[0].admissions] == plan.ranks[0].rows.tolist()
    assert plan.ranks[0].num_scored is not None


def test_what_the_cache_has_is_computed_again_where_it_must_be_reported() -> None:
    driver = Driver(make_sizes(num_pages=60))
    prompt = list(range(20))
    for rid, start in (("a", -1), ("b", 9), ("c", 8), ("d", 0)):
        driver.submit(generate(rid, prompt, 2, logprob_start_len=start))
        driver.run()
        driver.check_tokens(rid)
        driver.check_prompt_logprobs(rid, prompt)
    assert driver.cached == {"a": 0, "b": 8, "c": 4, "d": 0}


def scored_driver(dp_size: int = 1) -> Driver:
    """A step takes chunks of 16 tokens, 5 of which it may score."""
    sizes = make_sizes(
        dp_size=dp_size, max_chunk_tokens=16, max_prompt_logprob_tokens=5, num_pages=100
    )
    return Driver(sizes)


def chunks(driver: Driver, dp_rank: int = 0) -> list[dict[int, int]]:
    """Of each step, the prefill tokens by row."""
    ranks = [plan.ranks[dp_rank] for plan in driver.plans]
    return [
        dict(zip(r.rows[r.num_decode :].tolist(), r.q_lens[r.num_decode :].tolist(), strict=True))
        for r in ranks
    ]


def row_of(driver: Driver, rid: str) -> int:
    lease = driver.scheduler._requests[rid].lease
    assert lease is not None
    return lease.row


def check_all(driver: Driver) -> None:
    for rid, prompt in driver.prompts.items():
        driver.check_tokens(rid)
        driver.check_prompt_logprobs(rid, prompt)


def test_only_the_row_that_is_scored_is_held_to_what_a_step_may_score() -> None:
    driver = scored_driver()
    driver.submit(generate("decodes", [1], 30))
    for _ in range(3):
        driver.step()
    driver.submit(generate("scored", list(range(30)), 3, logprob_start_len=0))
    driver.submit(generate("plain", list(range(10, 40)), 3))
    num_before = len(driver.plans)
    driver.step()
    scored, plain = row_of(driver, "scored"), row_of(driver, "plain")
    driver.run()
    after = driver.plans[num_before : num_before + 6]
    assert all(plan.ranks[0].num_decode >= 1 for plan in after)
    assert [plan.ranks[0].num_scored is not None for plan in after] == [True] * 6
    assert chunks(driver)[num_before:][:3] == [
        {scored: 5, plain: 11},
        {scored: 5, plain: 11},
        {scored: 5, plain: 8},
    ]
    check_all(driver)


def test_rows_that_are_scored_share_what_a_step_may_score_oldest_first() -> None:
    driver = scored_driver()
    for i in range(3):
        driver.submit(generate(f"r{i}", list(range(i, i + 8)), 3, logprob_start_len=0))
    driver.run()
    per_step = [p.ranks[0].num_scored for p in driver.plans if p.ranks[0].num_scored is not None]
    assert [int(num.sum()) for num in per_step] == [5, 5, 5, 5, 4]
    check_all(driver)


def test_what_comes_before_the_first_position_wanted_is_prefilled_in_whole_chunks() -> None:
    driver = scored_driver()
    driver.submit(generate("a", [i % 50 for i in range(100)], 2, logprob_start_len=91))
    driver.run()
    assert [sum(step.values()) for step in chunks(driver)[:7]] == [16, 16, 16, 16, 16, 15, 5]
    assert [plan.ranks[0].num_scored is not None for plan in driver.plans[:7]] == [False] * 5 + [
        True,
        True,
    ]
    check_all(driver)


def test_other_ranks_prefill_whole_chunks_while_one_is_scored() -> None:
    driver = scored_driver(dp_size=2)
    driver.submit(generate("scored", list(range(50)), 3, logprob_start_len=0, dp_rank=0))
    driver.submit(generate("plain", [i % 50 for i in range(64)], 3, dp_rank=1))
    driver.run()
    assert [sum(step.values()) for step in chunks(driver, 0)[:10]] == [5] * 10
    assert [sum(step.values()) for step in chunks(driver, 1)[:4]] == [16] * 4
    check_all(driver)


@pytest.mark.parametrize("is_scored", [False, True])
def test_a_neighbours_first_token_comes_as_soon_as_without_a_scored_prompt(
    is_scored: bool,
) -> None:
    driver = scored_driver()
    start = 0 if is_scored else -1
    driver.submit(generate("first", list(range(40, 45)), 60, logprob_start_len=start))
    driver.submit(generate("plain", [i % 40 for i in range(55)], 3))
    driver.step()
    lease = driver.scheduler._requests["plain"].lease
    driver.run()
    assert lease is not None
    first = next(
        i
        for i, plan in enumerate(driver.plans)
        if plan.ranks[0].samples[plan.ranks[0].rows == lease.row].any()
    )
    assert first == 3  # the fourth step: 60 tokens in chunks of 16


def test_a_step_is_planned_once_though_a_scored_request_comes_with_it() -> None:
    driver = scored_driver()
    driver.submit(generate("a", [1, 2, 3], 2, logprob_start_len=0))
    calls = []

    def choose(ranks: Ranks) -> Runnable:
        calls.append(ranks)
        return choose_runnable(ranks)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sgl_jax.scheduler.scheduler.choose_runnable", choose)
        driver.step()
        driver.run()
    # One more that found nothing to plan: the last result was still to be read.
    assert len(calls) == len(driver.plans) + 1
    check_all(driver)


@pytest.mark.parametrize("steps_before", range(1, 9))
def test_a_retract_in_the_middle_neither_loses_nor_repeats_any(steps_before: int) -> None:
    driver = Driver(make_sizes(max_prompt_logprob_tokens=4))
    prompt = list(range(20))
    driver.submit(generate("a", prompt, 6, logprob_start_len=2, token_ids_logprob=[7]))
    for _ in range(steps_before):
        driver.step()
    driver.retract("a")
    driver.run()
    driver.check_tokens("a")
    driver.check_prompt_logprobs("a", prompt)


def test_an_admission_that_was_never_launched_dies_with_its_request() -> None:
    """A request with a row but no step yet is aborted; its row goes to the next one."""
    sizes = make_sizes(num_rows=3)
    driver = Driver(sizes, SchedulerArgs(), overlap=False)
    driver.submit(generate("plain", [1, 2, 3], 20))
    driver.step()
    driver.submit(generate("scored", list(range(9)), 3, logprob_start_len=0))
    driver.step()
    driver.abort("scored")
    driver.submit(generate("next", list(range(20, 29)), 3))
    driver.run()
    assert all(
        len({admission.row for admission in plan.ranks[0].admissions})
        == len(plan.ranks[0].admissions)
        for plan in driver.plans
    )
    for rid in driver.prompts:
        driver.check_tokens(rid)


@pytest.mark.parametrize("keeps_running", [False, True])
@pytest.mark.parametrize("num_steps", [3, 8])
def test_new_weights_score_all_that_was_not_sent_again(num_steps: int, keeps_running: bool) -> None:
    """After 8 steps only the last token of the prompt is left."""
    driver = scored_driver()
    prompt = list(range(41))
    driver.submit(generate("sent", prompt[:4], 40, logprob_start_len=0))
    driver.step()
    driver.submit(generate("a", prompt, 4, logprob_start_len=0))
    for _ in range(num_steps):
        driver.step()
    driver.pause("in_place")
    for _ in range(2):
        driver.step()
    assert len(driver.prompt_logprobs["sent"]) == 4
    num_before = len(driver.plans)
    kept = driver.scheduler.handle(NewWeights(keeps_running))
    assert kept == (["sent"] if keeps_running else [])
    driver.scheduler.handle(Resume())
    driver.run()
    check_all(driver)
    scored = [rank.num_scored for plan in driver.plans[num_before:] for rank in plan.ranks]
    assert sum(int(each.sum()) for each in scored if each is not None) == len(prompt)
    driver.check_replay()
