"""The columns of running rows: tokens that arrive one by one or several at once are all found."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sgl_jax.scheduler.priority_counts import PriorityCounts
from sgl_jax.scheduler.request import Request
from sgl_jax.scheduler.running_rows import RowColumns, RunningRows
from tests.scheduler.driver import generate

MAX_LEN = 70  # not a whole number of blocks


@given(
    st.lists(st.integers(1, 40), min_size=2, max_size=2),
    st.lists(st.tuples(st.booleans(), st.integers(1, 5), st.booleans()), max_size=25),
)
def test_a_row_knows_the_tokens_that_it_was_given(
    prompt_lens: list[int], gains: list[tuple[bool, int, bool]]
) -> None:
    """Of two ranks, row 1 each: they gain a token each, or one of them several."""
    columns = RowColumns.empty(6, MAX_LEN)
    ranks = [RunningRows(columns.part(slice(first, first + 3))) for first in (0, 3)]
    known = []
    for k, (rank, length) in enumerate(zip(ranks, prompt_lens, strict=True)):
        prompt = [100 * k + i for i in range(length)]
        rank.add(1, Request(generate(f"r{k}", prompt, 5), k, MAX_LEN), ())
        known.append(prompt)
    next_token = 1000
    for is_one_each, count, is_second in gains:
        if is_one_each and max(map(len, known)) < MAX_LEN:
            tokens = np.array([next_token, next_token + 1], np.int32)
            lens = columns.append_token(np.array([1, 4]), tokens)
            for rank_tokens, token in zip(known, tokens.tolist(), strict=True):
                rank_tokens.append(token)
            assert lens.tolist() == list(map(len, known))
        elif not is_one_each and len(known[is_second]) + count <= MAX_LEN:
            row, start = 1 + 3 * is_second, len(known[is_second])
            new = np.arange(next_token, next_token + count, dtype=np.int32)
            positions = np.arange(start, start + count, dtype=np.int32)
            columns.append_tokens(np.full(count, row), positions, new)
            columns.known_len[row] += count
            known[is_second] += new.tolist()
        next_token += 10
    for rank, tokens in zip(ranks, known, strict=True):
        assert rank.known_tokens(1).tolist() == tokens
        assert rank.remove(1).tolist() == tokens


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
