"""The builders of a step for all ranks, each made when it is first used.

In most steps most ranks only decode. Such a rank needs no builder: its rows are in the plan as they
were selected.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from sgl_jax.core.engine_sizes import EngineSizes
from sgl_jax.core.step_plan import RowIndex
from sgl_jax.scheduler.ranks import Ranks
from sgl_jax.scheduler.runnable import Runnable
from sgl_jax.scheduler.step_builder import StepBuilder


class StepBuilders(Sequence[StepBuilder]):
    """The builders of the ranks' parts of a step, which may hold `chunk_tokens` prompt tokens."""

    def __init__(
        self, ranks: Ranks, sizes: EngineSizes, runnable: Runnable, chunk_tokens: int
    ) -> None:
        self._ranks, self._sizes, self._runnable = ranks, sizes, runnable
        self.chunk_tokens = chunk_tokens
        self._made: dict[int, StepBuilder] = {}
        for dp_rank, (first, end) in enumerate(pairwise(runnable.bounds)):
            is_plain = runnable.has_slots[dp_rank] and dp_rank not in runnable.prefilling
            if not is_plain or first == end or sizes.max_draft_tokens:
                self._make(dp_rank)

    def __len__(self) -> int:
        return len(self._ranks.ranks)

    def __getitem__(self, dp_rank: int) -> StepBuilder:  # type: ignore[override]
        return self._made.get(dp_rank) or self._make(dp_rank)

    def _make(self, dp_rank: int) -> StepBuilder:
        rank, (rows, bounds, has_slots, prefilling) = self._ranks.ranks[dp_rank], self._runnable
        builder = self._made[dp_rank] = StepBuilder(
            rank,
            self._sizes,
            rows[bounds[dp_rank] : bounds[dp_rank + 1]],
            prefilling.get(dp_rank, {}),
            self.chunk_tokens,
            self._ranks.tenants,
            has_slots=has_slots[dp_rank],
        )
        return builder

    def find(self, dp_rank: int) -> StepBuilder | None:
        """Return the builder of a rank; None if it was not made: then the rank only decodes."""
        return self._made.get(dp_rank)

    def made(self) -> list[StepBuilder]:
        """Return the builders made so far, in order; other ranks decode the selected rows."""
        return [self._made[dp_rank] for dp_rank in sorted(self._made)]

    def decode_rows(self) -> tuple[RowIndex, list[int]]:
        """Return the decode rows, rank by rank, by their index on their rank, and their numbers."""
        rows, bounds = self._runnable.decoding, self._runnable.bounds
        counts = [end - first for first, end in pairwise(bounds)]
        if any(len(own.decode_rows) < counts[dp_rank] for dp_rank, own in self._made.items()):
            parts = [rows[first:end] for first, end in pairwise(bounds)]
            for dp_rank, own in self._made.items():
                parts[dp_rank] = own.decode_rows
                counts[dp_rank] = len(own.decode_rows)
            rows = np.concatenate(parts)
        return rows, counts
