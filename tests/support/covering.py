"""Few combinations of settings in which every two, or every three, settings occur together.

A defect nearly always needs no more than two or three settings (Kuhn, Wallace and Gallo, 2004), so
such a covering array finds what the whole product would, with a fraction of its cases.
"""

import itertools
from collections import Counter
from collections.abc import Iterable
from typing import Any

Row = tuple[Any, ...]


def covering(
    axes: Iterable[Iterable[Any]],
    strength: int,
    chosen: Iterable[Row] = (),
) -> list[Row]:
    """Return rows in which any `strength` values of different axes occur together.

    A greedy choice of the row that adds most, the same each time; of several that add as much,
    the one whose values are rarer.

    Args:
        chosen: rows that the array begins with.
    """
    product = list(itertools.product(*axes))
    rows = list(chosen)
    parts = {row: {*itertools.combinations(enumerate(row), strength)} for row in product}
    uncovered = set().union(*parts.values())
    for row in rows:
        uncovered -= parts[row]
    while uncovered:
        used = Counter(value for row in rows for value in enumerate(row))
        rows.append(
            max(
                product,
                key=lambda row: (
                    len(parts[row] & uncovered),
                    -sum(used[own] for own in enumerate(row)),
                ),
            )
        )
        uncovered -= parts[rows[-1]]
    return rows
