"""Updates rows' states and snapshots between steps; `state_plan.py` chooses the new ones."""

from sgl_jax.core.step_plan import Int32Array, RowIndex
from sgl_jax.mem_cache.pages.req_to_token_pool import NO_STATE
from sgl_jax.mem_cache.release import publish_prefix
from sgl_jax.mem_cache.row_states import let_go_snapshots
from sgl_jax.scheduler.ranks import Ranks


def keep_up_with_rows(ranks: Ranks, rows: RowIndex, lens: Int32Array) -> None:
    """Publish rows that crossed a snapshot interval; release superseded snapshots.

    `lens` are tokens that no result can take from the joint `rows` any more.
    """
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
        let_go_snapshots(rank.memory, row, length)


def record_starts(ranks: Ranks, rows: RowIndex, halves: Int32Array, lens: Int32Array) -> None:
    """Record where the next step continued, after reading the result of a step.

    Args:
        ranks: of the joint `rows`, which gained tokens.
        rows: int[n].
        halves: int32[n] written by the step. The next step wrote the others.
        lens: int32[n] tokens of the rows. The next step began with the last.
    """
    tables = ranks.tables
    has_followed = tables.kv_committed_len[rows] >= lens
    unknown = has_followed & (tables.state_lens[1 - halves, rows] == NO_STATE)
    tables.state_lens[1 - halves[unknown], rows[unknown]] = lens[unknown]
