"""Updates rows' states and snapshots between steps; `state_plan.py` chooses the new snapshots."""

import numpy as np

from sgl_jax.core.step_plan import Int32Array, RowIndex, StepPlan
from sgl_jax.mem_cache.pages.req_to_token_pool import NO_STATE
from sgl_jax.mem_cache.release import publish_prefix
from sgl_jax.mem_cache.row_states import free_passed_snapshots
from sgl_jax.scheduler.in_flight_rows import Records
from sgl_jax.scheduler.ranks import Ranks


def keep_up_with_rows(ranks: Ranks, rows: RowIndex, lens: Int32Array) -> None:
    """Publish rows that crossed a snapshot interval; release superseded snapshots. `lens`,
    int32[n], are lengths of the joint `rows` that no result can reduce any more."""
    sizes = ranks.memories[0].sizes
    interval, tables = sizes.snapshot_interval, ranks.tables
    protected = tables.cache_protected_len[rows]
    is_past = lens // interval > protected // interval
    for joint_row in rows[is_past].tolist():
        rank, row = ranks.locate(joint_row)
        if not rank.running.request(row).kept_len:
            publish_prefix(rank.memory, rank.memory.leases[row], rank.running.known_tokens(row))
    # A row takes a new snapshot at each multiple of the tail interval.
    has_crossed = lens % sizes.tail_interval < 1 + sizes.max_draft_tokens
    crossed = zip(rows[has_crossed].tolist(), lens[has_crossed].tolist(), strict=True)
    for joint_row, length in crossed:
        rank, row = ranks.locate(joint_row)
        free_passed_snapshots(rank.memory, row, length)


def record_starts(ranks: Ranks, plan: StepPlan, launched: Records, tokens: Int32Array) -> None:
    """Record the positions from which the next step continued, after reading a step's result.

    Args:
        ranks: all ranks.
        plan: the plan of the step with the result.
        launched: LAUNCHED[n], the rows of that step, with their gained tokens.
        tokens: int32[n, w], the tokens of `RankResult`, padded with negative values. On the device,
            a row that ended continues from all of them, including its overshoot.
    """
    states = [rank_plan.states for rank_plan in plan.ranks]
    halves = np.concatenate([each.halves for each in states if each is not None])
    index = launched["num_gained"].nonzero()[0]
    gained, others = launched["row"][index], 1 - halves[index]  # written by the next step
    overshoot = (tokens[index] >= 0).sum(axis=1) - launched["num_gained"][index]
    lens = ranks.running.known_len[gained] + overshoot.astype(np.int32)
    # The next step began with the last token.
    tables = ranks.tables
    has_followed = tables.kv_committed_len[gained] >= lens
    unknown = has_followed & (tables.state_lens[others, gained] == NO_STATE)
    tables.state_lens[others[unknown], gained[unknown]] = lens[unknown]
