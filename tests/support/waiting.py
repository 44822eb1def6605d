"""Waiting for what another thread or process brings about: never without an end."""

import asyncio
import time
from collections.abc import Callable

import pytest

TIMEOUT_S = 30.0
_POLL_S = 0.01


def until(condition: Callable[[], object], what: str, timeout_s: float = TIMEOUT_S) -> None:
    """Wait until it holds; fail with `what` if it does not."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"not within {timeout_s:g} s: {what}")
        time.sleep(_POLL_S)


async def meanwhile_until(
    condition: Callable[[], object], what: str, timeout_s: float = TIMEOUT_S
) -> None:
    """Likewise, while the event loop of the test goes on."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"not within {timeout_s:g} s: {what}")
        await asyncio.sleep(_POLL_S)
