"""Parameters of tests of which the default run has some, and `-m long` the others."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def long(*values: Any) -> list[Any]:
    """Each as a parameter of the long tests."""
    return [pytest.param(value, marks=pytest.mark.long) for value in values]


def long_but(values: Iterable[Any], *by_default: Any) -> list[Any]:
    """All but those of the default run, as parameters of the long tests, and these."""
    values = list(values)
    assert all(value in values for value in by_default)
    return [value if value in by_default else long(value)[0] for value in values]


def long_half(*axes: Sequence[Any]) -> list[Any]:
    """All combinations of three or more axes' values: by default half of them, with all pairs.

    Of two axes the pairs are the combinations, and half of these cannot have all. The parameters of
    a test are those of the axes, in their order.
    """
    assert sum(len(axis) > 1 for axis in axes) > 2
    return [
        pytest.param(
            *(axis[place] for axis, place in zip(axes, places, strict=True)),
            marks=pytest.mark.long if sum(places) % 2 else (),
        )
        for places in itertools.product(*(range(len(axis)) for axis in axes))
    ]
