"""Builds the plans of a step from its chosen rows, for all ranks at once.

The step then counts as launched: lengths are committed, and its prefill chunks may be published. So
a built step must be launched.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise, starmap
from typing import Any

import numpy as np

from sgl_jax.core.step_plan import Int32Array, RankPlan, RowIndex, StepPlan
from sgl_jax.mem_cache.row_growth import commit_rows, grow_rows
from sgl_jax.scheduler.in_flight_rows import SHARE, InFlightRows, Records, launch
from sgl_jax.scheduler.ranks import Ranks
from sgl_jax.scheduler.state_plan import plan_states
from sgl_jax.scheduler.step_builder import StepBuilder
from sgl_jax.scheduler.step_builders import StepBuilders

_NONE_AHEAD = np.zeros(0, np.int32)


def _reserve_steps(
    ranks: Ranks, decode_rows: RowIndex, num_decode: Sequence[int], most: int
) -> Int32Array | None:
    """Return the steps of each of `decode_rows`, int32[n], `num_decode[k]` of rank k, in which at
    most `most` tokens are generated; None for one step.

    A plan has several steps if it has only decode rows, none of them with a grammar or with a
    hidden state to return, and no request waits. A row's tokens after the first count like drafts:
    they are certain once the result is read. No row gets a step after its last permitted token.
    Rather than retract a request, all rows take one step if a rank lacks pages for more.
    """
    running, tables = ranks.running, ranks.tables
    bounds = np.array([0, *accumulate(num_decode)])
    rows = decode_rows + np.repeat(np.arange(len(num_decode)) * ranks.num_rows, num_decode)
    if (running.has_grammar[rows] | running.returns_hidden[rows]).any():
        return None
    unread = running.unread_drafts[rows]
    num_steps = np.minimum(running.max_len[rows] - running.planned_len[rows] - unread, most)
    if num_steps.max() == 1:
        return None
    ends = tables.kv_committed_len[rows] + unread + num_steps
    return num_steps if grow_rows(tables, ranks.memories, rows, ends, bounds).all() else None


def build_plan(
    ranks: Ranks, builders: StepBuilders, step_id: int, most_steps: int
) -> tuple[StepPlan, InFlightRows] | None:
    """Build the plan from the ranks' builders; None if it has no rows. Commits lengths and
    publishes prefill chunks. If most_steps > 1, decode rows may take several steps."""
    prefilling = [builder for builder in builders.made() if builder.chunks]
    decode_rows, num_decode = builders.decode_rows()
    if not (prefilling or len(decode_rows)):
        return None
    num_rows, num_steps, num_ahead = list(num_decode), None, _NONE_AHEAD
    for builder in prefilling:
        _trim_to_shape(builder, ranks.step_token_shapes)
        num_rows[builder.rank.dp_rank] += len(builder.chunks)
    chunks = [chunk for builder in prefilling for chunk in builder.chunks.items()]
    running, tables = ranks.running, ranks.tables
    bounds = [0, *accumulate(num_rows)]
    shares = np.zeros(len(ranks.ranks), SHARE)
    shares["num_decode"] = num_decode
    if most_steps > 1 and not prefilling:
        num_steps = _reserve_steps(ranks, decode_rows, num_decode, most_steps)
    if num_steps is not None:
        num_ahead = num_steps - np.int32(1)
    elif ranks.max_draft_tokens:
        num_ahead = np.concatenate([builder.num_drafts for builder in builders])
    rows = launch(
        np.array(bounds),
        decode_rows,
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
    plans = _rank_plans(ranks, builders, rows, bounds, shares)
    if num_steps is not None:
        all_steps, parts = 1 + rows["num_ahead"], pairwise(bounds)
        plans = [
            each._replace(num_steps=all_steps[first:end])
            for each, (first, end) in zip(plans, parts, strict=True)
        ]
    saved = [move for tier in ranks.host_tiers for move in tier.take_saved()]
    plan = StepPlan(
        step_id,
        tuple(plans),
        pages,
        bool(np.count_nonzero(shares["is_masked"])),
        tuple(saved),
        has_steps=num_steps is not None,
    )
    commit_rows(tables, ranks.memories, rows["row"], rows["kv_end"])
    for builder in prefilling:
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
    chunks = dict(builder.chunks)
    while excess:
        row, count = chunks.popitem()
        if count > excess:
            if builder.whole_len(row, count - excess) < count - excess:
                return
            chunks[row] = count - excess
        excess -= min(count, excess)
    builder.chunks = chunks


def _rank_plans(
    ranks: Ranks, builders: StepBuilders, rows: Records, bounds: Sequence[int], shares: Records
) -> list[RankPlan]:
    """Return each rank's plan before any commit, from its part of `rows` and its SHARE."""
    parts = list(starmap(slice, pairwise(bounds)))
    columns = (rows[name] for name in ("own_row", "kv_start", "q_len", "samples", "relayed"))
    own_rows, kv_starts, q_lens, samples, relayed = ([own[p] for p in parts] for own in columns)
    num_pages = -(-(shares["longest"] + ranks.lookahead_slots) // ranks.page_size)
    num_pages = np.minimum(num_pages, ranks.pages_per_row)
    admissions = [tuple(rank.unsent_admissions.values()) for rank in ranks.ranks]
    for rank in ranks.ranks:
        rank.unsent_admissions.clear()
    # By position, in half the time.
    plans = list(
        map(
            RankPlan,
            own_rows,
            kv_starts,
            q_lens,
            samples,
            num_pages.tolist(),
            shares["num_decode"].tolist(),
            relayed,
            admissions,
        )
    )
    reports = (shares["num_scored"] > 0) | (shares["top_logprobs_num"] >= 0)
    reports |= shares["returns_hidden"] | (shares["token_values"] > 0)
    for k in reports.nonzero()[0].tolist():
        plans[k] = _add_reports(plans[k], ranks, rows[parts[k]], shares[k])
    if ranks.has_states or ranks.max_draft_tokens:
        for k, builder in enumerate(builders):
            states = plan_states(builder, rows[parts[k]]) if ranks.has_states else None
            plans[k] = plans[k]._replace(states=states, drafts=builder.drafts)
    if ranks.has_images:
        for k, rank in enumerate(ranks.ranks):
            plans[k] = plans[k]._replace(encodings=rank.images.take_encodings())
    return plans


def _add_reports(plan: RankPlan, ranks: Ranks, rows: Records, share: Any) -> RankPlan:
    """Add to a plan what its `rows`, LAUNCHED[n], report in addition to tokens."""
    plan = plan._replace(
        returns_hidden=bool(share["returns_hidden"]), token_values=int(share["token_values"])
    )
    num_scored, top_logprobs_num = int(share["num_scored"]), int(share["top_logprobs_num"])
    if num_scored == 0 and top_logprobs_num < 0:
        return plan
    return plan._replace(
        num_scored=rows["num_scored"] if num_scored else None,
        return_logprob=top_logprobs_num >= 0,
        top_logprobs_num=max(top_logprobs_num, 0),
        num_logprob_ids=int(ranks.running.num_logprob_ids[rows["row"]].max()),
    )
