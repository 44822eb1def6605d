"""Parameters of tests of which the default run has some, and `-m long` the others."""

from collections.abc import Iterable
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
