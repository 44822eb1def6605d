"""Retracts that no shortage asked for, so that tests meet them often (`--test-retract`).

Every `interval` steps each rank gives up half of the requests that it may: those that decode,
those in the middle of a chunked prefill, and those that only wait for their last result. The
choice depends on the count of steps alone. Must never take a request that gained nothing since it
was last retracted: so every request gets on, even without a prefix cache and with chunks of a
token.
"""

from collections.abc import Sequence

from sgl_jax.core.server_args import SchedulerArgs
from sgl_jax.scheduler.rank_scheduler import RankScheduler
from sgl_jax.scheduler.request import Request


class ForcedRetract:
    """When to retract, and which requests; does nothing unless `args` have an interval."""

    def __init__(self, args: SchedulerArgs) -> None:
        self._interval = args.retract_interval
        self._most_running = args.test_retract_no_prefill_bs
        self._next_step = self._interval

    def take(self, ranks: Sequence[RankScheduler], num_steps: int) -> list[Request]:
        """Retract what is due once `num_steps` steps were planned; the caller queues it again."""
        if self._interval == 0 or num_steps < self._next_step:
            return []
        self._next_step = num_steps + self._interval
        turn = num_steps // self._interval
        return [rank.retract(row, "forced") for rank in ranks for row in _victims(rank, turn)]

    def may_start(self, ranks: Sequence[RankScheduler]) -> bool:
        """Whether a request may start while so many run on `ranks` as do."""
        if self._interval == 0 or self._most_running == 0:
            return True
        return sum(len(rank.running) for rank in ranks) <= self._most_running


def _victims(rank: RankScheduler, turn: int) -> list[int]:
    """Half (rounded up) of the rows that may be taken, going on where the last turn ended."""
    running = rank.running
    rows = []
    for row in running.active.tolist():
        request = running.request(row)
        if request.num_retractions == 0 or running.known_len[row] > len(request.tokens):
            rows.append(row)
    if not rows:
        return []
    rows.sort(key=lambda row: running.request(row).arrival)
    count = (len(rows) + 1) // 2
    start = turn * count % len(rows)
    return (rows[start:] + rows[:start])[:count]
