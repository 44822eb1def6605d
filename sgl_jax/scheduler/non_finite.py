"""Ends requests with non-finite results, and withdraws the KV that they computed.

A step reads all earlier tokens of its rows, so a row with finite results proves that the KV before
it is finite. If a row fails, the KV that it computed before the step is good, so its prefix is
withdrawn from the caches from the step's first token on. If the step was the row's first, the
cached prefix that it read may be the cause. The row's new tokens are the likelier cause, and many
requests may share the prefix. So the prefix is withdrawn only once another row fails in its first
step on a page of it, unless a row has since read it in its first step with finite results. Requests
that read a withdrawn prefix already fail by their results.
"""

from collections import deque
from collections.abc import Iterator

import numpy as np

from sgl_jax.core.engine_messages import FinishReason
from sgl_jax.core.step_plan import Int32Array
from sgl_jax.scheduler.in_flight_rows import FAILED, Records
from sgl_jax.scheduler.live_requests import LiveRequests
from sgl_jax.scheduler.rank_scheduler import RankScheduler
from sgl_jax.scheduler.ranks import Ranks
from sgl_jax.scheduler.request import Departed

# Limit of remembered prefixes on which rows have failed; the oldest is forgotten first.
_MAX_PREFIXES = 64
_CODE = "internal_server_error"
_TEXT = (
    "the model computed values that are not finite (NaN or infinity) for this request; "
    "other requests are not affected"
)


class NonFiniteRows:
    """Ends the failed rows of all ranks. `num_rows` counts the requests ended for this reason."""

    def __init__(self, ranks: Ranks, live: LiveRequests) -> None:
        self.num_rows = 0
        self._ranks = ranks
        self._live = live
        # Each with the last step that may have its row; the earliest first.
        self.departed: deque[tuple[int, RankScheduler, Departed]] = deque()
        # Rank, namespace and tokens of prefixes on which a row failed in its first step.
        self.failed_on: dict[tuple[int, str, bytes], None] = {}
        self._page_size = ranks.ranks[0].memory.page_size

    def after_step(self, step_id: int, rows: Records, num_failed: int, num_planned: int) -> None:
        """Handle the failed rows of a step after its result was applied. The call may be skipped if
        no row failed, `failed_on` is empty, and `departed` is empty here and on each rank.

        Args:
            step_id: id of the step.
            rows: LAUNCHED[n], the rows of the step, with their ends.
            num_failed: number of FAILED rows, or more.
            num_planned: number of steps planned so far, which is the id of the next step.
        """
        for rank in self._ranks.ranks:
            if rank.departed:
                self.departed += [(num_planned - 1, rank, each) for each in rank.departed]
                rank.departed.clear()
        if self.failed_on:
            self._forget_read(rows[rows["end"] != FAILED])
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
            rank.idle_sessions.drop_row(row)
        for tokens, namespace, matched_len in prefixes:
            start = int(step["kv_start"])
            if start <= matched_len and self._has_failed_before(
                rank, tokens[:matched_len], namespace
            ):
                start = 0
            rank.withdraw(tokens, namespace, start)

    def _has_failed_before(self, rank: RankScheduler, prefix: Int32Array, namespace: str) -> bool:
        """Return whether a row failed on a page of the cached `prefix` before; record it if not."""
        prefix = prefix[: len(prefix) // self._page_size * self._page_size]
        if not len(prefix) or rank.memory.cache.peek(prefix, namespace) < len(prefix):
            return False  # nothing was read, or it is withdrawn already
        own, page = (rank.dp_rank, namespace), prefix[: self._page_size].tobytes()
        for key in self.failed_on:
            if key[:2] == own and key[2].startswith(page):
                del self.failed_on[key]
                return True
        if len(self.failed_on) == _MAX_PREFIXES:
            del self.failed_on[next(iter(self.failed_on))]
        self.failed_on[*own, prefix.tobytes()] = None
        return False

    def _forget_read(self, rows: Records) -> None:
        """Forget the prefixes read by these `rows`, with finite results, in their first step."""
        lens = [len(prefix) // 4 for _, _, prefix in self.failed_on]  # of int32
        starts = rows["kv_start"] // self._page_size * self._page_size
        may_read = self._ranks.tables.epoch[rows["row"]] == rows["epoch"]
        may_read &= np.isin(starts, lens)
        for step, start in zip(rows[may_read], starts[may_read].tolist(), strict=True):
            rank, row = self._ranks.locate(int(step["row"]))
            request = rank.running.request(row)
            if step["kv_start"] <= request.matched_len:
                prefix = rank.running.known_tokens(row)[:start]
                self.failed_on.pop((rank.dp_rank, request.namespace, prefix.tobytes()), None)

    def _left(
        self, rank: RankScheduler, row: int, epoch: int
    ) -> Iterator[tuple[Int32Array, str, int]]:
        """Yield the prefix of the request that left the row while its lease had `epoch`."""
        for _, its_rank, each in self.departed:
            if its_rank is rank and (each.row, each.epoch) == (row, epoch):
                yield each.tokens, each.namespace, each.matched_len
