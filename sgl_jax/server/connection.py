"""Work for one client: it ends when the client goes away, and lets others have the event loop."""

import asyncio
import logging
import time
from collections.abc import Awaitable
from typing import Self, TypeVar

from starlette.types import Message, Receive, Send

from sgl_jax.server.errors import ApiError

logger = logging.getLogger(__name__)
T = TypeVar("T")
CLIENT_GONE = 499  # nginx's number for a client that closed the connection; only logged


async def while_connected(receive: Receive, work: Awaitable[T]) -> T | None:
    """Await `work`; None if it was cancelled, as it is when the client goes away first."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() and not working.cancelled() else None
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """`while_connected` for work that never gives None. Raises `ApiError` 499."""
    done = await while_connected(receive, work)
    if done is None:
        raise ApiError(CLIENT_GONE, "the client went away")
    return done


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class PatientSend:
    """ASGI's `send` for a client that may stop reading: the task that enters is cancelled when one
    message has waited `patience_s` for room.

    One timer serves all messages: one for each would cost as much as a streamed token.
    """

    def __init__(self, send: Send, patience_s: float) -> None:
        self._send = send
        self._patience_s = patience_s
        self._loop = asyncio.get_running_loop()
        self._deadline: float | None = None  # of the message being sent

    async def __call__(self, message: Message) -> None:
        """Send it."""
        self._deadline = self._loop.time() + self._patience_s
        await self._send(message)
        self._deadline = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.current_task()
        self._timer = self._loop.call_later(self._patience_s, self._look)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        """Runs at the deadline of each message that began to wait since the last look, or later."""
        now = self._loop.time()
        if self._deadline is None or self._deadline > now:
            next_look = self._deadline or now + self._patience_s
            self._timer = self._loop.call_at(next_look, self._look)
            return
        logger.info("a stream ends: its client took nothing in %g s", self._patience_s)
        assert self._task is not None
        self._task.cancel()


_MOST_AT_ONCE_S = 0.005


class LoopShare:
    """Lets others have the event loop now and then: one per piece of long work, which calls `pause`
    between its parts."""

    def __init__(self) -> None:
        self._since = time.perf_counter()

    async def pause(self) -> None:
        """Let others run, if this work has had the loop for some milliseconds."""
        if time.perf_counter() - self._since > _MOST_AT_ONCE_S:
            await asyncio.sleep(0)
            self._since = time.perf_counter()
