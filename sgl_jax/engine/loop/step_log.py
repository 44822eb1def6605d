"""Counts steps, prefilled tokens and failed steps, and logs a line of statistics at intervals."""

import logging
import time
from collections.abc import Callable

from sgl_jax.core.errors import StepsFailedError
from sgl_jax.core.step_plan import StepPlan
from sgl_jax.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)

_WARNING_INTERVAL_S = 10.0
# Incoming requests show whether the device works again. Load balancers send none while /health is
# 503, so the engine runs a probe step this long after the last failure.
PROBE_INTERVAL_S = 5.0


class StepLog:
    """Totals since the start; a log line every `interval` steps (0: never)."""

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._steps = 0
        self._prefilled = 0
        self._line_at = time.monotonic()
        self._line_generated = 0
        self._throughput = 0.0
        self._num_nonfinite = 0  # at the last warning
        self._warned_at = -_WARNING_INTERVAL_S

    def after_step(self, plan: StepPlan, scheduler: Scheduler) -> None:
        self._steps += 1
        for rank in plan.ranks:
            if rank.num_decode < len(rank.q_lens):
                self._prefilled += int(rank.q_lens[rank.num_decode :].sum())
        if scheduler.non_finite.num_rows > self._num_nonfinite:
            self._warn(scheduler.non_finite.num_rows)
        if self._interval and self._steps % self._interval == 0:
            self._write_line(scheduler)

    def _warn(self, num_nonfinite: int) -> None:
        now_s = time.monotonic()
        if now_s - self._warned_at < _WARNING_INTERVAL_S:
            return
        logger.error(
            "the model computed NaN or infinity: %d requests have ended with an error, %d since "
            "the start",
            num_nonfinite - self._num_nonfinite,
            num_nonfinite,
        )
        self._num_nonfinite, self._warned_at = num_nonfinite, now_s

    def counters(self) -> dict[str, float]:
        """Return totals since the start, and output tokens per second between the last lines."""
        return {
            "steps": self._steps,
            "prefilled_tokens": self._prefilled,
            "gen_throughput": self._throughput,
        }

    def _write_line(self, scheduler: Scheduler) -> None:
        now = time.monotonic()
        generated = scheduler.counters()["generated_tokens"]
        elapsed_s = max(now - self._line_at, 1e-9)
        self._throughput = (generated - self._line_generated) / elapsed_s
        self._line_at, self._line_generated = now, generated
        views = scheduler.memory_views()
        total = sum(view.total_pages for view in views)
        waiting = [f"{count} {kind}" for kind, count in scheduler.count_waiting().items() if count]
        logger.info(
            "step %d: %d running, %d waiting%s, %.1f output tokens/s, "
            "pages: %d%% free, %d%% leased, %d%% cached",
            self._steps,
            scheduler.num_running,
            scheduler.num_waiting,
            f" ({', '.join(waiting)})" if waiting else "",
            self._throughput,
            100 * sum(view.free_pages for view in views) // total,
            100 * sum(view.leased_pages for view in views) // total,
            100 * sum(view.cached_pages for view in views) // total,
        )


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
