"""Loops are compiled before the first test, as an engine does before its first step."""

import pytest

import sgl_jax.scheduler.scheduler  # noqa: F401  declares them all
from tests.support.compiled_loops import compile_loops_together


@pytest.fixture(scope="session", autouse=True)
def _compiled_loops() -> None:
    compile_loops_together()
