"""Retracts without a shortage, so that tests cover retracts often (`--test-retract`).

Every `interval` steps each rank gives up half of the allowed requests, whether they decode, are in
the middle of a chunked prefill, or wait for their last result. The choice depends only on the count
of steps. Must never take a request that gained nothing since its last retract: so every request
advances, even without a prefix cache and with chunks of a token.
"""

from collections.abc import Sequence

from sgl_jax.core.scheduler_args import SchedulerArgs
from sgl_jax.scheduler.rank_scheduler import RankScheduler
from sgl_jax.scheduler.request import Request


class ForcedRetract:
    """Chooses when to retract, and which requests; `args` have an interval."""

    def __init__(self, args: SchedulerArgs) -> None:
        self._interval = args.retract_interval
        self._most_running = args.test_retract_no_prefill_bs
        self._next_step = self._interval

    def take(self, ranks: Sequence[RankScheduler], num_steps: int) -> list[Request]:
        """Retract the chosen requests if `num_steps` steps were planned and an interval has passed.
        The caller queues them again."""
        if num_steps < self._next_step:
            return []
        self._next_step = num_steps + self._interval
        turn = num_steps // self._interval
        return [rank.retract(row, "forced") for rank in ranks for row in _victims(rank, turn)]

    def may_start(self, ranks: Sequence[RankScheduler]) -> bool:
        """Return whether a request may start next to the requests that run on `ranks`."""
        return (
            not self._most_running or sum(len(rank.running) for rank in ranks) <= self._most_running
        )


def _victims(rank: RankScheduler, turn: int) -> list[int]:
    """Return half (rounded up) of the rows that may be taken, continuing after the last turn's."""
    running = rank.running
    rows = []
    for row in running.active.tolist():
        request = running.request(row)
        if request.num_retractions == 0 or running.columns.known_len[row] > len(request.tokens):
            rows.append(row)
    if not rows:
        return []
    rows.sort(key=lambda row: running.request(row).arrival)
    count = (len(rows) + 1) // 2
    start = turn * count % len(rows)
    return (rows[start:] + rows[:start])[:count]
