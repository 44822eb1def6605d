"""The columns of running rows: tokens that arrive one by one or several at once are all found."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_jax.scheduler import in_flight_rows
from sgl_jax.scheduler.in_flight_rows import GOES_ON, LAUNCHED, NOT_SCORED, SHARE, TOO_LONG, Records
from sgl_jax.scheduler.request import Request
from sgl_jax.scheduler.running_rows import PriorityCounts, RowColumns, RunningRows
from tests.scheduler.driver import generate

MAX_LEN = 150  # not a whole number of blocks


@given(
    st.lists(st.integers(1, 140), min_size=2, max_size=2),
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=40),
)
def test_a_row_knows_the_tokens_that_it_was_given(
    prompt_lens: list[int], gains: list[tuple[int, int]]
) -> None:
    """Of two ranks, row 1 each: in each step they gain up to five tokens each, until they end."""
    columns = RowColumns.empty(6, MAX_LEN, 1)
    ranks = [RunningRows(columns.part(slice(first, first + 3))) for first in (0, 3)]
    known = []
    for k, (rank, length) in enumerate(zip(ranks, prompt_lens, strict=True)):
        prompt = [100 * k + i for i in range(length)]
        rank.add(1, Request(generate(f"r{k}", prompt, 5), k, MAX_LEN), ())
        known.append(prompt)
    next_token = 1000
    for counts in gains:
        samples = [count > 0 and len(known[k]) < MAX_LEN for k, count in enumerate(counts)]
        tokens = np.full((2, 5), -1, np.int32)
        for k, count in enumerate(counts):
            tokens[k, :count] = range(next_token, next_token + count)
        gained = append(columns, samples, tokens)
        for k, count in enumerate(counts):
            new = list(range(next_token, next_token + count))[: MAX_LEN - len(known[k])]
            known[k] += new
            assert gained["num_gained"][k] == len(new)
            assert gained["end"][k] == (TOO_LONG if new and len(known[k]) == MAX_LEN else GOES_ON)
        next_token += 10
    for rank, tokens_of_row in zip(ranks, known, strict=True):
        assert rank.known_tokens(1).tolist() == tokens_of_row
        assert rank.remove(1).tolist() == tokens_of_row


def append(columns: RowColumns, samples: list[bool], tokens: np.ndarray) -> Records:
    """Rows 1 and 4, of a rank each, gain `tokens` int32[2, w] in a step that samples `samples`."""
    rows = np.zeros(2, LAUNCHED)
    rows["row"], rows["samples"] = (1, 4), samples
    num_tokens, num_failed, *_ = in_flight_rows.append(
        rows,
        tokens,
        columns.records,
        np.zeros(len(columns.records), np.int32),
        columns.tokens,
        columns.latest,
        columns.stop_ids,
    )
    assert num_tokens == rows["num_gained"].sum()
    assert num_failed == 0
    return rows


def test_a_row_that_does_not_exist_is_refused() -> None:
    columns = RowColumns.empty(4, MAX_LEN, 1)
    columns.max_len[:] = MAX_LEN
    with pytest.raises(AssertionError):
        append(columns, [True, True], np.zeros((2, 1), np.int32))
    assert columns.known_len.tolist() == [0, 1, 0, 0]


def launched(
    columns: RowColumns, own_rows: list[int], chunk_lens: list[int], num_drafts: list[int]
) -> tuple[Records, Records]:
    """The records of a step, whose first rank of two decodes one row, and their shares."""
    shares = np.zeros(2, SHARE)
    shares["num_decode"] = 1, 0
    rows = in_flight_rows.launch(
        np.array([0, 1, len(own_rows)]),
        np.array(own_rows[:1], np.intp),
        np.array(own_rows[1:], np.intp),
        np.array(chunk_lens, np.int32),
        shares,
        np.array(num_drafts, np.int32),
        columns.records,
        np.array([0, 4, 0, 0, 2, 0], np.int32),
        np.arange(6, dtype=np.int32),
    )
    return rows, shares


def test_a_launch_counts_the_tokens_that_its_rows_will_sample() -> None:
    columns = RowColumns.empty(6, MAX_LEN, 1)
    columns.planned_len[[1, 4]] = 5, 9
    columns.unread_drafts[1] = 1
    columns.score_start[4], columns.token_values[4] = 3, 2
    columns.return_logprob[1], columns.has_grammar[1], columns.top_logprobs_num[1] = True, True, 2
    rows, shares = launched(columns, [1, 1], [5], [3])
    fields = ["row", "own_row", "epoch", "kv_start", "kv_end", "q_len", "num_scored"]
    assert rows[fields].tolist() == [(1, 1, 1, 4, 5, 4, 0), (4, 1, 4, 2, 7, 5, 4)]
    assert rows[["num_unread", "samples", "relayed"]].tolist() == [
        (1, True, True),
        (0, False, False),
    ]
    assert shares.tolist() == [
        (1, 9, 0, 2, True, False, 0),
        (0, 7, 4, -1, False, False, 2),
    ]
    assert columns.planned_len[[1, 4]].tolist() == [6, 9]
    assert columns.unread_drafts[[1, 4]].tolist() == [4, 0]
    assert columns.score_start[[1, 4]].tolist() == [NOT_SCORED, 3]


@pytest.mark.parametrize(
    ("own_rows", "chunk_lens", "num_drafts"), [([3, 1], [5], []), ([1, 1], [], []), ([1], [], [])]
)
def test_a_launch_of_rows_that_do_not_add_up_is_refused(
    own_rows: list[int], chunk_lens: list[int], num_drafts: list[int]
) -> None:
    columns = RowColumns.empty(6, MAX_LEN, 1)
    if len(own_rows) == 1:
        columns = columns.part(slice(0, 5))
    with pytest.raises(AssertionError):
        launched(columns, own_rows, chunk_lens, num_drafts)


@given(st.lists(st.tuples(st.booleans(), st.integers(-2, 2)), max_size=30))
def test_the_extreme_priorities_are_those_of_the_requests_that_are_there(
    acts: list[tuple[bool, int]],
) -> None:
    counts, there = PriorityCounts(), []
    for is_leaving, priority in acts:
        if is_leaving and priority in there:
            counts.remove(priority)
            there.remove(priority)
        elif not is_leaving:
            counts.add(priority)
            there.append(priority)
        assert counts.lowest == min(there, default=None)
        assert counts.highest == max(there, default=None)
        assert counts.differ == (len(set(there)) > 1)
