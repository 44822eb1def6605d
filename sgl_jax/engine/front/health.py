"""Health of the engine process, judged by its heartbeats.

The `Watchdog` in the engine process detects a loop that makes no progress.
"""

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from sgl_jax.core.engine_messages import HEARTBEAT_INTERVAL_S, Heartbeat
from sgl_jax.core.errors import EngineStuckError
from sgl_jax.core.progress import PhaseReport


class EngineHealth:
    """The time of the engine's last heartbeat, and a check that it is recent. Thread-safe.

    Args:
        timeout_s: seconds without a heartbeat after which the engine counts as stuck.
        clock: returns monotonic seconds.
    """

    def __init__(self, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self._last = (clock(), Heartbeat(turn_s=None))  # and its time of arrival

    def note(self, heartbeat: Heartbeat) -> None:
        self._last = (self._clock(), heartbeat)

    @property
    def silent_s(self) -> float:
        """Return the seconds since the last heartbeat, or since the start if there was none."""
        return self._clock() - self._last[0]

    @property
    def turn_s(self) -> float | None:
        return self._last[1].turn_s

    @property
    def progress(self) -> PhaseReport | None:
        return self._last[1].progress

    @property
    def is_in_long_turn(self) -> bool:
        """Return whether a recent heartbeat reported a long turn: the loop loads, compiles, or runs
        a step longer than a heartbeat interval."""
        heartbeat = self._last[1]
        progress = heartbeat.progress
        is_loading = progress is not None and progress.phase != "compiling_in_background"
        is_long = is_loading or (heartbeat.turn_s or 0.0) > HEARTBEAT_INTERVAL_S
        return is_long and self.silent_s <= 3 * HEARTBEAT_INTERVAL_S

    @property
    def stuck_since(self) -> datetime | None:
        """Return the time (UTC) of the last heartbeat if the engine is stuck, else None."""
        silent_s = self.silent_s
        if silent_s <= self._timeout_s:
            return None
        return datetime.now(UTC) - timedelta(seconds=silent_s)

    def check(self) -> None:
        since = self.stuck_since
        if since is not None:
            raise EngineStuckError(
                f"the engine has been silent for {self.silent_s:.0f} s, "
                f"since {since.isoformat(timespec='seconds')}"
            )
