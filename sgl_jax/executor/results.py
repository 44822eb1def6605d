"""From the arrays a step left on the device to what each rank's rows sampled.

Fetches only what the plan asked for; waits for the step to finish.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sgl_jax.core.step_plan import PromptLogprobs, RankPlan, RankResult, StepPlan
from sgl_jax.executor.layout import DPLayout
from sgl_jax.executor.step import StepOutput
from sgl_jax.layers.sampling import TokenLogprobs


class LaunchedStep(NamedTuple):
    """A step on its way: its plan, and how the arrays that will hold its output are laid out."""

    plan: StepPlan
    layout: DPLayout
    output: StepOutput


def unpack_results(step: LaunchedStep) -> tuple[RankResult, ...]:
    """What each rank sampled, in plan order."""
    ranks = step.plan.ranks
    num_rows = [len(plan.rows) for plan in ranks]
    tokens = step.layout.split(np.asarray(step.output.tokens), num_rows)
    results = [RankResult(of_rank) for of_rank in tokens]
    if any(map(_wants_logprobs, ranks)):
        fetched = _fetch(step.layout, step.output.logprobs, num_rows)
        for i, (plan, values) in enumerate(zip(ranks, fetched, strict=True)):
            if _wants_logprobs(plan):
                results[i] = results[i]._replace(**values._asdict())
    if step.output.prompt_logprobs is not None:
        num_tokens = [plan.num_tokens for plan in ranks]
        fetched = _fetch(step.layout, step.output.prompt_logprobs, num_tokens)
        for i, (plan, values) in enumerate(zip(ranks, fetched, strict=True)):
            if plan.prompt_logprobs is not None:
                results[i] = results[i]._replace(prompt_logprobs=_by_row(plan, values))
    return tuple(results)


def _wants_logprobs(plan: RankPlan) -> bool:
    return plan.return_logprob or plan.top_logprobs_num > 0


def _fetch(layout: DPLayout, values: TokenLogprobs, counts: Sequence[int]) -> list[PromptLogprobs]:
    """Each rank's values on the host: of its rows, or of its prompts' tokens."""
    logprobs, top_ids, top_logprobs = (layout.split(np.asarray(array), counts) for array in values)
    return list(map(PromptLogprobs, logprobs, top_ids, top_logprobs))


def _by_row(plan: RankPlan, values: PromptLogprobs) -> dict[int, PromptLogprobs]:
    """Cut one rank's per-token values into the chunks that asked for them."""
    assert plan.prompt_logprobs is not None
    ends = np.cumsum(plan.q_lens)
    chunks = {}
    for i in np.flatnonzero(plan.prompt_logprobs):
        tokens = slice(ends[i] - plan.q_lens[i], ends[i])
        chunks[int(i)] = PromptLogprobs(
            values.logprobs[tokens], values.top_ids[tokens], values.top_logprobs[tokens]
        )
    return chunks
