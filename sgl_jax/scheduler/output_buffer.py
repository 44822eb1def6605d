"""Collects the outputs of requests until the next take.

Most rows gain one plain token in most steps, and successive steps mostly have the same rows. So the
request ids of a rank's rows are listed once, and again only when the rows change.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from sgl_jax.core.engine_messages import OutputBatch, RequestOutput
from sgl_jax.core.step_plan import Int32Array, RowIndex
from sgl_jax.scheduler.ranks import Ranks


class _ListedRows(NamedTuple):
    """Joint rows of a rank and their requests' ids, valid while `active` is the rank's array."""

    active: RowIndex | None
    rows: bytes
    rids: list[str]


class OutputBuffer:
    """The outputs of one or more steps, until `take`."""

    def __init__(self, dp_size: int) -> None:
        self.outputs: list[RequestOutput] = []
        self.rids: list[str] = []
        self._tokens: list[bytes] = []
        self._listed = [_ListedRows(None, b"", [])] * dp_size

    def add_plain(
        self, ranks: Ranks, rows: RowIndex, bounds: Sequence[int], tokens: Int32Array
    ) -> None:
        """Add one of `tokens` and nothing else to each of the joint `rows`; rank k's rows are
        `rows[bounds[k] : bounds[k + 1]]`."""
        for k, (first, end) in enumerate(pairwise(bounds)):
            listed, active = self._listed[k], ranks.ranks[k].running.active
            wanted = rows[first:end].tobytes()
            # Each arrival or departure of a request replaces `active` by a new array.
            if listed.active is not active or listed.rows != wanted:
                rids = ranks.running.rids[rows[first:end]].tolist()
                listed = self._listed[k] = _ListedRows(active, wanted, rids)
            self.rids += listed.rids
        self._tokens.append(tokens.astype("<i4", copy=False).tobytes())

    def clear_to(self, outputs: list[RequestOutput]) -> None:
        """Replace all collected outputs by `outputs`."""
        self.outputs, self.rids, self._tokens = outputs, [], []

    def take(self) -> OutputBatch | None:
        """Return the outputs since the last call as one batch; None if there are none."""
        outputs, rids, tokens = self.outputs, self.rids, self._tokens
        self.outputs, self.rids, self._tokens = [], [], []
        return OutputBatch(outputs, rids, b"".join(tokens)) if outputs or rids else None
