"""Clients that stop reading what they are sent."""

import asyncio
from typing import Any

import pytest

from sgl_jax.server.guards.connection import BackpressuredSend, while_connected

pytestmark = pytest.mark.anyio
PATIENCE_S = 0.5


async def never_gone() -> Any:
    await asyncio.Event().wait()


async def sent_until(room_after_s: list[float]) -> int:
    """How many messages a client took, that has room for each after so many seconds."""
    num_sent = 0

    async def send(message: Any) -> None:
        await asyncio.sleep(room_after_s[num_sent])

    async def work() -> None:
        nonlocal num_sent
        async with BackpressuredSend(send, PATIENCE_S) as patient_send:
            for _ in room_after_s:
                await patient_send({"type": "http.response.body"})
                num_sent += 1

    async with asyncio.timeout(5):
        await while_connected(never_gone, work())
    return num_sent


async def test_work_ends_when_one_message_finds_no_room() -> None:
    assert await sent_until([0.0, 0.0, 60.0, 0.0]) == 2


async def test_patience_begins_anew_with_each_message() -> None:
    assert await sent_until([0.4 * PATIENCE_S] * 6) == 6


async def test_nothing_is_late_while_nothing_is_sent() -> None:
    async def send(message: Any) -> None:
        pass

    async def work() -> str:
        async with BackpressuredSend(send, PATIENCE_S) as patient_send:
            await patient_send({"type": "http.response.body"})
            await asyncio.sleep(3 * PATIENCE_S)
            await patient_send({"type": "http.response.body"})
        await asyncio.sleep(2 * PATIENCE_S)
        return "done"

    assert await while_connected(never_gone, work()) == "done"
