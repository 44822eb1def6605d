"""Builds the plans of a step from its chosen rows, for all ranks at once.

The step then counts as launched: lengths are committed, and its prefill chunks may be published. So
a built step must be launched.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from sgl_jax.core.step_plan import Int32Array, RankPlan, RowAdmission, StepPlan
from sgl_jax.mem_cache.row_growth import commit_rows, grow_rows
from sgl_jax.scheduler.in_flight_rows import SHARE, InFlightRows, Records, launch
from sgl_jax.scheduler.ranks import Ranks
from sgl_jax.scheduler.state_plan import plan_states
from sgl_jax.scheduler.step_builder import StepBuilder

_NONE_AHEAD = np.zeros(0, np.int32)
# Of LAUNCHED, for `RankPlan`.
_COLUMNS = ("own_row", "kv_start", "q_len", "samples", "relayed")


def reserve_steps(ranks: Ranks, builders: Sequence[StepBuilder], most: int) -> Int32Array | None:
    """Return the steps of each decode row, int32[n], rank by rank, in which at most `most` tokens
    are generated; None for one step.

    A plan has several steps if it has only decode rows, none of them with a grammar or with a
    hidden state to return, and no request waits. A row's tokens after the first count like drafts:
    they are certain once the result is read. No row gets a step after its last permitted token.
    Rather than retract a request, all rows take one step if a rank lacks pages for more.
    """
    if any(builder.chunks for builder in builders):
        return None
    running, tables = ranks.running, ranks.tables
    rows, bounds = ranks.join([builder.decode_rows for builder in builders])
    if (running.has_grammar[rows] | running.returns_hidden[rows]).any():
        return None
    unread = running.unread_drafts[rows]
    num_steps = np.minimum(running.max_len[rows] - running.planned_len[rows] - unread, most)
    if num_steps.max() == 1:
        return None
    ends = tables.kv_committed_len[rows] + unread + num_steps
    return num_steps if all(grow_rows(tables, ranks.memories, rows, ends, bounds)) else None


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
            _trim_to_shape(builder, ranks.step_token_shapes)
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
    columns = [rows[name] for name in _COLUMNS]
    plans = tuple(
        _rank_plan(ranks, builder, rows[first:end], [each[first:end] for each in columns], share)
        for builder, (first, end), share in zip(
            builders, pairwise(bounds.tolist()), shares.tolist(), strict=True
        )
    )
    if num_steps is not None:
        all_steps, parts = 1 + rows["num_ahead"], pairwise(bounds.tolist())
        plans = tuple(
            each._replace(num_steps=all_steps[first:end])
            for each, (first, end) in zip(plans, parts, strict=True)
        )
    saved = [move for tier in ranks.host_tiers for move in tier.take_saved()]
    plan = StepPlan(
        step_id,
        plans,
        pages,
        bool(np.count_nonzero(shares["is_masked"])),
        tuple(saved),
        has_steps=num_steps is not None,
    )
    commit_rows(tables, ranks.memories, rows["row"], rows["kv_end"])
    for builder in builders:
        if builder.chunks:
            builder.rank.prompts.offer(list(builder.chunks))
    return plan, InFlightRows(rows, bounds)


def _trim_to_shape(builder: StepBuilder, shapes: Sequence[int]) -> None:
    """Leave a few prefill tokens to the next step if that fills this step's shape exactly.

    A step is padded to the next larger shape. With shapes of 128 and 512, a step of 135 tokens
    would waste 377; instead it takes 128, and the next step the rest. Nothing is left if it would
    delay more tokens than it takes, or more than the padding that it saves.
    """
    num_prefill = sum(builder.chunks.values())
    total = len(builder.decode_rows) + int(builder.num_drafts.sum()) + num_prefill
    index = bisect_left(shapes, total)
    if index == len(shapes):
        return
    excess, num_padded = total - (shapes[index - 1] if index else 0), shapes[index] - total
    if num_padded == 0 or 2 * excess > num_prefill or excess >= num_padded:
        return
    while excess:
        row, count = builder.chunks.popitem()
        if count > excess:
            builder.chunks[row] = count - excess
        excess -= min(count, excess)


def _rank_plan(
    ranks: Ranks, builder: StepBuilder, rows: Records, columns: Sequence[Any], share: Any
) -> RankPlan:
    """Return the plan of a rank's `rows`, LAUNCHED[n], before any commit. `columns` are their
    `_COLUMNS`, and `share` has the fields of the rank's SHARE."""
    own_rows, kv_starts, q_lens, samples, relayed = columns
    num_decode, longest, num_scored, top_logprobs_num, _, returns_hidden, returns_experts = share
    num_pages = -(-(longest + ranks.lookahead_slots) // ranks.page_size)
    num_pages = min(num_pages, ranks.pages_per_row)
    admissions: tuple[RowAdmission, ...] = ()
    if unsent := builder.rank.unsent_admissions:
        admissions = tuple(unsent.values())
        unsent.clear()
    # By position, in half the time.
    plan = RankPlan(
        own_rows, kv_starts, q_lens, samples, num_pages, num_decode, relayed, admissions
    )
    if builder.rank.images.unsent:
        plan = plan._replace(encodings=builder.rank.images.take_encodings())
    if num_scored > 0 or top_logprobs_num >= 0:
        plan = plan._replace(
            num_scored=rows["num_scored"] if num_scored else None,
            return_logprob=top_logprobs_num >= 0,
            top_logprobs_num=max(top_logprobs_num, 0),
            num_logprob_ids=int(ranks.running.num_logprob_ids[rows["row"]].max()),
        )
    if returns_hidden or returns_experts:
        plan = plan._replace(returns_hidden=returns_hidden, returns_experts=returns_experts)
    if ranks.has_states or builder.drafts is not None:
        states = plan_states(builder, rows) if ranks.has_states else None
        plan = plan._replace(states=states, drafts=builder.drafts)
    return plan
