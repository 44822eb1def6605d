"""Hands out work so that each client gets its share, however much one of them brings."""

import asyncio
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """First come, first served for each client; clients take turns.

    Of one client no more than `max_at_once` pieces of work are out at a time, so that there is
    always a worker for other clients.
    """

    def __init__(self, max_at_once: int) -> None:
        self._max_at_once = max_at_once
        self._waiting: dict[str, deque[T]] = {}  # in the order in which it is their turn
        self._num_out: dict[str, int] = {}
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def put(self, client: str, work: T) -> None:
        """Add the work of a client."""
        self._waiting.setdefault(client, deque()).append(work)
        self._changed.set()

    async def get(self) -> tuple[str, T]:
        """The client that comes next, and its work; `done` must follow."""
        while True:
            for client, waiting in self._waiting.items():
                num_out = self._num_out.get(client, 0)
                if num_out < self._max_at_once:
                    del self._waiting[client]
                    work = waiting.popleft()
                    if waiting:
                        self._waiting[client] = waiting  # behind the others
                    self._num_out[client] = num_out + 1
                    return client, work
            self._changed.clear()
            await self._changed.wait()

    def done(self, client: str) -> None:
        """Work of this client that was handed out has ended."""
        self._num_out[client] -= 1
        if not self._num_out[client]:
            del self._num_out[client]
        self._changed.set()
