"""Runs of the state machines that are longer than hypothesis draws, by seed."""

import pytest

from tests.scheduler.random_runs import main, run

NUM_PARTS = 20
RUNS_OF_A_PART = 105


@pytest.mark.parametrize("with_sessions", [False, True])
def test_random_runs_break_no_invariant(with_sessions: bool) -> None:
    assert main(10_001, 10_003, with_sessions=with_sessions) > 1000


def test_a_run_whose_youngest_request_had_the_shorter_limit() -> None:
    """Sums of the reserve kept moments past the limit of the youngest."""
    main(90_041, 90_041, with_sessions=True)


def test_a_run_whose_start_lets_another_request_preempt() -> None:
    """The start made the reserve smaller: the other was tried before it alone, and later only
    together with the request that had just started."""
    main(12, 12)


def test_a_run_whose_start_makes_the_reserve_of_a_preemption_smaller() -> None:
    """The reserve of all that ran stayed the same, but not that of the requests which a preemption
    leaves: the youngest of these had a shorter limit after the start."""
    main(21_385, 21_385)


def test_a_run_whose_due_request_starts_on_another_rank_than_the_one_held_for_it() -> None:
    """The rank stayed held in that step, against a request that fitted there."""
    main(981, 981)


def test_a_run_whose_request_starts_in_the_row_of_a_preempted_prompt() -> None:
    """Its prompt tokens were taken to be what the preempted one lacked, and a step had too many."""
    main(500_107, 500_107)


def test_a_run_whose_short_request_is_tried_again_when_its_prefix_has_come() -> None:
    """The queue took it to wait still, and the rank took no short requests meanwhile."""
    main(500_059, 500_059)


def test_a_run_whose_start_brings_the_prefix_of_another_request_into_use() -> None:
    """The pages in use had been counted before the start, so the other seemed not to fit."""
    main(573, 573)


@pytest.mark.parametrize("seed", [500_057, 500_117, 500_127])
def test_a_run_whose_step_gets_tokens_for_short_prompts_as_longer_ones_start(seed: int) -> None:
    """They start in the next step."""
    main(seed, seed)


@pytest.mark.parametrize("with_sessions", [False, True])
def test_runs_with_rows_that_are_not_finite_break_no_invariant(*, with_sessions: bool) -> None:
    main(1, 1, with_sessions=with_sessions, with_glitches=True)


def test_a_run_on_thrashing_ranks_breaks_no_invariant() -> None:
    _, met = run(14, is_thrashing=True)
    assert met["working_set"] > 10


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("with_sessions", [False, True])
def test_many_runs_on_thrashing_ranks(*, with_sessions: bool) -> None:
    main(1, 120, with_sessions=with_sessions, is_thrashing=True)


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("with_sessions", [False, True])
def test_many_runs_with_rows_that_are_not_finite(*, with_sessions: bool) -> None:
    main(2, 60, with_sessions=with_sessions, with_glitches=True)


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_a_million_steps_break_no_invariant(part: int) -> None:
    first = 1 + part * RUNS_OF_A_PART
    assert main(first, first + RUNS_OF_A_PART - 1) >= 1_000_000 // NUM_PARTS


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_many_runs_with_conversations_break_no_invariant() -> None:
    assert main(1, 150, with_sessions=True) >= 60_000
