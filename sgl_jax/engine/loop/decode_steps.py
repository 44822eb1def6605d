"""Chooses how many decode steps a launch may have, by the measured time of a step."""

import time
from collections.abc import Callable

from sgl_jax.core.step_plan import StepPlan

# A new prompt waits for the launch that runs and for the next.
_MOST_DELAY_S = 0.020
_LAUNCHES_AHEAD = 2
_WEIGHT = 0.1  # of each launch in the average time of a step


class DecodeStepChoice:
    """The choice of `--num-decode-steps`.

    Args:
        setting: resolved: "auto", or a number of steps.
        most: steps of a launch.
        clock: returns monotonic seconds.
    """

    def __init__(
        self, setting: str, most: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._is_auto = setting == "auto"
        self._most = most
        self._clock = clock
        self._step_s = 0.0  # 0: not measured
        self._read_at: float | None = None  # when the result before was read, if others follow

    def note_result(self, plan: StepPlan, *, follows: bool) -> None:
        """Measure the time of a plan of decode rows by the times at which results are read.
        `follows`: the next launch was in flight, so that the device has not waited."""
        now_s, before_s = self._clock(), self._read_at
        self._read_at = now_s if follows else None
        if before_s is None or any(rank.num_decode < len(rank.rows) for rank in plan.ranks):
            return
        steps = [rank.num_steps for rank in plan.ranks if len(rank.rows)]
        num_steps = max(1 if own is None else int(own.max()) for own in steps)
        step_s = (now_s - before_s) / num_steps
        self._step_s += (_WEIGHT if self._step_s else 1.0) * (step_s - self._step_s)

    @property
    def num_steps(self) -> int:
        """Return the steps of the next launch: with auto the largest power of 2 with which two
        launches take at most 20 ms, but one step before any is measured."""
        if not self._is_auto:
            return self._most
        if not self._step_s:
            return 1
        fitting = int(_MOST_DELAY_S / (_LAUNCHES_AHEAD * self._step_s))
        return min(1 << max(fitting.bit_length() - 1, 0), self._most)
