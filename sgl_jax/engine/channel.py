"""How the engine loop meets the front: messages in, messages out. No jax here."""

from typing import Protocol

from sgl_jax.core.messages import EngineMessage, FrontMessage, Heartbeat


class Channel(Protocol):
    """The engine's end of the line. Implemented over ZeroMQ and over in-process queues."""

    def poll(self, timeout_s: float) -> list[FrontMessage]:
        """Messages that have arrived, in order; waits up to `timeout_s` (0: not at all)."""
        ...

    def send(self, message: EngineMessage) -> None:
        """Queue a message for the front; never blocks."""
        ...

    def beat(self, heartbeat: Heartbeat) -> None:
        """As `send`, for one thread beside the loop's."""
        ...


class EngineClient(Protocol):
    """The front's end of the line. Messages of one client arrive in the order sent."""

    def send(self, message: FrontMessage) -> None:
        """Queue a message for the engine; never blocks. Raises `EngineDeadError` once it ended."""
        ...
