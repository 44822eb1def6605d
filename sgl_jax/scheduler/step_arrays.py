"""Builds the plans of a step from its chosen rows, for all ranks at once.

The step then counts as launched: lengths are committed, and its prefill chunks may be published. So
a built step must be launched.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from sgl_jax.core.step_plan import Int32Array, RankPlan, StepPlan
from sgl_jax.mem_cache.row_growth import commit_rows
from sgl_jax.scheduler.in_flight_rows import SHARE, InFlightRows, Records, launch
from sgl_jax.scheduler.ranks import Ranks
from sgl_jax.scheduler.state_plan import plan_states
from sgl_jax.scheduler.step_builder import StepBuilder

_NONE_AHEAD = np.zeros(0, np.int32)


def build_plan(
    ranks: Ranks,
    builders: Sequence[StepBuilder],
    step_id: int,
    num_steps: Int32Array | None = None,
) -> tuple[StepPlan, InFlightRows]:
    """Build the plan from each rank's builder. Commits lengths and publishes prefill chunks.
    `num_steps` is the result of `reserve_steps`."""
    for builder in builders:
        if builder.chunks:
            builder.trim_to_shape()
    running, tables = ranks.running, ranks.tables
    chunks = [chunk for builder in builders for chunk in builder.chunks.items()]
    lens = [len(builder.decode_rows) + len(builder.chunks) for builder in builders]
    bounds = np.array([0, *accumulate(lens)])
    shares = np.zeros(len(builders), SHARE)
    shares["num_decode"] = [len(builder.decode_rows) for builder in builders]
    num_ahead = _NONE_AHEAD
    if num_steps is not None:
        num_ahead = num_steps - np.int32(1)
    elif ranks.max_draft_tokens:
        num_ahead = np.concatenate([builder.num_drafts for builder in builders])
    rows = launch(
        bounds,
        np.concatenate([builder.decode_rows for builder in builders]),
        np.array([row for row, _ in chunks], np.intp),
        np.array([num_tokens for _, num_tokens in chunks], np.int32),
        shares,
        num_ahead,
        running.records,
        tables.kv_committed_len,
        tables.epoch,
    )
    if num_steps is not None:
        rows["q_len"] = 1  # in each step
    # Take the page log before chunks are published: publishing may replace a row's pages by the
    # tree's while the step still writes them.
    pages = tables.page_log.take()
    plans = tuple(
        _rank_plan(ranks, builder, rows[first:end], share, has_steps=num_steps is not None)
        for builder, (first, end), share in zip(
            builders, pairwise(bounds.tolist()), shares.tolist(), strict=True
        )
    )
    saved = [move for tier in ranks.host_tiers for move in tier.take_saved()]
    plan = StepPlan(
        step_id,
        plans,
        pages,
        bool(shares["is_masked"].any()),
        tuple(saved),
        has_steps=num_steps is not None,
    )
    commit_rows(tables, ranks.memories, rows["row"], rows["kv_end"])
    for builder in builders:
        if builder.chunks:
            builder.rank.prompts.offer(list(builder.chunks))
    return plan, InFlightRows(rows, bounds)


def _rank_plan(
    ranks: Ranks, builder: StepBuilder, rows: Records, share: Any, *, has_steps: bool
) -> RankPlan:
    """Return the plan of a rank's `rows`, LAUNCHED[n], before any commit; its arrays are views of
    them. `share` has the fields of the rank's SHARE."""
    num_decode, longest, num_scored, top_logprobs_num, _, returns_hidden = share
    num_pages = -(-(longest + ranks.lookahead_slots) // ranks.page_size)
    reports = num_scored > 0 or top_logprobs_num >= 0
    admissions = tuple(builder.rank.unsent_admissions.values())
    builder.rank.unsent_admissions.clear()
    num_ids = int(ranks.running.num_logprob_ids[rows["row"]].max()) if reports else 0
    return RankPlan(
        rows=rows["own_row"],
        kv_starts=rows["kv_start"],
        q_lens=rows["q_len"],
        samples=rows["samples"],
        num_pages=min(num_pages, ranks.pages_per_row),
        num_decode=num_decode,
        relayed=rows["relayed"],
        admissions=admissions,
        num_scored=rows["num_scored"] if num_scored else None,
        return_logprob=top_logprobs_num >= 0,
        top_logprobs_num=max(top_logprobs_num, 0),
        num_logprob_ids=num_ids,
        returns_hidden=returns_hidden,
        states=plan_states(builder, rows) if ranks.has_states else None,
        drafts=builder.drafts,
        num_steps=1 + rows["num_ahead"] if has_steps else None,
    )
