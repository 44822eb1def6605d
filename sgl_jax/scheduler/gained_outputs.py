"""What requests have gained since the outputs were taken last.

Most rows gain one plain token in most steps, and from one step to the next they are mostly the
same rows. So the ids of a rank's requests are listed once, and again only when they change.
"""

from collections.abc import Sequence
from typing import NamedTuple

from sgl_jax.core.messages import OutputBatch, RequestOutput
from sgl_jax.core.step_plan import Int32Array, RowIndex
from sgl_jax.scheduler.running_rows import RunningRows


class _ListedRows(NamedTuple):
    """Rows of a rank and the ids of their requests, while `active` is the rank's."""

    active: RowIndex | None
    rows: bytes
    rids: list[str]


class GainedOutputs:
    """The outputs of one or more steps, until `take`."""

    def __init__(self, dp_size: int) -> None:
        self.outputs: list[RequestOutput] = []
        self._rids: list[str] = []
        self._tokens: list[bytes] = []
        self._listed = [_ListedRows(None, b"", [])] * dp_size

    def add_plain(
        self, ranks: Sequence[RunningRows], rows: Sequence[RowIndex], tokens: Int32Array
    ) -> None:
        """Each of `rows`, listed for each of `ranks`, gained one of `tokens` and nothing else."""
        for k, (running, own_rows) in enumerate(zip(ranks, rows, strict=True)):
            listed, wanted = self._listed[k], own_rows.tobytes()
            # `active` is another array as soon as a request comes or goes.
            if listed.active is not running.active or listed.rows != wanted:
                listed = _ListedRows(running.active, wanted, running.rids[own_rows].tolist())
                self._listed[k] = listed
            self._rids += listed.rids
        self._tokens.append(tokens.astype("<i4", copy=False).tobytes())

    def clear_to(self, outputs: list[RequestOutput]) -> None:
        """Only `outputs` are left of what was gained."""
        self.outputs, self._rids, self._tokens = outputs, [], []

    def take(self) -> OutputBatch | None:
        """All of it, once; None if nothing."""
        if not self.outputs and not self._rids:
            return None
        batch = OutputBatch(self.outputs, self._rids, b"".join(self._tokens))
        self.clear_to([])
        return batch
