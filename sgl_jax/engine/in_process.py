"""A line within one process: the engine loop in a thread of its own, the front in the caller's."""

import queue
from collections.abc import Callable

from sgl_jax.core.errors import EngineDeadError
from sgl_jax.core.messages import EngineMessage, FrontMessage, Heartbeat


class InProcessChannel:
    """The engine's end. Implements `Channel`.

    Args:
        deliver: called with each message for the front, in the engine's thread, but with
            heartbeats in another.
    """

    def __init__(self, deliver: Callable[[EngineMessage], None]) -> None:
        self.inbox: queue.SimpleQueue[FrontMessage] = queue.SimpleQueue()
        self._deliver = deliver

    def poll(self, timeout_s: float) -> list[FrontMessage]:
        """Messages that have arrived, waiting up to `timeout_s` for the first."""
        messages: list[FrontMessage] = []
        try:
            if timeout_s > 0:
                messages.append(self.inbox.get(timeout=timeout_s))
            while True:
                messages.append(self.inbox.get_nowait())
        except queue.Empty:
            return messages

    def send(self, message: EngineMessage) -> None:
        """Hand a message to the front."""
        self._deliver(message)

    def beat(self, heartbeat: Heartbeat) -> None:
        """Hand a heartbeat to the front, from a thread beside the engine's."""
        self._deliver(heartbeat)


class InProcessClient:
    """The front's end. Implements `EngineClient`."""

    def __init__(self, channel: InProcessChannel) -> None:
        self._channel = channel
        self._ended_because: str | None = None

    def send(self, message: FrontMessage) -> None:
        """Queue a message for the engine. Raises `EngineDeadError` once it ended."""
        if self._ended_because is not None:
            raise EngineDeadError(self._ended_because)
        self._channel.inbox.put(message)

    def close(self, reason: str) -> None:
        """The engine ended: from now on nothing can be sent to it."""
        self._ended_because = reason
