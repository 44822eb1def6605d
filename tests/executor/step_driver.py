"""Plans steps by hand, as a scheduler would, with pages assigned once and for all."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sgl_jax.core.page_tables import PageChanges
from sgl_jax.core.sampling_params import SamplingParams
from sgl_jax.core.step_plan import (
    NO_IMAGES,
    Int32Array,
    RankPlan,
    RankResult,
    RowAdmission,
    StepPlan,
)
from sgl_jax.executor.model_executor import ModelExecutor

GREEDY = SamplingParams(temperature=0.0)


@dataclass
class Row:
    """One request of the driver: its row, its pages, what is known of it."""

    rank: int
    row: int
    prompt: list[int]
    sampling: SamplingParams = GREEDY
    seed: int = 0
    prompt_len: int | None = None  # of the original prompt, if `prompt` holds output too
    committed: int = 0  # tokens whose KV a launched step has written
    length: int = 0  # tokens known or on their way
    output: list[int] = field(default_factory=list)
    admitted: bool = False
    unread_drafts: int = 0
    logprob_ids: tuple[int, ...] = ()
    images: Int32Array = field(default_factory=lambda: NO_IMAGES)


class Driver:
    """Plans steps as a scheduler would, with fixed pages: row r owns a range of its own.

    Decode rows draft `num_drafts` tokens while the context has room for them.
    """

    def __init__(self, executor: ModelExecutor, rows: Sequence[Row], num_drafts: int = 0) -> None:
        self.executor = executor
        self.num_drafts = num_drafts
        self.rows = list(rows)
        self.num_steps = 0
        for row in self.rows:
            row.length = len(row.prompt)

    def plan(self, chunk: int, **wants: Any) -> tuple[StepPlan, list[list[Row]]]:
        """One step over all rows: decode first, then prefill chunks of at most `chunk` tokens."""
        ranks, order = [], []
        for rank in range(self.executor.sizes.dp_size):
            mine = [row for row in self.rows if row.rank == rank]
            decode = [row for row in mine if row.length - row.committed == 1 and row.committed]
            prefill = [row for row in mine if row not in decode]
            ranks.append(self._rank_plan(decode, prefill, chunk)._replace(**wants))
            order.append(decode + prefill)
        self.num_steps += 1
        return StepPlan(self.num_steps, tuple(ranks), self._all_pages()), order

    def _all_pages(self) -> PageChanges:
        """Each row lists pages of its own, as many as it can."""
        sizes = self.executor.sizes
        rows = np.arange(1, sizes.num_rows)
        pages = 1 + (rows[:, None] - 1) * sizes.pages_per_row + np.arange(sizes.pages_per_row)
        listed = zip(rows.tolist(), pages.tolist(), strict=True)
        by_row = [(row, of_row) for row, of_row in listed if of_row[-1] < sizes.pool_pages[0]]
        return PageChanges.listing(
            sizes, {(k, row): [of_row] for k in range(sizes.dp_size) for row, of_row in by_row}
        )

    def _rank_plan(self, decode: list[Row], prefill: list[Row], chunk: int) -> RankPlan:
        sizes = self.executor.sizes
        rows = decode + prefill
        q_lens = [min(chunk, row.length - row.committed) for row in rows]
        samples = [row.committed + n == row.length for row, n in zip(rows, q_lens, strict=True)]
        relayed = [row.unread_drafts > 0 for row in rows]
        drafts = [self._num_drafts(row) for row in decode] + [0] * len(prefill)
        plan = RankPlan(
            rows=np.array([row.row for row in rows], np.int32),
            kv_starts=np.array([row.committed for row in rows], np.int32),
            q_lens=np.array(q_lens, np.int32) + np.array(drafts, np.int32),
            samples=np.array(samples, np.bool_),
            num_pages=sizes.pages_per_row,
            num_decode=len(decode),
            relayed=np.array(relayed, np.bool_),
            admissions=tuple(
                RowAdmission(
                    row.row,
                    np.array(row.prompt, np.int32),
                    len(row.prompt) if row.prompt_len is None else row.prompt_len,
                    row.sampling,
                    row.seed,
                    (95,),
                    logprob_ids=row.logprob_ids,
                    images=row.images,
                )
                for row in rows
                if not row.admitted
            ),
        )
        for row, n, sampled, drafted in zip(rows, q_lens, samples, drafts, strict=True):
            row.admitted = True
            row.committed += n
            row.length += int(sampled)
            row.unread_drafts += drafted
        return plan

    def _num_drafts(self, row: Row) -> int:
        room = self.executor.sizes.max_context_len - row.length - row.unread_drafts - 1
        return max(0, min(self.num_drafts, room))

    def run(self, num_steps: int, chunk: int = 8, overlap: bool = True) -> list[list[int]]:
        """Outputs of all rows after `num_steps`; with overlap each result is read a step late."""
        waiting: list[tuple[StepPlan, object, list[list[Row]]]] = []
        for _ in range(num_steps):
            plan, order = self.plan(chunk)
            waiting.append((plan, self.executor.launch(plan), order))
            if not overlap or len(waiting) == 2:
                self._read(waiting)
        while waiting:
            self._read(waiting)
        return [row.output for row in self.rows]

    def _read(
        self, waiting: list[tuple[StepPlan, object, list[list[Row]]]]
    ) -> tuple[RankResult, ...]:
        plan, handle, order = waiting.pop(0)
        results = self.executor.result(handle)  # type: ignore[arg-type]
        for rank_plan, result, rows in zip(plan.ranks, results, order, strict=True):
            lines = zip(rows, result.tokens.tolist(), rank_plan.num_drafts.tolist(), strict=True)
            for row, tokens, drafted in lines:
                gained = [token for token in tokens if token >= 0]
                row.output.extend(gained)
                accepted = max(len(gained) - 1, 0)
                row.committed += accepted
                row.length += accepted
                row.unread_drafts -= drafted
        return results
