"""The state of the engine's process, by its heartbeats.

Looks at heartbeats only: a loop that makes no progress is found by the `Watchdog`, in the engine's
process.
"""

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from sgl_jax.core.errors import EngineStuckError
from sgl_jax.core.messages import Heartbeat


class EngineHealth:
    """When the engine's last heartbeat came, and whether that is too long ago. Thread-safe.

    Args:
        timeout_s: seconds without a heartbeat after which the engine counts as stuck.
        clock: returns seconds; monotonic.
    """

    def __init__(self, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self._last: tuple[float, float | None] = (clock(), None)  # heard at, and its `turn_s`

    def hear(self, heartbeat: Heartbeat) -> None:
        """The engine's process runs."""
        self._last = (self._clock(), heartbeat.turn_s)

    @property
    def silent_s(self) -> float:
        """Seconds since the last heartbeat; since the start, if there was none."""
        return self._clock() - self._last[0]

    @property
    def turn_s(self) -> float | None:
        """Seconds that the loop has been in its turn, as of the last heartbeat; None before one."""
        return self._last[1]

    @property
    def stuck_since(self) -> datetime | None:
        """When the engine fell silent (UTC), if it is stuck."""
        silent_s = self.silent_s
        if silent_s <= self._timeout_s:
            return None
        return datetime.now(UTC) - timedelta(seconds=silent_s)

    def check(self) -> None:
        """Raise `EngineStuckError` if the engine is stuck."""
        since = self.stuck_since
        if since is not None:
            raise EngineStuckError(
                f"the engine has been silent for {self.silent_s:.0f} s, "
                f"since {since.isoformat(timespec='seconds')}"
            )
