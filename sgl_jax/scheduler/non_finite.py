"""Rows whose results are not finite: their requests end, and nothing that they computed stays.

A step reads all earlier tokens of its rows, so a row with finite results proves that the KV before
it is finite. If a row fails, the KV that it computed before the step is good. If the step was the
row's first, the prefix that it found may be the cause, too. So the prefix is withdrawn from the
caches from the step's first token on, or as a whole. Requests that read it already fail by their
own results.
"""

from collections import deque
from collections.abc import Iterator

from sgl_jax.core.engine_messages import FinishReason
from sgl_jax.core.step_plan import Int32Array
from sgl_jax.scheduler.departed import Departed
from sgl_jax.scheduler.launched_rows import FAILED, Records
from sgl_jax.scheduler.live_requests import LiveRequests
from sgl_jax.scheduler.rank_scheduler import RankScheduler
from sgl_jax.scheduler.ranks import Ranks

_CODE = "internal_server_error"
_TEXT = (
    "the model computed values that are not finite (NaN or infinity) for this request; "
    "other requests are not affected"
)


class NonFiniteRows:
    """Ends failed rows of all ranks. `num_rows` counts the requests that ended so."""

    def __init__(self, ranks: Ranks, live: LiveRequests) -> None:
        self.num_rows = 0
        self._ranks = ranks
        self._live = live
        # With the last step that may have their rows; the earliest first.
        self.departed: deque[tuple[int, RankScheduler, Departed]] = deque()

    def after_step(self, step_id: int, rows: Records, num_failed: int, num_planned: int) -> None:
        """Handle the failed rows of a step whose result was applied.

        Not needed if no row failed, and `departed` is empty, here and on each rank.

        Args:
            step_id: of the step.
            rows: LAUNCHED[n] of the step, with their ends.
            num_failed: of these, FAILED; or more.
            num_planned: steps planned so far: the next has this id.
        """
        for rank in self._ranks.ranks:
            if rank.departed:
                self.departed += [(num_planned - 1, rank, each) for each in rank.departed]
                rank.departed.clear()
        if num_failed:
            for step in rows[rows["end"] == FAILED]:
                self._fail(step)
        while self.departed and self.departed[0][0] <= step_id:
            self.departed.popleft()

    def _fail(self, step: Records) -> None:
        rank, row = self._ranks.locate(int(step["row"]))
        if self._ranks.tables.epoch[step["row"]] == step["epoch"]:
            request = rank.running.request(row)
            tokens = rank.running.known_tokens(row).copy()
            prefixes = [(tokens, request.namespace, request.matched_len)]
            self.num_rows += 1
            finish = FinishReason("abort", message=_TEXT, status_code=500, code=_CODE)
            self._live.end(request, finish, insert=False)
        else:
            prefixes = list(self._left(rank, row, int(step["epoch"])))
            rank.drop_session_lease(row)
        for tokens, namespace, matched_len in prefixes:
            start = int(step["kv_start"])
            rank.withdraw(tokens, namespace, start if start > matched_len else 0)

    def _left(
        self, rank: RankScheduler, row: int, epoch: int
    ) -> Iterator[tuple[Int32Array, str, int]]:
        """The prefix of the request that left the row, while its lease had `epoch`."""
        for _, its_rank, each in self.departed:
            if its_rank is rank and (each.row, each.epoch) == (row, epoch):
                yield each.tokens, each.namespace, each.matched_len
