"""Step times of a simulated device: the clock of the served run.

A step ends with its most loaded rank. `LinearStepTime` sums four costs; `planned_step_time` uses
the planner's estimate for a model and a slice.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from sgl_jax.core.step_plan import RankPlan, StepPlan


class RankLoad(NamedTuple):
    """One rank's work in a step."""

    decode_rows: int
    decode_kv_tokens: int  # read by decode rows, including their new tokens
    prefill_tokens: int
    prefill_kv_tokens: int  # read by prefill chunks, including their new tokens
    prefill_pairs: int  # pairs of a query and a key that it attends to

    @property
    def tokens(self) -> int:
        return self.decode_rows + self.prefill_tokens


# Seconds that a step occupies the device, given the load of each rank.
StepSeconds = Callable[[Sequence[RankLoad]], float]


def step_loads(plan: StepPlan) -> list[RankLoad]:
    """Return the load of each rank in a step without drafts."""
    return [rank_load(rank_plan) for rank_plan in plan.ranks]


def rank_load(plan: RankPlan) -> RankLoad:
    """Return the load of one rank in a step without drafts."""
    n = plan.num_decode
    starts, lens = plan.kv_starts.astype(int), plan.q_lens.astype(int)
    chunk_starts, chunk_lens = starts[n:], lens[n:]
    return RankLoad(
        decode_rows=n,
        decode_kv_tokens=int(starts[:n].sum()) + n,
        prefill_tokens=int(chunk_lens.sum()),
        prefill_kv_tokens=int((chunk_starts + chunk_lens).sum()),
        prefill_pairs=int((chunk_lens * chunk_starts + chunk_lens * (chunk_lens + 1) // 2).sum()),
    )


class LinearStepTime(NamedTuple):
    """A base time per step, plus costs linear in the work of its most loaded rank."""

    base_ms: float
    prefill_us_per_token: float
    decode_us_per_row: float
    kv_ns_per_token: float  # per KV token read
    # Prompt tokens are computed in parallel with decoding: a step takes the longer time.
    overlaps_prefill: bool = False

    def seconds(self, loads: Sequence[RankLoad]) -> float:
        """Return the seconds of a step, the maximum over its ranks; a `StepSeconds`."""
        return max(map(self._rank_seconds, loads))

    def _rank_seconds(self, load: RankLoad) -> float:
        kv_tokens = load.decode_kv_tokens + load.prefill_kv_tokens
        prefill_s = self.prefill_us_per_token * 1e-6 * load.prefill_tokens
        rest_s = (
            self.base_ms * 1e-3
            + self.decode_us_per_row * 1e-6 * load.decode_rows
            + self.kv_ns_per_token * 1e-9 * kv_tokens
        )
        return max(prefill_s, rest_s) if self.overlaps_prefill else prefill_s + rest_s
