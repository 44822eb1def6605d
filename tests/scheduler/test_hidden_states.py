"""Requests that want the last hidden state of their prompts, next to others."""

import pytest

from sgl_jax.core.messages import GenerateRequest
from sgl_jax.core.scheduler_args import SchedulerArgs
from sgl_jax.scheduler.events import AwaitPrograms, ProgramsReady
from tests.scheduler.driver import Driver, forced_retract, generate, make_sizes
from tests.support.oracle_executor import OracleExecutor

LONG = [7 + i % 30 for i in range(21)]


def embed(rid: str, prompt: list[int], **kwargs: object) -> GenerateRequest:
    return generate(rid, prompt, 1, is_prompt_only=True, return_hidden=True, **kwargs)


@pytest.mark.parametrize("interval", [0, 3], ids=["", "retracts"])
@pytest.mark.parametrize("num_ahead", [0, 2])
@pytest.mark.parametrize("has_drafts", [False, True], ids=["steps", "drafts"])
def test_each_gets_its_own_state(interval: int, num_ahead: int, has_drafts: bool) -> None:
    sizes = make_sizes(dp_size=2, max_draft_tokens=num_ahead * has_drafts, num_pages=24)
    if not has_drafts:
        sizes = sizes._replace(max_decode_steps=1 + num_ahead)
    driver = Driver(sizes, SchedulerArgs(**forced_retract(interval)))
    prompts = {"long": LONG, "one": [5], "prefix": LONG[:9], "other": [9, *LONG]}
    driver.submit(generate("plain", [1, 2, 3], 20))
    for rid, prompt in prompts.items():
        driver.submit(embed(rid, prompt))
    driver.submit(generate("late", LONG[:3], 12))
    driver.run()
    prompts |= {"again": LONG, "page": LONG[:8]}  # from a full cache
    for rid in ("again", "page"):
        driver.submit(embed(rid, prompts[rid]))
    driver.submit(generate("same", LONG, 9))
    driver.run()
    prompts["alone"] = [40, *LONG[:8]]  # a chunk, and a token next to a request that decodes
    driver.submit(generate("decodes", [1, 2], 20))
    for _ in range(4):
        driver.step()
    driver.submit(embed("alone", prompts["alone"]))
    driver.run()
    assert driver.hidden == {
        rid: driver.oracle.expected_hidden(prompt) for rid, prompt in prompts.items()
    }
    assert driver.cached["again"] >= 20
    for rid in ("plain", "late", "same", "decodes"):
        driver.check_tokens(rid)
    driver.check_replay()
    is_masked = [plan.is_masked for plan in driver.plans]
    assert any(is_masked)
    assert not all(is_masked)


def test_a_chunk_before_the_last_needs_no_masked_step() -> None:
    driver = Driver(make_sizes(), SchedulerArgs())
    driver.submit(embed("long", LONG))
    driver.run()
    flags = [(plan.is_masked, plan.ranks[0].returns_hidden) for plan in driver.plans]
    assert flags == [(False, False), (False, False), (True, True)]


def test_they_wait_for_the_programs_of_their_steps_alone() -> None:
    driver = Driver(make_sizes(), SchedulerArgs())
    driver.scheduler.handle(AwaitPrograms())
    driver.submit(embed("held", [4, 5]))
    assert driver.scheduler.why_waiting("held").kind == "program"
    assert driver.scheduler.is_resting
    driver.scheduler.handle(ProgramsReady(""))
    driver.submit(embed("late", [4, 6]))
    driver.run()
    assert set(driver.hidden) == {"held", "late"}


def test_without_programs_they_end_with_the_reason() -> None:
    driver = Driver(make_sizes(), SchedulerArgs())
    driver.scheduler.handle(AwaitPrograms())
    driver.submit(embed("held", [4, 5]))
    driver.scheduler.handle(ProgramsReady("no programs"))
    driver.submit(embed("late", [4, 6]))
    driver.submit(generate("plain", [4, 7], 2))
    driver.run()
    for rid in ("held", "late"):
        assert (driver.finish[rid].message, driver.finish[rid].status_code) == ("no programs", 500)
    driver.check_tokens("plain")


def test_a_row_that_is_not_finite_returns_no_state() -> None:
    driver = Driver(make_sizes(), SchedulerArgs())
    assert isinstance(driver.executor, OracleExecutor)
    driver.executor.bad_token = 40
    driver.submit(embed("bad", [3, 40, 5]))
    driver.submit(embed("good", [3, 4, 5]))
    driver.run()
    assert (driver.finish["bad"].type, driver.finish["bad"].status_code) == ("abort", 500)
    assert driver.hidden == {"good": driver.oracle.expected_hidden([3, 4, 5])}
