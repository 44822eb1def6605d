"""Requests whose drafts bring nothing stop drafting, and try again later."""

import numpy as np
import pytest

from sgl_jax.core.messages import GenerateRequest
from sgl_jax.core.sampling_params import SamplingParams
from sgl_jax.core.step_plan import Int32Array
from sgl_jax.scheduler.draft_policy import (
    choose_drafts,
    choose_expected,
    rate_drafts,
    start_drafting,
)
from sgl_jax.scheduler.request import Request
from sgl_jax.scheduler.running_rows import RowColumns, RunningRows

ROWS = np.array([2, 5])
MOST = 4


def ints(*values: int) -> Int32Array:
    return np.array(values, np.int32)


@pytest.fixture
def running() -> RowColumns:
    running = RowColumns.empty(num_rows=8, max_context_len=16, max_stop_ids=1)
    running.max_len[:] = 1_000_000
    for row in ROWS.tolist():
        start_drafting(running, row, MOST)
    return running


def choose(running: RowColumns, rows: np.ndarray, *known_lens: int) -> list[int]:
    running.known_len[rows] = running.planned_len[rows] = known_lens
    return choose_drafts(running, rows, MOST).tolist()


def learn(running: RowColumns, accepted: tuple[int, ...], *known_lens: int) -> None:
    rows = ROWS[: len(accepted)]
    running.known_len[rows] = known_lens
    rate_drafts(running, rows, np.full(len(rows), MOST, np.int32), ints(*accepted))


def test_new_requests_draft(running: RowColumns) -> None:
    assert choose(running, ROWS, 10, 20) == [4, 4]


def test_no_request_drafts_past_its_end(running: RowColumns) -> None:
    running.max_len[ROWS] = 13, 10
    assert choose(running, ROWS, 10, 10) == [2, 0]
    running.unread_drafts[2] = 1
    assert choose(running, ROWS, 10, 10) == [1, 0]


def test_useless_drafts_pause_and_useful_ones_go_on(running: RowColumns) -> None:
    for step in range(1, 11):
        learn(running, (0, 3), 10 + step, 10 + 4 * step)
    assert choose(running, ROWS, 20, 50) == [0, 4]


def test_a_row_drafts_about_as_many_as_it_has_accepted(running: RowColumns) -> None:
    numbers = []
    for step in range(1, 13):
        accepted = 1 if step < 10 else 4
        learn(running, (accepted,), 10 + step)
        numbers += choose(running, ROWS[:1], 10 + step)
    assert numbers == sorted(numbers[:9], reverse=True) + sorted(numbers[9:])
    assert numbers[0] == 4
    assert numbers[8] == 3
    assert numbers[-1] == 4


def test_a_row_whose_few_drafts_come_right_never_pauses(running: RowColumns) -> None:
    """However many it may draft."""
    start_drafting(running, ROWS, 32)
    running.known_len[ROWS] = running.planned_len[ROWS] = 10
    for _ in range(40):
        drafts = choose_drafts(running, ROWS, 32)
        assert drafts.all()
        rate_drafts(running, ROWS, drafts, np.minimum(drafts, ints(1, 2)))
    assert drafts.tolist() == [3, 5]


def test_what_was_not_drafted_teaches_nothing(running: RowColumns) -> None:
    for _ in range(10):
        rate_drafts(running, ROWS, ints(0, 0), ints(0, 0))
    assert choose(running, ROWS, 10, 20) == [4, 4]


def test_a_pause_ends_and_a_row_that_fails_again_pauses_sooner_and_longer(
    running: RowColumns,
) -> None:
    length = 10
    steps_until_pause, pauses = [], []
    for _ in range(5):
        steps, pause = 0, 0
        while choose(running, ROWS[:1], length) != [0]:
            steps, length = steps + 1, length + 1
            learn(running, (0,), length)
        steps_until_pause.append(steps)
        while choose(running, ROWS[:1], length) == [0]:
            length, pause = length + 1, pause + 1
        pauses.append(pause)
    assert steps_until_pause[0] > 3
    assert steps_until_pause[1:] == [2] * 4
    assert pauses == [8, 16, 32, 64, 64]


def test_a_new_request_in_a_paused_row_drafts(running: RowColumns) -> None:
    for length in range(10, 30):
        learn(running, (0,), length)
    start_drafting(running, 2, MOST)
    assert choose(running, ROWS[:1], 3) == [4]


def expecting(running: RowColumns, first: int, *tokens: int) -> RunningRows:
    """The second of `ROWS` is held to a grammar and expects `tokens` from position `first` on."""
    rows = RunningRows(running)
    running.has_grammar[5] = True
    request = Request(
        GenerateRequest(rid="a", input_ids=[1, 2, 3], sampling=SamplingParams()), 0, 100
    )
    request.expected = (first, ints(*tokens))
    rows.requests[5] = request
    return rows


@pytest.mark.parametrize(
    ("planned_len", "wanted"),
    [(10, [6, 7, 8, 9]), (11, [7, 8, 9, -1]), (13, [9, -1, -1, -1])],
)
def test_an_output_by_a_grammar_drafts_what_is_expected_of_it(
    running: RowColumns, planned_len: int, wanted: list[int]
) -> None:
    rows = expecting(running, 10, 6, 7, 8, 9)
    assert choose(running, ROWS, 20, planned_len) == [4, 0]
    chosen = choose_expected(rows, ROWS, MOST)
    assert chosen is not None
    counts, drafts = chosen
    assert counts.tolist() == [0, 14 - planned_len]
    assert drafts.tolist() == [[-1] * MOST, wanted]


@pytest.mark.parametrize(
    ("planned_len", "unread", "max_len"),
    [(9, 0, 100), (14, 0, 100), (10, 1, 100), (10, 0, 11)],
    ids=["too early", "past it", "length not known", "at its end"],
)
def test_nothing_is_drafted_where_what_is_expected_may_not_be_next(
    running: RowColumns, planned_len: int, unread: int, max_len: int
) -> None:
    rows = expecting(running, 10, 6, 7, 8, 9)
    running.planned_len[5], running.unread_drafts[5] = planned_len, unread
    running.max_len[5] = max_len
    assert choose_expected(rows, ROWS, MOST) is None
