"""Prompt log-probabilities: every position asked for, once, whatever happens to the request."""

import pytest

from sgl_jax.scheduler.config import SchedulerConfig
from tests.scheduler.driver import Driver, generate, make_sizes


@pytest.mark.parametrize("start", [0, 1, 7, 19, 20, 30])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_lone_request_reports_every_position_from_its_start(start: int, overlap: bool) -> None:
    driver = Driver(make_sizes(max_prompt_logprob_tokens=3), overlap=overlap)
    prompt = list(range(20))
    driver.submit(generate("a", prompt, 4, logprob_start_len=start))
    driver.run()
    driver.check_tokens("a")
    driver.check_prompt_logprobs("a", prompt)
    assert len(driver.prompt_logprobs["a"]) == max(20 - start, 0)


def test_a_lone_request_is_planned_at_once() -> None:
    driver = Driver(make_sizes())
    driver.submit(generate("a", [1, 2, 3], 2, logprob_start_len=0))
    plan = driver.scheduler.plan()
    assert plan is not None
    assert [admission.row for admission in plan.ranks[0].admissions] == plan.ranks[0].rows.tolist()
    assert plan.ranks[0].prompt_logprobs is not None


def test_what_the_cache_has_is_computed_again_where_it_must_be_reported() -> None:
    driver = Driver(make_sizes(num_pages=60))
    prompt = list(range(20))
    for rid, start in (("a", -1), ("b", 9), ("c", 8), ("d", 0)):
        driver.submit(generate(rid, prompt, 2, logprob_start_len=start))
        driver.run()
        driver.check_tokens(rid)
        driver.check_prompt_logprobs(rid, prompt)
    assert driver.cached == {"a": 0, "b": 8, "c": 4, "d": 0}


def test_a_step_that_reports_them_stays_within_its_narrow_program() -> None:
    sizes = make_sizes(max_step_tokens=16, max_prompt_logprob_tokens=5, num_pages=60)
    driver = Driver(sizes, SchedulerConfig(chunked_prefill_size=16))
    driver.submit(generate("decodes", [1], 30))
    for _ in range(3):
        driver.step()
    driver.submit(generate("scored", list(range(30)), 3, logprob_start_len=0))
    driver.submit(generate("plain", list(range(10, 40)), 3))
    driver.run()
    narrow = [plan.ranks[0] for plan in driver.plans if plan.ranks[0].prompt_logprobs is not None]
    assert len(narrow) >= 6
    assert all(int(plan.q_lens[plan.num_decode :].sum()) <= 5 for plan in narrow)
    for rid in driver.prompts:
        driver.check_tokens(rid)
        driver.check_prompt_logprobs(rid, driver.prompts[rid])


@pytest.mark.parametrize("steps_before", range(1, 9))
def test_a_retract_in_the_middle_neither_loses_nor_repeats_any(steps_before: int) -> None:
    driver = Driver(make_sizes(max_prompt_logprob_tokens=4))
    prompt = list(range(20))
    driver.submit(generate("a", prompt, 6, logprob_start_len=2))
    for _ in range(steps_before):
        driver.step()
    driver.retract("a")
    driver.run()
    driver.check_tokens("a")
    driver.check_prompt_logprobs("a", prompt)


def test_an_admission_that_was_never_launched_dies_with_its_request() -> None:
    """A request with a row but no step yet is aborted; its row goes to the next one."""
    sizes = make_sizes(num_rows=3, max_step_tokens=8)
    driver = Driver(sizes, SchedulerConfig(chunked_prefill_size=8), overlap=False)
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
