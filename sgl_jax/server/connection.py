"""Work for one client: it ends when the client goes away, and lets others have the event loop."""

import asyncio
import time
from collections.abc import Awaitable
from typing import TypeVar

from starlette.types import Receive

from sgl_jax.server.errors import ApiError

T = TypeVar("T")
CLIENT_GONE = 499  # nginx's number for a client that closed the connection; only logged


async def while_connected(receive: Receive, work: Awaitable[T]) -> T | None:
    """Await `work`, or cancel it and return None when the client goes away first."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
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
