"""Times of events in the lives of requests, recorded by the engine loop for the frontend.

They are sent with the next outputs (`OutputBatch`), by `time.perf_counter` of this machine.
"""

import time
from collections import deque
from collections.abc import Sequence

import msgspec

from sgl_jax.core.engine_messages import Mark, OutputBatch
from sgl_jax.core.step_plan import StepPlan
from sgl_jax.scheduler.rank_scheduler import RankScheduler
from sgl_jax.scheduler.request import Request


class RequestStamps:
    """First starts of requests; with `has_marks`, also their prefill chunks and retracts."""

    def __init__(self, ranks: Sequence[RankScheduler], *, has_marks: bool) -> None:
        self.has_marks = has_marks
        self.starts: dict[str, float] = {}
        self.marks: dict[str, list[Mark]] = {}
        self._ranks = ranks
        # Steps in flight: id, time of the launch, rid and tokens of each chunk.
        self._launched: deque[tuple[int, float, list[tuple[str, int]]]] = deque()
        if has_marks:
            for rank in ranks:
                rank.on_retract = self._note_retract

    def note_launch(self, plan: StepPlan) -> None:
        now = time.perf_counter()
        chunks: list[tuple[str, int]] = []
        for rank, part in zip(self._ranks, plan.ranks, strict=True):
            for admission in part.admissions:
                request = rank.running.request(admission.row)
                if request.num_retractions == 0:
                    self.starts[request.rid] = now
            if self.has_marks:
                rows, lens = part.rows[part.num_decode :], part.q_lens[part.num_decode :]
                for row, num_tokens in zip(rows.tolist(), lens.tolist(), strict=True):
                    chunks.append((rank.running.request(row).rid, num_tokens))
        if chunks:
            self._launched.append((plan.step_id, now, chunks))

    def note_result(self, step_id: int) -> None:
        """Record that the result of a step was read. Earlier steps with chunks left were lost."""
        now = time.perf_counter()
        while self._launched and self._launched[0][0] <= step_id:
            launched_id, launched_at, chunks = self._launched.popleft()
            if launched_id == step_id:
                for rid, num_tokens in chunks:
                    self._add(rid, Mark(launched_at, now, num_tokens))

    def add_to(self, batch: OutputBatch) -> OutputBatch:
        starts, self.starts = self.starts, {}
        marks, self.marks = self.marks, {}
        return msgspec.structs.replace(batch, starts=starts, marks=marks)

    def _note_retract(self, request: Request) -> None:
        now = time.perf_counter()
        self._add(request.rid, Mark(now, now, 0))

    def _add(self, rid: str, mark: Mark) -> None:
        self.marks.setdefault(rid, []).append(mark)
