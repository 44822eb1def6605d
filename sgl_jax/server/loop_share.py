"""Shares the event loop: long work on it stops now and then for others."""

import asyncio
import time

_MOST_AT_ONCE_S = 0.005


class LoopShare:
    """One per piece of work, which calls `pause` between its parts."""

    def __init__(self) -> None:
        self._since = time.perf_counter()

    async def pause(self) -> None:
        """Let others run, if this work has had the loop for some milliseconds."""
        if time.perf_counter() - self._since > _MOST_AT_ONCE_S:
            await asyncio.sleep(0)
            self._since = time.perf_counter()
