"""Refusing plans that the compiled programs were not made for, before anything is touched.

The device itself checks nothing: an index out of range would be clamped, or write elsewhere.
"""

import numpy as np

from sgl_jax.core.engine_sizes import EngineSizes
from sgl_jax.core.page_tables import PageChanges
from sgl_jax.core.step_plan import NO_SLOT, RankPlan, StepPlan


def check_plan(plan: StepPlan, sizes: EngineSizes) -> None:
    """Raise ValueError, naming rank and limit, if `plan` exceeds `sizes`.

    `kv_starts` is a lower bound for relayed rows, so `num_pages` is checked against it alone: the
    scheduler reserves for the upper bound.
    """
    if len(plan.ranks) != sizes.dp_size:
        raise ValueError(f"the plan has {len(plan.ranks)} ranks, the engine {sizes.dp_size}")
    for index, rank in enumerate(plan.ranks):
        problem = _problem(rank, sizes)
        if problem:
            raise ValueError(f"step {plan.step_id}, rank {index}: {problem}")
    problem = _page_problem(plan.page_changes, sizes)
    if problem:
        raise ValueError(f"step {plan.step_id}: {problem}")


def _problem(rank: RankPlan, sizes: EngineSizes) -> str | None:
    for admission in rank.admissions:
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
    n = len(rank.rows)
    if n == 0:
        return None
    if n > sizes.num_rows - 1:
        return f"{n} rows, at most {sizes.num_rows - 1} run"
    # All rows at once: a call for each limit would cost a step more than its page tables.
    columns = np.array((rank.rows, rank.kv_starts, rank.q_lens, rank.kv_starts + rank.q_lens))
    least_row, least_start, least_len, _ = columns.min(axis=1).tolist()
    most_row, _, most_len, most_end = columns.max(axis=1).tolist()
    if least_row < 1 or most_row >= sizes.num_rows:
        return f"rows {rank.rows} go outside 1 to {sizes.num_rows - 1}"
    if least_start < 0 or least_len < 1:
        return f"kv_starts {rank.kv_starts} or q_lens {rank.q_lens} are too small"
    if rank.num_tokens > sizes.max_step_tokens:
        return f"{rank.num_tokens} query tokens, at most {sizes.max_step_tokens} fit in a step"
    if not 0 <= rank.num_decode <= n or rank.relayed[rank.num_decode :].any():
        return f"num_decode {rank.num_decode} does not match {n} rows or relayed {rank.relayed}"
    num_drafts = sizes.max_draft_tokens
    if most_len > 1 + num_drafts and (rank.q_lens[: rank.num_decode] > 1 + num_drafts).any():
        return f"{rank.num_drafts.max()} drafts of a row, at most {num_drafts} fit"
    if rank.drafts is not None and rank.drafts.shape != (rank.num_decode, num_drafts):
        return f"drafts are of shape {rank.drafts.shape}, not {(rank.num_decode, num_drafts)}"
    if rank.drafts is not None and (rank.drafts >= sizes.vocab_size).any():
        return f"token {rank.drafts.max()} is drafted, the vocabulary has {sizes.vocab_size}"
    return (
        _score_problem(rank, sizes)
        or _length_problem(rank, most_end, sizes)
        or _state_problem(rank, sizes)
    )


def _score_problem(rank: RankPlan, sizes: EngineSizes) -> str | None:
    scored = rank.num_scored
    if scored is None:
        return None
    if scored.shape != rank.q_lens.shape or ((scored < 0) | (scored > rank.q_lens)).any():
        return f"num_scored {scored} does not match q_lens {rank.q_lens}"
    if scored[: rank.num_decode].any():
        return f"num_scored {scored} of {rank.num_decode} decode rows, which have no prompt left"
    most = sizes.max_prompt_logprob_tokens
    if scored.sum() > most:
        return f"{scored.sum()} prompt tokens are scored, at most {most} are in a step"
    return None


def _length_problem(rank: RankPlan, end: int, sizes: EngineSizes) -> str | None:
    if end > sizes.max_context_len:
        return f"a row reaches {end} tokens, at most {sizes.max_context_len} fit"
    needed = -(-end // sizes.page_size)
    if not needed <= rank.num_pages <= sizes.pages_per_row:
        allowed = f"{needed} to {sizes.pages_per_row} pages are allowed"
        return f"num_pages {rank.num_pages}: rows of {allowed}"
    return None


def _state_problem(rank: RankPlan, sizes: EngineSizes) -> str | None:
    if (rank.states is None) != (sizes.state_group is None):
        return "a plan has states if, and only if, the model has recurrent layers"
    if rank.states is None:
        return None
    sources, halves, snapshots = rank.states
    if sources.shape != rank.rows.shape or halves.shape != rank.rows.shape:
        return (
            f"{len(sources)} sources and {len(halves)} halves of states for {len(rank.rows)} rows"
        )
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
    if len(cells) == 0:
        return None
    num_groups = len(sizes.groups)
    num_cells = sizes.dp_size * sizes.num_rows * num_groups * sizes.pages_per_row
    if cells.min() < 0 or cells.max() >= num_cells:
        return f"page tables of {num_cells} cells are changed at {cells.min()} to {cells.max()}"
    pool_pages = np.array([sizes.pool_pages[group.pool] for group in sizes.groups])
    num_pages = pool_pages[cells // sizes.pages_per_row % num_groups]
    if ((pages < 0) | (pages >= num_pages)).any():
        return f"a row is to list pages outside 0 to {num_pages[0] - 1}"
    return None
