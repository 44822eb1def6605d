"""Drafts are what followed the longest, latest earlier match of a row's end."""

import jax
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_jax.layers.ngram_drafts import propose_drafts

NUM_DRAFTS, WIDTH, MAX_NGRAM = 3, 1200, 4

_propose = jax.jit(lambda *arrays: propose_drafts(*arrays, NUM_DRAFTS))


def draft_by_force(tokens: list[int]) -> list[int]:
    """The same by looking at every earlier position."""
    best = (0, len(tokens) - 2)
    for end in range(len(tokens) - 1):
        matched = 0
        while matched < MAX_NGRAM and matched <= end:
            if tokens[end - matched] != tokens[-1 - matched]:
                break
            matched += 1
        if matched:
            best = max(best, (matched, end))
    start = best[1] + 1
    followed = tokens[start:] or tokens[-1:]
    return [followed[i % len(followed)] for i in range(NUM_DRAFTS)]


def propose(lines: list[list[int]]) -> list[list[int]]:
    """Rows 2, 3, ... of a table whose unused places hold a token that would match anything."""
    table = np.full((len(lines) + 2, WIDTH), lines[0][-1], np.int32)
    for row, line in enumerate(lines, start=2):
        table[row, : len(line)] = line
    rows = np.arange(2, len(lines) + 2, dtype=np.int32)
    lens = np.array([len(line) for line in lines], np.int32)
    return np.asarray(_propose(table, rows, lens, np.ones(len(lines), np.bool_))).tolist()


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 600),
            st.lists(st.integers(0, 3), min_size=1, max_size=40),
        ),
        min_size=3,
        max_size=3,
    )
)
def test_drafts_are_those_of_a_search_by_force(lines: list[tuple[int, list[int]]]) -> None:
    """With and without a long unique beginning, so that matches lie in later blocks too."""
    whole = [list(range(100, 100 + lead)) + line for lead, line in lines]
    assert propose(whole) == [draft_by_force(line) for line in whole]


def test_the_longest_match_wins_over_a_later_shorter_one() -> None:
    line = [1, 2, 3, 7, 8, 9, 3, 5, 5, 5, 2, 3]
    assert propose([line] * 3)[0] == [7, 8, 9]


def test_what_followed_repeats_when_it_is_too_short() -> None:
    assert propose([[4, 5, 6, 4, 5]] * 3)[0] == [6, 4, 5]
    assert propose([[9, 9]] * 3)[0] == [9, 9, 9]


def test_a_row_that_is_not_wanted_is_not_searched() -> None:
    """It gets what a row without any match gets: its last token, again and again."""
    table = np.zeros((2, WIDTH), np.int32)
    table[1, :6] = [4, 5, 6, 4, 5, 9]
    rows, lens = np.array([1], np.int32), np.array([5], np.int32)
    wanted = np.ones(1, np.bool_)
    assert np.asarray(_propose(table, rows, lens, wanted)).tolist() == [[6, 4, 5]]
    assert np.asarray(_propose(table, rows, lens, ~wanted)).tolist() == [[5, 5, 5]]
