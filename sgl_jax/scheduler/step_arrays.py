"""Builds the plans of a step from its chosen rows, for all ranks at once.

The step then counts as launched: lengths are committed, and its prefill chunks may be published. So
a built step must be launched.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from sgl_jax.core.compiled import compiled
from sgl_jax.core.step_plan import (
    BoolArray,
    Int32Array,
    IntpArray,
    RankPlan,
    RowIndex,
    StatePlan,
    StepPlan,
)
from sgl_jax.mem_cache.pages.row_growth import commit_rows
from sgl_jax.scheduler.ranks import Ranks
from sgl_jax.scheduler.running_rows import NOT_SCORED
from sgl_jax.scheduler.state_plan import plan_states
from sgl_jax.scheduler.step_builder import StepBuilder

_NO_DRAFTS = np.zeros(0, np.int32)


class LaunchedRows(NamedTuple):
    """Records of a step until its result is read: columns of its rows, rank by rank."""

    rows: RowIndex  # joint rows
    bounds: IntpArray  # rank k's rows are in [bounds[k], bounds[k + 1])
    epochs: Int32Array  # of the rows' leases
    samples: BoolArray


def build_plan(
    ranks: Ranks, builders: Sequence[StepBuilder], step_id: int
) -> tuple[StepPlan, LaunchedRows]:
    """Build the plan from each rank's builder. Commits lengths, publishes prefill chunks."""
    for builder in builders:
        builder.trim_to_shape()
    step = _columns(ranks, builders)
    # Before chunks are published, since publishing may replace a row's own pages by the tree's
    # while the step still writes them.
    running = ranks.running
    is_masked = bool(np.any(running.has_grammar[step.rows] & step.samples))
    pages = ranks.tables.page_log.take()
    plan = StepPlan(step_id, _plans(ranks, builders, step), pages, is_masked)
    commit_rows(ranks.tables, ranks.memories, step.rows, step.ends)
    _note_launch(
        step.rows,
        step.ends,
        step.kv_starts,
        step.q_lens,
        running.planned_len,
        running.unread_drafts,
        running.score_start,
    )
    for builder in builders:
        if builder.chunk_rows:
            builder.rank.offer_chunks(builder.chunk_rows)
    return plan, LaunchedRows(step.rows, step.bounds, step.epochs, step.samples)


class _Columns(NamedTuple):
    """The rows of a step on all ranks, as columns of n rows, rank by rank."""

    rows: RowIndex  # joint rows
    bounds: IntpArray  # of each rank's part, as `LaunchedRows.bounds`
    own_rows: Int32Array  # of their ranks
    epochs: Int32Array
    kv_starts: Int32Array
    q_lens: Int32Array
    ends: Int32Array  # without drafts, whose acceptance is still open
    samples: BoolArray
    relayed: BoolArray
    num_scored: Int32Array
    of_ranks: IntpArray  # [ranks, 3] each an `_OfRank`


class _OfRank(NamedTuple):
    longest: int  # the most tokens that a row may need
    num_scored: int  # queries in all
    top_logprobs_num: int  # the most alternatives that a row reports; -1 if none reports any


def _columns(ranks: Ranks, builders: Sequence[StepBuilder]) -> _Columns:
    """The columns of the chosen rows: copies, before any commit."""
    rows, bounds = ranks.join([builder.rows() for builder in builders])
    running, tables = ranks.running, ranks.tables
    chunk_lens = [length for builder in builders for length in builder.chunk_lens]
    if ranks.max_draft_tokens:
        num_drafts = np.concatenate([builder.num_drafts for builder in builders])
    else:
        num_drafts = _NO_DRAFTS
    columns = _gather(
        rows,
        bounds,
        np.array([len(builder.decode_rows) for builder in builders]),
        np.array(chunk_lens, np.int32),
        num_drafts,
        ranks.num_rows,
        tables.epoch,
        tables.kv_committed_len,
        running.planned_len,
        running.unread_drafts,
        running.score_start,
        running.return_logprob,
        running.top_logprobs_num,
    )
    return _Columns(rows, bounds, *columns)


@compiled(
    "(int64[::1], int64[::1], int64[::1], int32[::1], int32[::1], int64, int32[::1], int32[::1], "
    "int32[::1], int32[::1], int32[::1], boolean[::1], int32[::1])"
)
def _gather(
    rows: RowIndex,
    bounds: IntpArray,
    num_decode: IntpArray,
    chunk_lens: Int32Array,
    num_drafts: Int32Array,
    num_rows: int,
    epoch: Int32Array,
    committed_len: Int32Array,
    planned_len: Int32Array,
    unread_drafts: Int32Array,
    score_start: Int32Array,
    return_logprob: BoolArray,
    top_logprobs_num: Int32Array,
) -> tuple[Any, ...]:
    """The fields of `_Columns` from `own_rows` on.

    Args:
        rows: joint rows of the step, and `bounds` of each rank's part: first `num_decode` decode
            rows, then prefill chunks.
        chunk_lens: tokens of all chunks, rank by rank.
        num_drafts: of all decode rows, rank by rank; or empty if there are none.
        num_rows: of a rank; the following parameters are columns over the rows of all ranks.
    """
    num_ranks, count = len(bounds) - 1, len(rows)
    own_rows = np.empty(count, np.int32)
    epochs = np.empty(count, np.int32)
    kv_starts = np.empty(count, np.int32)
    q_lens = np.empty(count, np.int32)
    ends = np.empty(count, np.int32)
    samples = np.empty(count, np.bool_)
    relayed = np.empty(count, np.bool_)
    num_scored = np.empty(count, np.int32)
    of_ranks = np.zeros((num_ranks, 3), np.int64)
    of_ranks[:, 2] = -1
    assert bounds[num_ranks] == count
    assert len(num_decode) == num_ranks
    assert num_decode.sum() + len(chunk_lens) == count
    assert len(num_drafts) == 0 or len(num_drafts) == num_decode.sum()
    chunk = decode = 0
    for rank in range(num_ranks):
        for i in range(bounds[rank], bounds[rank + 1]):
            row = rows[i]
            assert 0 <= row < len(committed_len)
            num_tokens, drafts = 1, 0
            if i - bounds[rank] >= num_decode[rank]:
                num_tokens = chunk_lens[chunk]
                chunk += 1
            elif len(num_drafts):
                drafts = num_drafts[decode]
                decode += 1
            start, unread = committed_len[row], unread_drafts[row]
            end = start + num_tokens
            own_rows[i] = row - rank * num_rows
            epochs[i] = epoch[row]
            kv_starts[i] = start
            q_lens[i] = num_tokens + drafts
            ends[i] = end
            samples[i] = end == planned_len[row]
            relayed[i] = unread > 0
            num_scored[i] = max(end - max(start, score_start[row]), 0)
            of_ranks[rank, 0] = max(of_ranks[rank, 0], end + unread + drafts)
            of_ranks[rank, 1] += num_scored[i]
            if samples[i] and return_logprob[row]:
                of_ranks[rank, 2] = max(of_ranks[rank, 2], top_logprobs_num[row])
    return own_rows, epochs, kv_starts, q_lens, ends, samples, relayed, num_scored, of_ranks


@compiled("(int64[::1], int32[::1], int32[::1], int32[::1], int32[::1], int32[::1], int32[::1])")
def _note_launch(
    rows: RowIndex,
    ends: Int32Array,
    kv_starts: Int32Array,
    q_lens: Int32Array,
    planned_len: Int32Array,
    unread_drafts: Int32Array,
    score_start: Int32Array,
) -> None:
    """Count the step as launched: add its sampled tokens and unread drafts to the rows.

    The first four parameters are as in `_Columns`, the others columns over the rows of all ranks.
    """
    assert len(rows) == len(ends) == len(kv_starts) == len(q_lens)
    for i in range(len(rows)):
        row = rows[i]
        assert 0 <= row < len(planned_len)
        unread_drafts[row] += q_lens[i] - (ends[i] - kv_starts[i])
        if ends[i] == planned_len[row]:
            planned_len[row] += 1
            score_start[row] = NOT_SCORED


def _plans(ranks: Ranks, builders: Sequence[StepBuilder], step: _Columns) -> tuple[RankPlan, ...]:
    """The plans; their arrays are views of the columns."""
    bounds = step.bounds.tolist()
    plans = []
    for builder, first, end, numbers in zip(
        builders, bounds[:-1], bounds[1:], step.of_ranks.tolist(), strict=True
    ):
        of_rank, part = _OfRank(*numbers), slice(first, end)
        reports = of_rank.num_scored > 0 or of_rank.top_logprobs_num >= 0
        plans.append(
            RankPlan(
                rows=step.own_rows[part],
                kv_starts=step.kv_starts[part],
                q_lens=step.q_lens[part],
                samples=step.samples[part],
                num_pages=-(-of_rank.longest // ranks.page_size),
                num_decode=len(builder.decode_rows),
                relayed=step.relayed[part],
                admissions=builder.rank.take_admissions(),
                num_scored=step.num_scored[part] if of_rank.num_scored else None,
                return_logprob=of_rank.top_logprobs_num >= 0,
                top_logprobs_num=max(of_rank.top_logprobs_num, 0),
                num_logprob_ids=(
                    int(ranks.running.num_logprob_ids[step.rows[part]].max()) if reports else 0
                ),
                states=_states(ranks, builder, step, part) if ranks.has_states else None,
                drafts=builder.drafts,
            )
        )
    return tuple(plans)


def _states(ranks: Ranks, builder: StepBuilder, step: _Columns, part: slice) -> StatePlan:
    rows = step.own_rows[part].astype(np.intp)
    unread = ranks.running.unread_drafts[step.rows[part]]
    return plan_states(builder, rows, step.kv_starts[part], step.q_lens[part], unread)
