"""Plans steps by hand, as a scheduler would, with pages dealt out once and for all."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from sgl_jax.core.sampling_params import SamplingParams
from sgl_jax.core.step_plan import RankPlan, RowAdmission, StepPlan
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


class Driver:
    """Plans steps as a scheduler would, with fixed pages: row r owns a range of its own."""

    def __init__(self, executor: ModelExecutor, rows: Sequence[Row]) -> None:
        self.executor = executor
        self.rows = list(rows)
        self.num_steps = 0
        for row in self.rows:
            row.length = len(row.prompt)

    def plan(self, chunk: int, **wants: object) -> tuple[StepPlan, list[list[Row]]]:
        """One step over all rows: decode first, then prefill chunks of at most `chunk` tokens."""
        ranks, order = [], []
        for rank in range(self.executor.sizes.dp_size):
            mine = [row for row in self.rows if row.rank == rank]
            decode = [row for row in mine if row.length - row.committed == 1 and row.committed]
            prefill = [row for row in mine if row not in decode]
            ranks.append(self._rank_plan(decode, prefill, chunk)._replace(**wants))
            order.append(decode + prefill)
        self.num_steps += 1
        return StepPlan(self.num_steps, tuple(ranks)), order

    def _rank_plan(self, decode: list[Row], prefill: list[Row], chunk: int) -> RankPlan:
        sizes = self.executor.sizes
        rows = decode + prefill
        q_lens = [min(chunk, row.length - row.committed) for row in rows]
        table = np.zeros((len(rows), sizes.pages_per_row), np.int32)
        for line, row in zip(table, rows, strict=True):
            line[:] = 1 + (row.row - 1) * sizes.pages_per_row + np.arange(sizes.pages_per_row)
        plan = RankPlan(
            rows=np.array([row.row for row in rows], np.int32),
            epochs=np.zeros(len(rows), np.int32),
            kv_starts=np.array([row.committed for row in rows], np.int32),
            q_lens=np.array(q_lens, np.int32),
            samples=np.array(
                [row.committed + n == row.length for row, n in zip(rows, q_lens, strict=True)],
                np.bool_,
            ),
            page_table=table,
            num_decode=len(decode),
            relayed=np.zeros(len(rows), np.bool_),
            admissions=tuple(
                RowAdmission(
                    row.row,
                    np.array(row.prompt, np.int32),
                    len(row.prompt) if row.prompt_len is None else row.prompt_len,
                    row.sampling,
                    row.seed,
                    (95,),
                )
                for row in rows
                if not row.admitted
            ),
        )
        for row, n, samples in zip(rows, q_lens, plan.samples, strict=True):
            row.admitted = True
            row.committed += n
            row.length += int(samples)
        return plan

    def run(self, num_steps: int, chunk: int = 8, overlap: bool = True) -> list[list[int]]:
        """Outputs of all rows after `num_steps`; with overlap each result is read a step late."""
        waiting: list[tuple[object, list[list[Row]]]] = []
        for _ in range(num_steps):
            plan, order = self.plan(chunk)
            waiting.append((self.executor.launch(plan), order))
            if not overlap or len(waiting) == 2:
                self._read(waiting)
        while waiting:
            self._read(waiting)
        return [row.output for row in self.rows]

    def _read(self, waiting: list[tuple[object, list[list[Row]]]]) -> None:
        handle, order = waiting.pop(0)
        for result, rows in zip(self.executor.result(handle), order, strict=True):
            for tokens, row in zip(result.tokens.tolist(), rows, strict=True):
                row.output.extend(token for token in tokens if token >= 0)
