"""The steps of a warm-up. In the last, each rank samples one greedy token.

A program that compiles may still compute wrong results, e.g. if weights overflow or a kernel reads
beyond its pages. NaN or infinite log-probabilities reveal this before a client is affected.
"""

from collections.abc import Sequence

import numpy as np

from sgl_jax.core.engine_sizes import EngineSizes
from sgl_jax.core.page_tables import PageChanges
from sgl_jax.core.sampling_params import SamplingParams
from sgl_jax.core.step_plan import RankPlan, RankResult, RowAdmission, StatePlan, StepPlan

SHORT_PROMPT = 4


def idle_plan(sizes: EngineSizes, *, has_steps: bool = False) -> StepPlan:
    """Plan a step without rows, or several (`has_steps`), on only the null row and page."""
    nothing, no_flags = np.zeros(0, np.int32), np.zeros(0, np.bool_)
    rank = RankPlan(
        rows=nothing,
        kv_starts=nothing,
        q_lens=nothing,
        samples=no_flags,
        num_pages=1,
        num_decode=0,
        relayed=no_flags,
        num_steps=nothing if has_steps else None,
    )
    return StepPlan(step_id=0, ranks=(rank,) * sizes.dp_size, has_steps=has_steps)


def first_token_plan(sizes: EngineSizes, num_tokens: int = SHORT_PROMPT) -> StepPlan:
    """Plan a prompt on each rank in row 1 and the first pages, which later requests overwrite.

    The prompt has `num_tokens`, or as many as a step and the context hold. If there are too few
    pages, some are written more than once.
    """
    length = min(num_tokens, sizes.max_chunk_tokens, sizes.max_context_len - 1)
    num_pages = sizes.pages_for(length)
    admission = RowAdmission(
        row=1,
        tokens=np.arange(length, dtype=np.int32) % sizes.vocab_size,
        prompt_len=length,
        sampling=SamplingParams(max_new_tokens=1, temperature=0.0),
        seed=0,
        stop_token_ids=(),
    )
    rank = RankPlan(
        rows=np.array([1], np.int32),
        kv_starts=np.zeros(1, np.int32),
        q_lens=np.array([length], np.int32),
        samples=np.array([True]),
        num_pages=num_pages,
        num_decode=0,
        relayed=np.array([False]),
        admissions=(admission,),
        return_logprob=True,
        states=StatePlan.from_nothing(1) if sizes.state_group is not None else None,
    )
    # Groups that share a pool have different pages.
    listed = [
        []
        if group.is_recurrent
        else [
            1 + index % (sizes.pool_pages[group.pool] - 1)
            for index in range(number * num_pages, (number + 1) * num_pages)
        ]
        for number, group in enumerate(sizes.groups)
    ]
    pages = PageChanges.listing(sizes, {(k, 1): listed for k in range(sizes.dp_size)})
    return StepPlan(step_id=0, ranks=(rank,) * sizes.dp_size, page_changes=pages)


def check_first_token(results: Sequence[RankResult], vocab_size: int, model_path: str) -> None:
    """Raise ValueError if a rank sampled no token, or its logits were not finite."""
    for rank, result in enumerate(results):
        token = int(result.tokens[0, 0])
        assert result.logprobs is not None, "the plan requests them"
        logprob = float(result.logprobs[0, 0])
        if not 0 <= token < vocab_size or not np.isfinite(logprob):
            raise ValueError(
                f"the model in {model_path!r} computes logits that are no finite numbers (rank "
                f"{rank}, token {token}, log-probability {logprob}): its weights are damaged, or "
                "too large for --dtype"
            )
