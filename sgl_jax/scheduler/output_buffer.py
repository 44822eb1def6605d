"""Collects the outputs of requests until the next take.

Most rows gain one plain token in most steps, and successive steps often have the same rows. So the
request ids of a rank's rows are listed again only if the rows, or their requests, have changed. The
lists of ranks are not joined: even a copy of a list visits all ids, most of them outside the
processor's caches.
"""

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from sgl_jax.core.engine_messages import OutputBatch, RequestOutput
from sgl_jax.core.step_plan import Int32Array, RowIndex
from sgl_jax.scheduler.ranks import Ranks


class _ListedRows(NamedTuple):
    """Joint rows, their epochs, and the ids of their requests, in lists that never change."""

    rows: bytes
    epochs: bytes  # a row has another epoch once another request has it
    rid_lists: list[list[str]]


_NONE_LISTED = _ListedRows(b"", b"", [])


class OutputBuffer:
    """The outputs of one or more steps, until `take`."""

    def __init__(self) -> None:
        self.outputs: list[RequestOutput] = []
        self.rid_lists: list[list[str]] = []
        self._tokens: list[bytes] = []
        self._listed = _NONE_LISTED
        self._parts: dict[int, _ListedRows] = {}  # by rank

    def add_plain(self, ranks: Ranks, rows: RowIndex, tokens: Int32Array) -> None:
        """Add one of `tokens` and nothing else to each of the joint `rows`."""
        wanted = rows.tobytes(), ranks.tables.epoch[rows].tobytes()
        if self._listed[:2] != wanted:
            self._listed = _ListedRows(*wanted, self._list(ranks, rows, *wanted))
        self.rid_lists += self._listed.rid_lists
        self._tokens.append(tokens.astype("<i4", copy=False).tobytes())

    def _list(
        self, ranks: Ranks, rows: RowIndex, raw_rows: bytes, raw_epochs: bytes
    ) -> list[list[str]]:
        """List the request ids of joint `rows`, for each rank that has any; the rest are the bytes
        of rows and epochs."""
        rid_lists: list[list[str]] = []
        firsts = np.arange(1, len(ranks.ranks)) * ranks.num_rows
        bounds = [0, *rows.searchsorted(firsts).tolist(), len(rows)]
        for k, (first, end) in enumerate(pairwise(bounds)):
            wanted = raw_rows[8 * first : 8 * end], raw_epochs[4 * first : 4 * end]
            part = self._parts.get(k, _NONE_LISTED)
            if part[:2] != wanted:
                rids: list[str] = ranks.running.rids[rows[first:end]].tolist()
                part = self._parts[k] = _ListedRows(*wanted, [rids] if rids else [])
            rid_lists += part.rid_lists
        return rid_lists

    def clear_to(self, outputs: list[RequestOutput]) -> None:
        """Replace all collected outputs by `outputs`."""
        self.outputs, self.rid_lists, self._tokens = outputs, [], []

    def take(self) -> OutputBatch | None:
        """Return the outputs since the last call as one batch; None if there are none."""
        outputs, rid_lists, tokens = self.outputs, self.rid_lists, self._tokens
        self.outputs, self.rid_lists, self._tokens = [], [], []
        if not (outputs or rid_lists):
            return None
        return OutputBatch(outputs, rid_lists, b"".join(tokens))
