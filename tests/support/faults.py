"""Faults that tests inject: steps that fail or take long, ranks that are refused their pages."""

import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np

from sgl_jax.core.step_plan import (
    Executor,
    Int32Array,
    IntpArray,
    RankResult,
    StepHandle,
    StepPlan,
)
from sgl_jax.mem_cache.pages.pool_records import PoolRecords
from sgl_jax.mem_cache.rank_memory import RankMemory

EVERY = range(1_000_000_000)  # launch or result


class StepFailedError(RuntimeError):
    """What a device that fails raises here."""


class FaultyExecutor:
    """Passes steps on to `inner`, but for those that are to fail; the rest is `inner`'s own.

    Args:
        failing_launches: launches that raise, counted from 0.
        failing_results: results that raise, counted from 0.
        delay_s: every result comes this much later.
    """

    def __init__(
        self,
        inner: Executor,
        *,
        failing_launches: Collection[int] = (),
        failing_results: Collection[int] = (),
        delay_s: float = 0.0,
    ) -> None:
        self._inner = inner
        self.failing_launches = failing_launches
        self.failing_results = failing_results
        self.failing_draws = False  # all of them
        self.delay_s = delay_s
        self.num_launched = 0
        self.num_read = 0
        self.num_failed = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def disarm(self) -> None:
        """Let no further step fail; forget those that did."""
        self.failing_launches, self.failing_results, self.num_failed = (), (), 0
        self.failing_draws = False

    def launch(self, plan: StepPlan) -> StepHandle:
        number, self.num_launched = self.num_launched, self.num_launched + 1
        if number in self.failing_launches:
            self.num_failed += 1
            raise StepFailedError(f"launch {number} was made to fail")
        return self._inner.launch(plan)

    def draw(self, handle: StepHandle, masks: Sequence[Int32Array]) -> None:
        if self.failing_draws:
            self.num_failed += 1
            raise StepFailedError("a draw was made to fail")
        self._inner.draw(handle, masks)

    def result(self, handle: StepHandle) -> tuple[RankResult, ...]:
        number, self.num_read = self.num_read, self.num_read + 1
        if self.delay_s:  # to sleep for no time lets other threads run
            time.sleep(self.delay_s)
        if number in self.failing_results:
            self.num_failed += 1
            raise StepFailedError(f"result {number} was made to fail")
        return self._inner.result(handle)


@contextmanager
def no_more_pages(memory: RankMemory) -> Iterator[None]:
    """Within, the rank gets no page it does not hold already, however many are free."""

    def none_free(_: PoolRecords, ranks: IntpArray) -> IntpArray:
        return np.zeros(len(ranks), np.intp)  # so every rank is asked to make room

    with (
        patch.object(memory, "make_room", return_value=False),
        patch.object(PoolRecords, "num_free", none_free),
    ):
        yield
