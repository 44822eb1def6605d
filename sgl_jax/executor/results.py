"""From the arrays a step left on the device to each rank's samples.

Fetches only the results that the plan requests; waits for the step to finish.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter

import jax
import numpy as np

from sgl_jax.core.step_plan import Int32Array, PromptLogprobs, RankPlan, RankResult, StepPlan
from sgl_jax.executor.buckets import Bucket
from sgl_jax.executor.layout import DPLayout, StepInput
from sgl_jax.executor.step import Computed, StepOutput
from sgl_jax.layers.sampling.logprobs import TokenLogprobs


@dataclass
class LaunchedStep:
    """A step on its way: its plan, and the layout of its output.

    Attributes:
        output: None until `Executor.draw` of a masked step; until then `computed` and `given` hold
            the second half's inputs.
    """

    plan: StepPlan
    bucket: Bucket
    layout: DPLayout
    output: StepOutput | None
    computed: Computed | None = None
    given: StepInput | None = None


def unpack_results(step: LaunchedStep) -> tuple[RankResult, ...]:
    """Each rank's samples, in plan order."""
    assert step.output is not None, "a masked step is drawn before its result is read"
    ranks = step.plan.ranks
    num_rows = [len(plan.rows) for plan in ranks]
    tokens = step.layout.split(np.asarray(step.output.tokens), num_rows)
    results = [RankResult(of_rank) for of_rank in tokens]
    if any(map(_returns_logprobs, ranks)):
        fetched = _fetch(step, step.output.logprobs, num_rows)
        for i, (plan, values) in enumerate(zip(ranks, fetched, strict=True)):
            if _returns_logprobs(plan):
                results[i] = results[i]._replace(**values._asdict())
    if any(plan.num_scored is not None for plan in ranks):
        counts = [0 if plan.num_scored is None else int(plan.num_scored.sum()) for plan in ranks]
        fetched = _fetch(step, step.output.prompt_logprobs, counts)
        for i, (plan, values) in enumerate(zip(ranks, fetched, strict=True)):
            if plan.num_scored is not None:
                by_row = _by_row(plan.num_scored, values)
                results[i] = results[i]._replace(prompt_logprobs=by_row)
    return tuple(results)


def _returns_logprobs(plan: RankPlan) -> bool:
    return plan.return_logprob or plan.top_logprobs_num > 0


def _fetch(
    step: LaunchedStep, values: TokenLogprobs, counts: Sequence[int]
) -> list[PromptLogprobs]:
    """Each rank's values on the host: of its rows, or of the prompts' tokens it scored."""
    names_tokens = any(plan.num_logprob_ids for plan in step.plan.ranks)
    requested = values if names_tokens else values[:-1]
    return list(map(PromptLogprobs, *(step.layout.split(np.asarray(a), counts) for a in requested)))


def _by_row(num_scored: Int32Array, values: PromptLogprobs) -> dict[int, PromptLogprobs]:
    """Cut one rank's values into its scored rows, by plan index."""
    ends = np.cumsum(num_scored)
    rows = {}
    for i in np.flatnonzero(num_scored).tolist():
        tokens = slice(ends[i] - num_scored[i], ends[i])
        rows[i] = jax.tree.map(itemgetter(tokens), values)
    return rows
