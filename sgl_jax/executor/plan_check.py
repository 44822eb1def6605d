"""Reject plans that the compiled programs do not support, before any state changes.

The device checks nothing: an out-of-range index would be clamped, or write elsewhere.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from sgl_jax.core.compiled import compiled
from sgl_jax.core.engine_sizes import EngineSizes
from sgl_jax.core.page_tables import PageChanges
from sgl_jax.core.step_plan import (
    NO_SLOT,
    BoolArray,
    ImageEncoding,
    Int32Array,
    RankPlan,
    RowAdmission,
    StatePlan,
    StepPlan,
)


def check_plan(plan: StepPlan, sizes: EngineSizes) -> None:
    """Raise ValueError, naming rank and limit, if `plan` exceeds `sizes`.

    `kv_starts` is a lower bound for relayed rows, so `num_pages` is checked only against this
    bound: the scheduler reserves for the upper bound.
    """
    if len(plan.ranks) != sizes.dp_size:
        raise ValueError(f"the plan has {len(plan.ranks)} ranks, the engine {sizes.dp_size}")
    for index, rank in enumerate(plan.ranks):
        problem = _admission_problem(rank.admissions, sizes) if rank.admissions else None
        if rank.encodings and not problem:
            problem = _encoding_problem(rank.encodings, sizes)
        if len(rank.rows) and not problem:
            problem = _row_problem(rank, sizes)
        if problem:
            raise ValueError(f"step {plan.step_id}, rank {index}: {problem}")
    if plan.has_steps and plan.is_masked:
        raise ValueError(f"step {plan.step_id}: a masked plan has one step")
    if not plan.is_masked and any(rank.returns_hidden for rank in plan.ranks):
        raise ValueError(f"step {plan.step_id}: only a masked plan returns hidden states")
    if any((rank.num_steps is None) == plan.has_steps for rank in plan.ranks):
        raise ValueError(f"step {plan.step_id}: either all ranks have several steps, or none has")
    if len(plan.page_changes.cells) or len(plan.page_changes.pages):
        problem = _page_problem(plan.page_changes, sizes)
        if problem:
            raise ValueError(f"step {plan.step_id}: {problem}")


def _admission_problem(admissions: Sequence[RowAdmission], sizes: EngineSizes) -> str | None:
    for admission in admissions:
        if not 0 < admission.row < sizes.num_rows:
            return f"admits row {admission.row}, allowed are 1 to {sizes.num_rows - 1}"
        num_tokens = admission.start + len(admission.tokens)
        if admission.start < 0:
            return f"admits tokens to row {admission.row} from position {admission.start} on"
        if num_tokens > sizes.max_context_len:
            return (
                f"admits {num_tokens} tokens to row {admission.row}, at most "
                f"{sizes.max_context_len} fit"
            )
        if len(admission.images) > sizes.max_images:
            return f"admits {len(admission.images)} images, at most {sizes.max_images} fit in a row"
    return None


def _encoding_problem(encodings: Sequence[ImageEncoding], sizes: EngineSizes) -> str | None:
    for image in encodings:
        num_tokens, side = len(image.slots), sizes.image_token_side
        if num_tokens > sizes.max_image_tokens:
            return f"an image of {num_tokens} tokens, at most {sizes.max_image_tokens} fit"
        if num_tokens * side**2 != image.height * image.width or image.width % side:
            return f"an image of {image.height} x {image.width} pixels with {num_tokens} tokens"
        if len(image.pixels) != num_tokens * sizes.image_token_values:
            return f"an image of {num_tokens} tokens with {len(image.pixels)} bytes"
        if image.slots.min() < 0 or image.slots.max() >= sizes.image_slots:
            return f"an image in rows {image.slots}, the table has {sizes.image_slots}"
    return None


def _row_problem(rank: RankPlan, sizes: EngineSizes) -> str | None:
    n, num_decode = len(rank.rows), rank.num_decode
    if n > sizes.num_rows - 1:
        return f"{n} rows, at most {sizes.num_rows - 1} run"
    least, most, end, num_tokens, most_of_decode, is_chunk_relayed = _extremes(
        rank.rows, rank.kv_starts, rank.q_lens, rank.relayed, num_decode
    )
    if least[0] < 1 or most >= sizes.num_rows:
        return f"rows {rank.rows} go outside 1 to {sizes.num_rows - 1}"
    if least[1] < 0 or least[2] < 1:
        return f"kv_starts {rank.kv_starts} or q_lens {rank.q_lens} are too small"
    if num_tokens > sizes.max_step_tokens:
        return f"{num_tokens} query tokens, at most {sizes.max_step_tokens} fit in a step"
    if not 0 <= num_decode <= n or is_chunk_relayed:
        return f"num_decode {num_decode} does not match {n} rows or relayed {rank.relayed}"
    num_drafts = sizes.max_draft_tokens
    if most_of_decode > 1 + num_drafts:
        return f"{most_of_decode - 1} drafts of a row, at most {num_drafts} fit"
    if rank.drafts is not None:
        if rank.drafts.shape != (num_decode, num_drafts):
            return f"drafts are of shape {rank.drafts.shape}, not {(num_decode, num_drafts)}"
        if (rank.drafts >= sizes.vocab_size).any():
            return f"token {rank.drafts.max()} is drafted, the vocabulary has {sizes.vocab_size}"
    if rank.num_steps is not None:
        problem = _steps_problem(rank, rank.num_steps, sizes)
        if problem:
            return problem
        end = int((rank.kv_starts + rank.num_steps).max())
    if rank.num_scored is not None:
        problem = _score_problem(rank, rank.num_scored, sizes)
        if problem:
            return problem
    if end > sizes.max_context_len:
        return f"a row reaches {end} tokens, at most {sizes.max_context_len} fit"
    needed, most_pages = -(-end // sizes.page_size), -(-sizes.max_context_len // sizes.page_size)
    if not needed <= rank.num_pages <= most_pages:
        return f"num_pages {rank.num_pages}: rows of {needed} to {most_pages} pages are allowed"
    if (rank.states is None) == sizes.groups[-1].is_recurrent:
        return "a plan has states if, and only if, the model has recurrent layers"
    return None if rank.states is None else _state_problem(rank.states, n, sizes)


def _steps_problem(rank: RankPlan, num_steps: Int32Array, sizes: EngineSizes) -> str | None:
    if len(num_steps) != len(rank.rows):
        return f"{len(num_steps)} numbers of steps for {len(rank.rows)} rows"
    if num_steps.min() < 1 or num_steps.max() > sizes.max_decode_steps:
        return f"steps {num_steps} go outside 1 to {sizes.max_decode_steps}"
    if rank.num_decode < len(rank.rows) or (rank.q_lens > 1).any() or not rank.samples.all():
        return "a plan of several steps has only decode rows without drafts"
    return None


@compiled("(int32[:], int32[:], int32[:], boolean[:], int64)")
def _extremes(
    rows: Int32Array, kv_starts: Int32Array, q_lens: Int32Array, relayed: BoolArray, num_decode: int
) -> tuple[Any, ...]:
    """Compute extremes over one or more rows.

    Returns (minimum row, start and length), maximum row, maximum end, sum of lengths, maximum
    length of a decode row, and whether a chunk's row is relayed.
    """
    assert len(rows) == len(kv_starts) == len(q_lens) == len(relayed)
    least_row, least_start, least_len = rows[0], kv_starts[0], q_lens[0]
    most_row = end = num_tokens = most_of_decode = 0
    is_chunk_relayed = False
    for i in range(len(rows)):
        least_row, most_row = min(least_row, rows[i]), max(most_row, rows[i])
        least_start, least_len = min(least_start, kv_starts[i]), min(least_len, q_lens[i])
        end = max(end, kv_starts[i] + q_lens[i])
        num_tokens += q_lens[i]
        if i < num_decode:
            most_of_decode = max(most_of_decode, q_lens[i])
        elif relayed[i]:
            is_chunk_relayed = True
    least = least_row, least_start, least_len
    return least, most_row, end, num_tokens, most_of_decode, is_chunk_relayed


def _score_problem(rank: RankPlan, scored: Int32Array, sizes: EngineSizes) -> str | None:
    if scored.shape != rank.q_lens.shape or ((scored < 0) | (scored > rank.q_lens)).any():
        return f"num_scored {scored} does not match q_lens {rank.q_lens}"
    if scored[: rank.num_decode].any():
        return f"num_scored {scored} of {rank.num_decode} decode rows, which have no prompt left"
    most = sizes.max_prompt_logprob_tokens
    if scored.sum() > most:
        return f"{scored.sum()} prompt tokens are scored, at most {most} are in a step"
    return None


def _state_problem(states: StatePlan, num_rows: int, sizes: EngineSizes) -> str | None:
    sources, halves, snapshots = states
    if sources.shape != (num_rows,) or halves.shape != (num_rows,):
        return f"{len(sources)} sources and {len(halves)} halves of states for {num_rows} rows"
    if sources.min() < NO_SLOT or sources.max() >= sizes.num_state_slots:
        return f"states are read from {sources}, there are {sizes.num_state_slots} slots"
    if ((halves < 0) | (halves > 1)).any():
        return f"states are written to halves {halves}, which are 0 or 1"
    if len(snapshots) > sizes.max_step_snapshots:
        return f"{len(snapshots)} snapshots, at most {sizes.max_step_snapshots} are in a step"
    rows, lengths, slots = snapshots.T
    if ((rows < 0) | (rows >= len(sources)) | (slots < 1) | (slots >= sizes.num_snapshots)).any():
        return f"snapshots of rows {rows} in slots {slots}, of {sizes.num_snapshots}"
    return f"snapshots after {lengths} tokens" if (lengths < 1).any() else None


def _page_problem(changes: PageChanges, sizes: EngineSizes) -> str | None:
    cells, pages = changes
    if len(cells) != len(pages):
        return f"{len(pages)} pages for {len(cells)} cells of the page tables"
    pages_per_row = -(-sizes.max_context_len // sizes.page_size)
    num_cells = sizes.dp_size * sizes.num_rows * len(sizes.groups) * pages_per_row
    num_pages = np.array([sizes.pool_pages[group.pool] for group in sizes.groups])  # per group
    if cells.min() < 0 or cells.max() >= num_cells:
        return f"page tables of {num_cells} cells are changed at {cells.min()} to {cells.max()}"
    most = num_pages[cells // pages_per_row % len(num_pages)]
    is_wrong = (pages < 0) | (pages >= most)
    if is_wrong.any():
        return f"a row is to list pages outside 0 to {most[is_wrong.argmax()] - 1}"
    return None
