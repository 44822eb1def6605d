"""Executors without a device, for tests and for measuring only the host."""

from collections.abc import Sequence

import numpy as np

from sgl_jax.core.engine_sizes import EngineSizes
from sgl_jax.core.step_plan import Executor, Int32Array, RankPlan, RankResult, StepHandle, StepPlan


class FakeExecutor(Executor):
    """Return for each sampling row a token computed from its position, in almost no time.

    No draft is accepted.
    """

    def __init__(self, sizes: EngineSizes) -> None:
        self.sizes = sizes

    def launch(self, plan: StepPlan) -> StepHandle:
        return tuple(self._run(rank_plan) for rank_plan in plan.ranks)

    def draw(self, handle: StepHandle, masks: Sequence[Int32Array]) -> None:
        """Replace each disallowed token by the lowest allowed token."""
        for result, mask in zip(self.result(handle), masks, strict=True):
            tokens = result.tokens[:, 0]
            of_next = np.ascontiguousarray(mask[:, 0]).view(np.uint8)
            allowed = np.unpackbits(of_next, axis=1, bitorder="little").astype(np.bool_)
            is_wrong = (tokens >= 0) & ~allowed[np.arange(len(tokens)), tokens]
            tokens[is_wrong] = allowed[is_wrong].argmax(axis=1)

    def result(self, handle: StepHandle) -> tuple[RankResult, ...]:
        results: tuple[RankResult, ...] = handle
        return results

    def _run(self, plan: RankPlan) -> RankResult:
        sizes, ends = self.sizes, plan.kv_starts + plan.q_lens
        width, num_steps = 1 + sizes.max_draft_tokens, plan.samples.astype(np.int32)
        if plan.num_steps is not None:
            width, num_steps = sizes.max_decode_steps, plan.num_steps
        steps = np.arange(width, dtype=np.int32)
        made_up = ((ends[:, None] + steps) * 31 + plan.rows[:, None] * 17) % sizes.vocab_size
        return RankResult(np.where(steps < num_steps[:, None], made_up, -1))


class DistinctAnswers(FakeExecutor):
    """A fake executor with outputs that depend on each request's seed.

    Otherwise, two requests with the same prompt in the same row would share their outputs' pages.
    """

    def __init__(self, sizes: EngineSizes) -> None:
        super().__init__(sizes)
        self._seeds = np.zeros((sizes.dp_size, sizes.num_rows), np.int64)

    def launch(self, plan: StepPlan) -> StepHandle:
        handle = super().launch(plan)
        results = self.result(handle)
        for rank_plan, result, seeds in zip(plan.ranks, results, self._seeds, strict=True):
            for admission in rank_plan.admissions:
                seeds[admission.row] = admission.seed
            shifted = (result.tokens + seeds[rank_plan.rows, None]) % self.sizes.vocab_size
            result.tokens[:] = np.where(result.tokens >= 0, shifted, -1)
        return handle
