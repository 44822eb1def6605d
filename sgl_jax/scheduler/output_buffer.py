"""Collects the outputs of requests until the next take.

Most rows gain one plain token in most steps, and successive steps often have the same rows. So the
request ids of the rows are listed again only if the rows, or their requests, have changed.
"""

from typing import NamedTuple

from sgl_jax.core.engine_messages import OutputBatch, RequestOutput
from sgl_jax.core.step_plan import Int32Array, RowIndex
from sgl_jax.scheduler.ranks import Ranks


class _ListedRows(NamedTuple):
    """Joint rows, their epochs, and the ids of their requests."""

    rows: bytes
    epochs: bytes  # a row has another epoch once another request has it
    rids: list[str]


class OutputBuffer:
    """The outputs of one or more steps, until `take`."""

    def __init__(self) -> None:
        self.outputs: list[RequestOutput] = []
        self.rids: list[str] = []
        self._tokens: list[bytes] = []
        self._listed = _ListedRows(b"", b"", [])

    def add_plain(self, ranks: Ranks, rows: RowIndex, tokens: Int32Array) -> None:
        """Add one of `tokens` and nothing else to each of the joint `rows`."""
        wanted = rows.tobytes(), ranks.tables.epoch[rows].tobytes()
        if self._listed[:2] != wanted:
            self._listed = _ListedRows(*wanted, ranks.running.rids[rows].tolist())
        # The list is never changed: most batches share it.
        self.rids = [*self.rids, *self._listed.rids] if self.rids else self._listed.rids
        self._tokens.append(tokens.astype("<i4", copy=False).tobytes())

    def clear_to(self, outputs: list[RequestOutput]) -> None:
        """Replace all collected outputs by `outputs`."""
        self.outputs, self.rids, self._tokens = outputs, [], []

    def take(self) -> OutputBatch | None:
        """Return the outputs since the last call as one batch; None if there are none."""
        outputs, rids, tokens = self.outputs, self.rids, self._tokens
        self.outputs, self.rids, self._tokens = [], [], []
        return OutputBatch(outputs, rids, b"".join(tokens)) if outputs or rids else None
