"""Measures the prompt tokens per second computed by a rank."""

from sgl_jax.core.step_plan import StepPlan

_LEAST_TOKENS = 64  # of a measured step: the launch dominates the time of shorter steps
_NEW_SHARE = 0.25  # weight of the last step in the moving average
_LEAST_CHANGE = 0.1


class PrefillMeter:
    """Measures from steps as they are launched and as their results are read, in order; times in
    seconds of any one clock. `rate` is the rate reported before, or 0."""

    def __init__(self, rate: float = 0.0) -> None:
        self._launched_s: dict[int, float] = {}
        self._last_end_s = 0.0
        self._rate = self._reported = rate

    def launched(self, plan: StepPlan, now_s: float) -> None:
        self._launched_s[plan.step_id] = now_s

    def ended(self, plan: StepPlan, now_s: float) -> float | None:
        """Return the tokens per second if they differ clearly from the last report, else None."""
        begin_s = max(self._launched_s.pop(plan.step_id), self._last_end_s)
        self._last_end_s = now_s
        num_tokens = max(int(rank.q_lens[rank.num_decode :].sum()) for rank in plan.ranks)
        if num_tokens < _LEAST_TOKENS:
            return None
        rate = num_tokens / max(now_s - begin_s, 1e-6)
        self._rate += (_NEW_SHARE if self._rate else 1.0) * (rate - self._rate)
        if abs(self._rate - self._reported) <= _LEAST_CHANGE * self._reported:
            return None
        self._reported = self._rate
        return self._rate

    def reset(self) -> None:
        """Forget steps in flight, which will not end."""
        self._launched_s.clear()
