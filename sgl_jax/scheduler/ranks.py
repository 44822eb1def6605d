"""All ranks of the scheduler, with the rows of all of them as one range.

What a step does to many rows of every rank alike is done once on columns over the rows of all
ranks; the columns of a rank are views of these. Row r of rank k is row k * num_rows + r there,
its *joint* row. Owns the columns; what is in them is decided elsewhere.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np

from sgl_jax.core.engine_sizes import EngineSizes
from sgl_jax.core.server_args import SchedulerArgs
from sgl_jax.core.step_plan import Int32Array, IntpArray, RowIndex
from sgl_jax.mem_cache.req_to_token_pool import RowTables
from sgl_jax.scheduler.rank_scheduler import RankScheduler
from sgl_jax.scheduler.running_rows import RowColumns


class Ranks:
    """The ranks of an engine of the given sizes; `tables` and `running` are of joint rows."""

    def __init__(self, sizes: EngineSizes, args: SchedulerArgs) -> None:
        num_rows = sizes.dp_size * sizes.num_rows
        self.tables = RowTables.empty(num_rows, len(sizes.groups), sizes.pages_per_row)
        self.running = RowColumns.empty(num_rows, sizes.max_context_len)
        self._first_rows = np.arange(0, num_rows + 1, sizes.num_rows)
        self.ranks = []
        for dp_rank, first in enumerate(self._first_rows[:-1].tolist()):
            part = slice(first, first + sizes.num_rows)
            tables, columns = self.tables.part(part), self.running.part(part)
            self.ranks.append(RankScheduler(dp_rank, sizes, args, tables, columns))
        self.page_size = sizes.page_size
        self.has_windows = any(group.sliding_window is not None for group in sizes.groups)
        self._num_rows = sizes.num_rows
        self.max_draft_tokens = sizes.max_draft_tokens
        self.num_generated_tokens = 0  # by requests of all ranks
        self.num_drafted = 0  # tokens whose result was read, and of these:
        self.num_accepted = 0  # past a stop as well
        self.memories = [rank.memory for rank in self.ranks]
        # The rows of all running requests as `active` answers them, and each rank's. Mostly a step
        # is of these, and nothing is joined or split for it.
        self._active_parts: Sequence[RowIndex] = [rank.running.active for rank in self.ranks]
        self._active = self._join(self._active_parts)

    def join(self, rows: Sequence[Int32Array | IntpArray]) -> tuple[RowIndex, list[int]]:
        """The joint rows of each rank's `rows`, rank by rank, and where each rank's begin.

        Those of rank k lie in [bounds[k], bounds[k + 1]).
        """
        if all(part is own for part, own in zip(rows, self._active_parts, strict=True)):
            return self._active
        return self._join(rows)

    def _join(self, rows: Sequence[Int32Array | IntpArray]) -> tuple[RowIndex, list[int]]:
        counts = [len(part) for part in rows]
        joint = np.concatenate(rows, dtype=np.intp)
        joint += self._first_rows[:-1].repeat(counts)
        return joint, [0, *accumulate(counts)]

    def active(self) -> tuple[RowIndex, list[int]]:
        """The joint rows of all running requests, oldest first on each rank, as `join` answers."""
        parts = [rank.running.active for rank in self.ranks]
        # A rank's rows are another array as soon as they change.
        self._active_parts, self._active = parts, self.join(parts)
        return self._active

    def bounds(self, joint: RowIndex) -> list[int]:
        """Where each rank's rows begin among `joint` rows that are listed rank by rank."""
        starts: list[int] = (
            (joint // self._num_rows).searchsorted(np.arange(len(self.ranks) + 1)).tolist()
        )
        return starts

    def split(self, joint: RowIndex, bounds: Sequence[int]) -> Sequence[RowIndex]:
        """Each rank's own rows, of joint ones: undoes `join`."""
        if joint is self._active[0]:
            return self._active_parts
        return [
            joint[bounds[k] : bounds[k + 1]] - first
            for k, first in enumerate(self._first_rows[:-1].tolist())
        ]

    def soonest_ends(self) -> list[int | None]:
        """In how many steps the first of each rank's running requests may end; None if it has
        none. See `expected_steps_to_ends`."""
        rows, bounds = self.active()
        steps = self.running.expected_steps_to_ends(rows)
        return reduced_of_each(np.minimum, steps, bounds)

    def locate(self, joint_row: int) -> tuple[RankScheduler, int]:
        """The rank of a joint row, and the row there."""
        dp_rank, row = divmod(joint_row, self._num_rows)
        return self.ranks[dp_rank], row


def reduced_of_each(
    reduction: np.ufunc, values: Int32Array, bounds: Sequence[int]
) -> list[int | None]:
    """The `reduction` of each rank's values, as np.maximum; None where it has none.

    Those of rank k are `values[bounds[k] : bounds[k + 1]]`.
    """
    # `reduceat` reduces up to the next of the starts, so it is not told those of empty parts.
    starts = [first for first, end in pairwise(bounds) if first < end]
    reduced = iter(reduction.reduceat(values, starts).tolist() if starts else ())
    return [next(reduced) if first < end else None for first, end in pairwise(bounds)]
