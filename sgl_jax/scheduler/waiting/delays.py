"""Waits that were chosen for requests that could start, or be tried, otherwise.

A request waits for a prefix that a running request computes, for a rank with more of its prefix, or
for a step in which it may be tried again.
"""

from sgl_jax.mem_cache.pages.req_to_token_pool import RowTables
from sgl_jax.scheduler.forecast.fits import NO_RANK
from sgl_jax.scheduler.request import Request
from sgl_jax.scheduler.waiting.queue_loops import drop_leaders
from sgl_jax.scheduler.waiting.waiting_columns import WaitingColumns


class Delays:
    """The waits of the requests in the lines of `columns`.

    `tables` are the columns of all ranks' joint rows, `num_rows` a rank.
    """

    def __init__(self, columns: WaitingColumns, tables: RowTables, num_rows: int) -> None:
        self._columns, self._tables, self._num_rows = columns, tables, num_rows

    def follow(self, request: Request, dp_rank: int, row: int, length: int) -> None:
        """Delay `request` until `row` has published `length` tokens, or its request has left."""
        row += dp_rank * self._num_rows
        self._columns.lines.leader[request.line] = (row, self._tables.epoch[row], length)
        self._columns.lines.has_leader[request.line] = True
        self.stay(request, dp_rank, until_step=0)

    def is_following(self, request: Request) -> bool:
        """Return whether `request` waits for a prefix (`follow`), or did before it started."""
        return bool(self._columns.lines.has_leader[request.line])

    def leader_of(self, request: Request) -> tuple[int, int] | None:
        """Return rank and row of the request that computes the awaited prefix; None without one."""
        line, lines = request.line, self._columns.lines
        self.release_followers(slice(line, line + 1))
        if not lines.has_leader[line]:
            return None
        dp_rank, row = divmod(int(lines.leader[line, 0]), self._num_rows)
        return dp_rank, row

    def release_followers(self, which: slice) -> None:
        """Let lines go on whose leaders have computed the prefix, or have left."""
        lines, tables = self._columns.lines, self._tables
        has_leader, leader = lines.has_leader[which], lines.leader[which]
        drop_leaders(has_leader, leader, tables.epoch, tables.cache_protected_len)

    def stay(self, request: Request, dp_rank: int, until_step: int) -> None:
        """Delay `request` until that rank has room or that step is planned."""
        self._columns.lines.stay_rank[request.line] = dp_rank
        self._columns.lines.stay_until[request.line] = until_step

    def deferred_rank(self, request: Request) -> int | None:
        """Return the rank that it has waited for though another had room; None if it never did."""
        dp_rank = int(self._columns.lines.stay_rank[request.line])
        return None if dp_rank == NO_RANK else dp_rank

    def is_staying(self, request: Request, step: int) -> bool:
        """Return whether it still waits for that rank when `step` is planned."""
        return int(self._columns.lines.stay_until[request.line]) > step

    def hold_until(self, request: Request, step: int) -> None:
        """Try `request` again when `step` is planned; starts before then do not count as passes."""
        self._columns.lines.held_until[request.line] = step

    def is_held(self, request: Request, step: int) -> bool:
        """Return whether `hold_until` still delays it when `step` is planned."""
        return int(self._columns.lines.held_until[request.line]) > step

    def release_held(self) -> None:
        """Try the requests again that `hold_until` delays."""
        self._columns.lines.held_until[: self._columns.end] = 0
