"""Requests that report values of their tokens, next to others."""

from typing import Any

import numpy as np
import pytest

from sgl_jax.core.messages import GenerateRequest
from sgl_jax.core.scheduler_args import SchedulerArgs
from sgl_jax.scheduler.events import NewWeights
from tests.scheduler.driver import Driver, forced_retract, generate, make_sizes
from tests.support.oracle_executor import OracleExecutor

LONG = [7 + i % 30 for i in range(21)]


def routed(rid: str, prompt: list[int], max_new_tokens: int, **kwargs: Any) -> GenerateRequest:
    return generate(rid, prompt, max_new_tokens, return_routed_experts=True, **kwargs)


def check_values(driver: Driver, rid: str, start: int = 0, name: str = "routed_experts") -> None:
    """All tokens from `start` to the last but one have the values of their prefix."""
    driver.check_tokens(rid)
    tokens = driver.prompts[rid] + driver.tokens[rid]
    expected = driver.oracle.expected_values(name, tokens[:-1])[start:]
    assert driver.values[rid, name] == expected.tobytes()


@pytest.mark.parametrize("interval", [0, 3], ids=["", "retracts"])
@pytest.mark.parametrize("num_ahead", [0, 2])
@pytest.mark.parametrize("has_drafts", [False, True], ids=["steps", "drafts"])
def test_each_token_has_its_own_experts(interval: int, num_ahead: int, has_drafts: bool) -> None:
    sizes = make_sizes(dp_size=2, max_draft_tokens=num_ahead * has_drafts, num_pages=24)
    if not has_drafts:
        sizes = sizes._replace(max_decode_steps=1 + num_ahead)
    driver = Driver(sizes, SchedulerArgs(**forced_retract(interval)))
    driver.submit(generate("plain", [1, 2, 3], 20))
    prompts = {"long": LONG, "one": [5], "prefix": LONG[:9]}
    for rid, prompt in prompts.items():
        driver.submit(routed(rid, prompt, 12))
    driver.run()
    starts = {"cached": 0, "middle": 10, "end": len(LONG)}
    for rid, start in starts.items():
        driver.submit(routed(rid, LONG, 9, routed_experts_start_len=start))
    driver.submit(routed("scored", LONG, 5, return_logprob=True, logprob_start_len=3))
    driver.submit(generate("hidden", LONG, 7, return_hidden_states=True))
    both = {"return_hidden_states": True, "routed_experts_start_len": 4}
    driver.submit(routed("both", LONG, 3, **both))
    driver.run()
    for rid in (*prompts, *starts, "scored", "both"):
        check_values(driver, rid, starts.get(rid, 0))
    for rid in ("hidden", "both"):
        check_values(driver, rid, name="hidden_states")
        assert driver.cached[rid] == 0
    assert driver.cached["cached"] == 0
    assert driver.cached["middle"] == 8, "whole pages before the first position"
    assert driver.cached["end"] == 20
    named = {"hidden": 1, "both": 2, "plain": 0}
    assert {rid: [own for own, _ in driver.values].count(rid) for rid in named} == named
    driver.check_tokens("plain")
    driver.check_replay()
    reports = [any(rank.token_values for rank in plan.ranks) for plan in driver.plans]
    assert any(reports)


def test_no_prefix_is_taken_that_lacks_experts_after_a_retract() -> None:
    driver = Driver(make_sizes(), SchedulerArgs())
    driver.submit(routed("cut", LONG, 6))
    driver.step()
    driver.step()
    driver.retract("cut")
    driver.submit(generate("same", LONG, 3))
    driver.run()
    check_values(driver, "cut")


@pytest.mark.parametrize("num_steps", [2, 5])
@pytest.mark.parametrize("keeps_running", [False, True])
def test_new_weights_leave_the_experts_of_an_output(num_steps: int, keeps_running: bool) -> None:
    """A prompt without output is computed again, and reported as by the new weights."""
    driver = Driver(make_sizes(), SchedulerArgs())
    driver.submit(routed("a", LONG, 6))
    driver.submit(routed("waits", LONG[:7], 6))
    for _ in range(num_steps):
        driver.step()
    while driver.in_flight:
        driver.launch_and_read(None)
    driver.retract("a")
    driver.collect()
    num_known = {rid: len(driver.tokens[rid]) for rid in ("a", "waits")}
    driver.scheduler.handle(NewWeights(keeps_running))
    driver.oracle.weights = 1
    driver.submit(generate("same", LONG, 3))
    driver.run()
    for rid, num_outputs in num_known.items():
        tokens = driver.prompts[rid] + driver.tokens[rid]
        first = len(driver.prompts[rid]) + num_outputs - 1 if num_outputs else 0
        before = driver.oracle.expected_values("routed_experts", tokens[:first])
        after = driver.oracle.expected_values("routed_experts", tokens[:-1], weights=1)[first:]
        assert driver.values[rid, "routed_experts"] == np.concatenate([before, after]).tobytes()
    assert (num_known["a"] > 0) == (num_steps > 2)


def test_a_failed_row_reports_no_experts() -> None:
    driver = Driver(make_sizes(), SchedulerArgs())
    assert isinstance(driver.executor, OracleExecutor)
    driver.executor.bad_token = 40
    driver.submit(routed("bad", [3, 40, 5], 4))
    driver.submit(routed("good", [3, 4, 5], 4))
    driver.run()
    assert driver.finish["bad"].status_code == 500
    assert not driver.values["bad", "routed_experts"]
    check_values(driver, "good")


def test_a_start_behind_the_prompt_is_refused() -> None:
    driver = Driver(make_sizes(), SchedulerArgs())
    driver.submit(routed("late", [3, 4], 4, routed_experts_start_len=3))
    assert driver.finish["late"].param == "routed_experts_start_len"
    assert "[0, 2]" in (driver.finish["late"].message or "")
