"""Requests that the engine was sent and has said nothing of.

They are on their way, wait, or compute their first token. Counted by the front, since the engine's
own queue has no limit while the engine does not look at it. One whose client went away counts on:
its message is still there.
"""

from sgl_jax.core.errors import QueueFullError


class UnheardRequests:
    """Names of these requests; not thread-safe.

    Args:
        max_queued: requests that may wait.
        max_running: requests that may compute at once, over all ranks.
    """

    def __init__(self, max_queued: int, max_running: int) -> None:
        self._max_queued = max_queued
        self._limit = max_queued + max_running
        self._rids: set[str] = set()

    def __len__(self) -> int:
        return len(self._rids)

    def check_room(self, num_requests: int) -> None:
        """Raise `QueueFullError` if so many more cannot be taken together."""
        if len(self._rids) + num_requests > self._limit:
            raise QueueFullError(
                f"the queue is full: {len(self._rids)} requests wait for the engine, and "
                f"{num_requests} more would exceed what --max-queued-requests "
                f"({self._max_queued}) allows"
            )

    def add(self, rid: str) -> None:
        """It is sent."""
        self._rids.add(rid)

    def discard(self, rid: str) -> None:
        """The engine has said something of it, or it was not sent after all."""
        self._rids.discard(rid)
