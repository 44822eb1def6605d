"""The plans of a step, made of the rows that were chosen for it, for all ranks at once.

With them the step counts as launched: lengths are committed, and what its prefill chunks write may
be published. So a step that is built must be launched.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from sgl_jax.core.step_plan import BoolArray, Int32Array, RankPlan, RowIndex, StepPlan
from sgl_jax.mem_cache.rank_memory import commit_rows
from sgl_jax.scheduler.ranks import Ranks, reduced_of_each
from sgl_jax.scheduler.running_rows import NOT_SCORED
from sgl_jax.scheduler.step_builder import StepBuilder


class LaunchedRows(NamedTuple):
    """What is kept of a step until its result is read: columns of its rows, rank by rank."""

    rows: RowIndex  # joint rows
    bounds: list[int]  # of each rank's part
    epochs: Int32Array  # of the leases that the rows were
    samples: BoolArray


def build_plan(
    ranks: Ranks, builders: Sequence[StepBuilder], step_id: int
) -> tuple[StepPlan, LaunchedRows]:
    """The plan, of each rank's builder. Lengths are committed, prefill chunks published."""
    for builder in builders:
        builder.trim_to_shape()
    step = _JointStep.of(ranks, builders)
    # Before chunks are published: that may give a row pages of the tree for its own, which the
    # step still writes.
    plan = StepPlan(step_id, _plans(ranks, builders, step), ranks.tables.page_log.take())
    _commit(ranks, step)
    for builder in builders:
        if builder.chunk_rows:
            builder.rank.offer_chunks(builder.chunk_rows)
        if not builder.retracted:
            builder.rank.reserve.after_step()
    return plan, LaunchedRows(step.rows, step.bounds, ranks.tables.epoch[step.rows], step.samples)


class _JointStep(NamedTuple):
    """The rows of a step on all ranks, as columns of n rows, rank by rank."""

    rows: RowIndex  # joint rows
    own_rows: Int32Array  # of their ranks
    bounds: list[int]  # of each rank's part
    kv_starts: Int32Array
    num_tokens: Int32Array  # without drafts: of these it is not known what becomes of them
    ends: Int32Array  # where these end
    samples: BoolArray
    unread: Int32Array  # drafts of steps before this one
    num_drafts: Int32Array

    @classmethod
    def of(cls, ranks: Ranks, builders: Sequence[StepBuilder]) -> "_JointStep":
        own_rows = [builder.rows() for builder in builders]
        rows, bounds = ranks.join(own_rows)
        num_tokens = np.ones(len(rows), np.int32)
        num_drafts = np.zeros(len(rows), np.int32)
        for builder, first, end in zip(builders, bounds[:-1], bounds[1:], strict=True):
            first_chunk = first + len(builder.decode_rows)
            if ranks.max_draft_tokens:
                num_drafts[first:first_chunk] = builder.num_drafts
            if builder.chunk_lens:
                num_tokens[first_chunk:end] = builder.chunk_lens
        kv_starts = ranks.tables.kv_committed_len[rows]
        ends = kv_starts + num_tokens
        return cls(
            rows=rows,
            own_rows=np.concatenate(own_rows, dtype=np.int32),
            bounds=bounds,
            kv_starts=kv_starts,
            num_tokens=num_tokens,
            ends=ends,
            samples=ends == ranks.running.planned_len[rows],
            unread=ranks.running.unread_drafts[rows],
            num_drafts=num_drafts,
        )

    @property
    def parts(self) -> list[slice]:
        """Where each rank's rows lie."""
        return [slice(first, end) for first, end in pairwise(self.bounds)]


def _plans(ranks: Ranks, builders: Sequence[StepBuilder], step: _JointStep) -> tuple[RankPlan, ...]:
    """The plans, before anything is committed. Their arrays are copies, or views of copies."""
    q_lens = step.num_tokens + step.num_drafts
    relayed = step.unread > 0
    num_pages = _num_pages(ranks, step)
    num_scored = _num_scored(ranks, step)
    top_logprobs_nums = _top_logprobs_nums(ranks, step)
    return tuple(
        RankPlan(
            rows=step.own_rows[part],
            kv_starts=step.kv_starts[part],
            q_lens=q_lens[part],
            samples=step.samples[part],
            num_pages=num_pages[k],
            num_decode=len(builder.decode_rows),
            relayed=relayed[part],
            admissions=builder.rank.take_admissions(),
            num_scored=num_scored[k],
            return_logprob=top_logprobs_nums[k] is not None,
            top_logprobs_num=top_logprobs_nums[k] or 0,
            num_logprob_ids=_num_logprob_ids(
                ranks, step.rows[part], num_scored[k], top_logprobs_nums[k]
            ),
        )
        for k, (builder, part) in enumerate(zip(builders, step.parts, strict=True))
    )


def _num_pages(ranks: Ranks, step: _JointStep) -> list[int]:
    """For each rank, as many pages as the longest of its rows may need."""
    lens = step.ends + step.unread + step.num_drafts
    longest = reduced_of_each(np.maximum, lens, step.bounds)
    return [-(-(length or 0) // ranks.page_size) for length in longest]


def _num_scored(ranks: Ranks, step: _JointStep) -> list[Int32Array | None]:
    """For each rank, how many of each row's last queries are scored; None if no row's are."""
    first = ranks.running.score_start[step.rows]
    if not np.count_nonzero(first < step.ends):
        return [None] * len(step.parts)
    counts = np.maximum(step.ends - np.maximum(step.kv_starts, first), 0)
    return [counts[part] if counts[part].any() else None for part in step.parts]


def _top_logprobs_nums(ranks: Ranks, step: _JointStep) -> list[int | None]:
    """For each rank, the most alternatives that a sampling row reports; None if none reports."""
    running = ranks.running
    reports = step.samples & running.return_logprob[step.rows]
    if not np.count_nonzero(reports):
        return [None] * len(step.parts)
    counts = np.where(reports, running.top_logprobs_num[step.rows] + 1, 0)
    most = reduced_of_each(np.maximum, counts, step.bounds)
    return [count - 1 if count else None for count in most]


def _num_logprob_ids(
    ranks: Ranks, rows: RowIndex, num_scored: Int32Array | None, top_logprobs_num: int | None
) -> int:
    """The most tokens that one of a rank's rows has named; 0 if no row reports anything."""
    if num_scored is None and top_logprobs_num is None:
        return 0
    return int(ranks.running.num_logprob_ids[rows].max())


def _commit(ranks: Ranks, step: _JointStep) -> None:
    """From here on the step counts as launched."""
    running = ranks.running
    commit_rows(ranks.tables, ranks.memories, step.rows, step.ends)
    if np.count_nonzero(step.num_drafts):
        running.unread_drafts[step.rows] = step.unread + step.num_drafts
    sampled = step.rows[step.samples]
    running.planned_len[sampled] = step.ends[step.samples] + 1
    running.score_start[sampled] = NOT_SCORED
