"""Counts steps that failed on the device, and ends the engine after too many in a row."""

import time
from collections.abc import Callable

from sgl_jax.core.errors import StepsFailedError

# Incoming requests show whether the device works again. Load balancers send none while /health is
# 503, so the engine runs a probe step this long after the last failure.
PROBE_INTERVAL_S = 5.0


class StepFailures:
    """The failed steps of one engine.

    Args:
        max_consecutive: failures in a row after which `check` raises.
        on_change: called with the number of failures in a row when it changes.
        clock: returns monotonic seconds.

    Attributes:
        num_failed: failures since the start.
        num_consecutive: failures since the last step that succeeded.
    """

    def __init__(
        self,
        max_consecutive: int,
        on_change: Callable[[int], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_failed = 0
        self.num_consecutive = 0
        self._max_consecutive = max_consecutive
        self._on_change = on_change
        self._clock = clock
        self._failed_at = 0.0

    def note_failure(self) -> None:
        self.num_failed += 1
        self.num_consecutive += 1
        self._failed_at = self._clock()
        self._on_change(self.num_consecutive)

    def note_success(self) -> None:
        """Reset `num_consecutive`. Needed only if it is not 0."""
        self.num_consecutive = 0
        self._on_change(0)

    @property
    def is_probe_due(self) -> bool:
        """Return whether the last step failed, and no step has run for `PROBE_INTERVAL_S`."""
        return self.num_consecutive > 0 and self._clock() - self._failed_at >= PROBE_INTERVAL_S

    def check(self) -> None:
        """Raise `StepsFailedError` if too many steps have failed in a row."""
        if self.num_consecutive >= self._max_consecutive:
            raise StepsFailedError(
                f"the last {self.num_consecutive} steps failed on the device, as many as "
                "--max-step-failures allows"
            )
