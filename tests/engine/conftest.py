"""Engines of few shapes, since each shape is a program that takes a second to compile, and of
programs that earlier engines have compiled."""

import threading
from collections.abc import Iterator

import pytest

from tests.support.shared_programs import few_shapes, shared_programs


@pytest.fixture(scope="module", autouse=True)
def _few_programs() -> Iterator[None]:
    """`tests/executor` and the servers of `tests/live` have the shapes of users."""
    with few_shapes(), shared_programs():
        yield
        # A closed engine does not wait for the program that it compiles in the background.
        for thread in threading.enumerate():
            if thread.name == "compile":
                thread.join()
