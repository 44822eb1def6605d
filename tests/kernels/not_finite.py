"""Values that are not finite, put into one row of a step: what the other rows get must not change.

A kernel passes if the other rows' results are those of the step without such values, bit for bit,
and if the row itself does not get finite results: an error that is hidden is worse than one.
"""

from typing import Any

import numpy as np

BAD = (np.nan, np.inf, -np.inf)


def bits(x: Any) -> np.ndarray:
    """The bits of x, so that -0 differs from 0; every NaN has the same."""
    array = np.asarray(x)
    same = np.where(np.isnan(array.astype(np.float32)), array.dtype.type(np.nan), array)
    return same.astype(array.dtype).view(f"u{array.dtype.itemsize}")


def assert_same_bits(got: Any, want: Any) -> None:
    np.testing.assert_array_equal(bits(got), bits(want))


def row_tokens(q_lens: np.ndarray, row: int) -> slice:
    """The tokens of a row of a step."""
    first = int(q_lens[:row].sum())
    return slice(first, first + int(q_lens[row]))


def check_rows(got: Any, clean: Any, q_lens: np.ndarray, bad_row: int) -> None:
    """The results [T, ...] of all rows but `bad_row` are those of the clean step, and the last one
    of that row is not finite."""
    for row in range(len(q_lens)):
        tokens = row_tokens(q_lens, row)
        if row != bad_row:
            assert_same_bits(got[tokens], clean[tokens])
        elif q_lens[row]:
            last = np.asarray(got[tokens][-1], np.float32)
            assert not np.isfinite(last).all()
