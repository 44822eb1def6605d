"""A plan of several decode steps: when there is one, its slots, and what its results do."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from sgl_jax.core.engine_messages import FinishReason
from sgl_jax.core.engine_sizes import CacheGroup
from sgl_jax.core.messages import StopRequest
from sgl_jax.core.scheduler_args import SchedulerArgs
from sgl_jax.core.step_plan import StepPlan
from sgl_jax.scheduler.events import DecodeSteps, GrammarReady
from tests.scheduler.driver import Driver, generate, make_sizes
from tests.scheduler.setups import PLAIN, Setup, setups
from tests.scheduler.test_state_machine import OPTIONS, SchedulerMachine, run_machine
from tests.sessions.test_session_machine import MAX_SESSIONS, SessionMachine

PROMPT = [1, 2, 3, 4, 5]


def make_driver(num_steps: int = 4, **settings: Any) -> Driver:
    max_unread = settings.pop("max_unread", 1)
    sizes = make_sizes(**settings)._replace(max_decode_steps=num_steps)
    return Driver(sizes, max_unread=max_unread)


def steps_of(plan: StepPlan) -> list[list[int] | None]:
    return [None if rank.num_steps is None else rank.num_steps.tolist() for rank in plan.ranks]


def decode_plans(driver: Driver) -> list[list[int] | None]:
    """The steps of rank 0's rows, of each plan after the prompts."""
    plans = [plan for plan in driver.plans if all(r.num_decode == len(r.rows) for r in plan.ranks)]
    return [steps_of(plan)[0] for plan in plans]


def test_a_row_takes_several_steps_up_to_its_limit() -> None:
    driver = make_driver()
    driver.submit(generate("a", PROMPT, 11))
    driver.run()
    driver.check_tokens("a")
    assert driver.finish["a"] == FinishReason("length")
    assert len(driver.tokens["a"]) == 11
    # One token of the prompt's step, then ten.
    assert decode_plans(driver) == [[4], [4], [2]]


def test_rows_of_all_ranks_take_their_own_numbers_of_steps() -> None:
    driver = make_driver(dp_size=2)
    driver.submit(generate("a", PROMPT, 3, dp_rank=0))
    driver.submit(generate("b", PROMPT, 9, dp_rank=1))
    driver.run()
    for rid, count in (("a", 3), ("b", 9)):
        driver.check_tokens(rid)
        assert len(driver.tokens[rid]) == count
    assert [steps_of(plan) for plan in driver.plans][1:3] == [[[2], [4]], [[], [4]]]


def test_a_stop_token_ends_a_row_amid_its_steps_and_frees_the_rest() -> None:
    driver = make_driver(num_steps=16, vocab_size=50)
    output = driver.oracle.expected_output(PROMPT, 8)
    assert output[5] not in output[:5]
    driver.submit(generate("a", PROMPT, 40, stop_token_ids=(output[5],)))
    driver.run()
    assert driver.tokens["a"] == output[:6]
    assert driver.finish["a"] == FinishReason("stop", output[5])


def test_no_stop_counts_before_the_least_number_of_tokens() -> None:
    driver = make_driver(num_steps=16)
    output = driver.oracle.expected_output(PROMPT, 12)
    driver.submit(generate("a", PROMPT, 12, stop_token_ids=tuple(output), min_new_tokens=7))
    driver.run()
    assert driver.tokens["a"] == output[:8]


@pytest.mark.parametrize("max_unread", [0, 1, 2])
def test_a_waiting_request_or_a_prompt_makes_it_one_step(max_unread: int) -> None:
    driver = make_driver(num_rows=2, max_unread=max_unread)  # one request runs
    driver.submit(generate("a", PROMPT, 9))
    driver.submit(generate("b", PROMPT, 9))
    while "a" not in driver.finish:
        driver.step()
    assert set(map(str, decode_plans(driver))) == {"None"}
    before = len(driver.plans)
    driver.run()
    assert any(steps_of(plan)[0] for plan in driver.plans[before:])


def test_a_row_with_a_grammar_makes_it_one_step() -> None:
    driver = make_driver()
    driver.submit(generate("a", PROMPT, 9, regex="a*"))
    driver.scheduler.handle(GrammarReady("a"))
    driver.submit(generate("b", PROMPT, 40))
    for _ in range(3):
        driver.step()
    plan = driver.plans[-1]
    assert plan.ranks[0].num_decode == 2
    assert plan.is_masked
    assert not plan.has_steps


def test_steps_count_as_no_drafts() -> None:
    driver = make_driver()
    driver.submit(generate("a", PROMPT, 20))
    driver.run()
    counters = driver.scheduler.counters()
    assert counters["generated_tokens"] == 20
    assert counters["drafted_tokens"] == counters["verified_rows"] == 0


def test_rows_with_windows_hold_pages_for_the_steps_of_three_launches() -> None:
    group = CacheGroup(8)
    sizes = make_sizes(page_size=1, max_chunk_tokens=1, groups=(group,))
    several = sizes._replace(max_decode_steps=16)
    assert sizes.resting_pages(group) == 7 + 2 + 1
    assert several.resting_pages(group) == 7 + 47 + 1


def test_log_probabilities_come_with_each_token() -> None:
    driver = make_driver(num_steps=16)
    driver.submit(generate("a", PROMPT, 20, return_logprob=True, top_logprobs_num=2))
    driver.run()
    driver.check_logprobs("a")
    assert decode_plans(driver) == [[16], [3]]


def test_a_rank_short_of_pages_takes_one_step_before_it_retracts() -> None:
    sizes = make_sizes(page_size=1, num_pages=1 + 32)._replace(max_decode_steps=4)
    config = SchedulerArgs(schedule_conservativeness=0.0, disable_radix_cache=True)
    driver = Driver(sizes, config, max_unread=0)
    for rid in ("a", "b"):
        driver.submit(generate(rid, [*PROMPT, ord(rid) % 50], 18))
    rows = driver.scheduler.ranks[0].memory.rows
    held = 0
    while not driver.scheduler.counters()["requests_retracted"]:
        held = int(rows.kv_committed_len.sum())
        driver.step()
    assert held == 31  # of 32 slots, and two are needed
    assert decode_plans(driver)[:4] == [[4, 4], [4, 4], None, None]
    driver.run()
    for rid in ("a", "b"):
        driver.check_tokens(rid)
        assert len(driver.tokens[rid]) == 18


def test_a_stop_string_keeps_the_tokens_before_it_and_drops_the_steps_in_flight() -> None:
    driver = make_driver(num_steps=4)
    driver.submit(generate("a", PROMPT, 40))
    for _ in range(3):
        driver.step()
    assert driver.in_flight
    driver.scheduler.handle(StopRequest(rid="a", num_output_tokens=2))
    driver.run()
    count = len(driver.tokens["a"])
    assert driver.tokens["a"] == driver.oracle.expected_output(PROMPT, count)


def test_a_retracted_row_draws_the_tokens_of_its_steps_again() -> None:
    driver = make_driver(num_steps=4)
    driver.submit(generate("a", PROMPT, 30))
    for _ in range(4):
        driver.step()
    driver.retract("a")
    driver.run()
    driver.check_tokens("a")
    assert len(driver.tokens["a"]) == 30


def test_a_row_with_results_that_are_not_finite_gains_nothing_of_the_launch() -> None:
    driver = make_driver(num_steps=4)
    driver.submit(generate("a", PROMPT, 30))
    driver.step()
    driver.step()
    read = len(driver.tokens["a"])
    driver.oracle.rows_to_glitch = 2  # in the third step of the next launch
    driver.run()
    assert driver.finish["a"].status_code == 500
    assert len(driver.tokens["a"]) <= read + 4
    driver.check_tokens("a")


def test_the_loop_may_change_the_number_between_plans() -> None:
    driver = make_driver(num_steps=16)
    driver.submit(generate("a", PROMPT, 30))
    driver.step()
    for num_steps in (1, 8, 2):
        driver.scheduler.handle(DecodeSteps(num_steps))
        driver.step()
    driver.run()
    assert decode_plans(driver)[:3] == [None, [8], [2]]
    driver.check_tokens("a")
    driver.check_replay()


def test_a_row_that_may_have_reached_its_limit_waits_for_its_result() -> None:
    driver = make_driver(num_steps=8, max_unread=2)
    driver.submit(generate("a", PROMPT, 20))
    driver.run()
    assert decode_plans(driver) == [[8], [8], [3]]
    assert np.array(decode_plans(driver)).sum() == 19


SETUP: dict[str, Any] = {
    "num_rows": st.integers(3, 7),
    "pool_tokens": st.sampled_from([80, 128, 256]),
    "chunk": st.sampled_from([8, 16, 64]),
    "num_decode_steps": st.sampled_from([2, 4, 16]),
    "num_draft_tokens": st.just(0),
    "states": st.none(),
    "no_prefill_bs": st.just(0),
}


class StepsMachine(SchedulerMachine):
    """Random events, and plans of several steps where there may be any."""

    @initialize(setup=setups(**SETUP))
    def start(self, setup: Setup) -> None:
        super().start(setup)


class SessionStepsMachine(SessionMachine):
    """The same with conversations."""

    @initialize(
        setup=setups(
            **SETUP,
            retract_interval=st.sampled_from([0, 0, 0, 1, 3]),
            conservativeness=st.sampled_from([0.0, 0.3]),
            threshold=st.just(0),
            eviction=st.just("adaptive"),
            max_sessions=st.just(MAX_SESSIONS),
        )
    )
    def start(self, setup: Setup) -> None:
        super().start(setup)


@pytest.mark.parametrize("kind", [StepsMachine, SessionStepsMachine])
def test_random_events_among_plans_of_several_steps(
    tmp_path: Path, kind: type[SchedulerMachine]
) -> None:
    run_machine(tmp_path, kind, **OPTIONS | {"max_examples": 30})


def test_a_session_keeps_the_kv_of_its_stop_token() -> None:
    """The launch after the one with the stop token was planned before that was read."""
    machine = SessionStepsMachine()
    machine.start(
        replace(PLAIN, num_decode_steps=2, max_unread=1, chunk=8, max_sessions=MAX_SESSIONS)
    )
    machine.turns_whose_tokens_are_known(count=2, seed=255)
    machine.teardown()
