"""Plans the states of a step: states to start from, slots to write, and snapshots.

A prompt keeps snapshots at positions where another prompt may continue: its last whole page, its
branch from the tree, and each multiple of the snapshot interval. A generating row keeps the last
snapshot at a multiple of the tail interval, and all at multiples of the snapshot interval.
Snapshots are optional: if no slot is free, none is kept.
"""

import numpy as np

from sgl_jax.core.engine_sizes import EngineSizes
from sgl_jax.core.step_plan import NO_SLOT, Int32Array, RowIndex, StatePlan
from sgl_jax.mem_cache.pages.req_to_token_pool import NO_STATE
from sgl_jax.mem_cache.row_states import has_snapshot, state_source, take_snapshot_slot
from sgl_jax.scheduler.in_flight_rows import Records
from sgl_jax.scheduler.rank_scheduler import RankScheduler
from sgl_jax.scheduler.step_builder import StepBuilder


def plan_states(builder: StepBuilder, launched: Records) -> StatePlan:
    """Plan the states of one rank's rows in a step, LAUNCHED[n]; take slots for the snapshots.
    `builder` has the rank's part of the step; decode rows come first."""
    rows = launched["own_row"].astype(np.intp)
    kv_starts, q_lens = launched["kv_start"], launched["q_len"]
    unread_drafts = launched["num_unread"]  # each row may have gained these past `kv_starts`
    rank = builder.rank
    sizes, tables = rank.memory.sizes, rank.memory.rows
    sources = np.full(len(rows), NO_SLOT, np.int32)
    halves = 1 - tables.state_half[rows]
    starting = rank.prompts.take_starting(rows)
    for index, row in starting:
        sources[index] = state_source(rank.memory, rank.memory.leases[row])
        halves[index] = 1 - _half_of(sizes, row, int(sources[index]), int(tables.state_half[row]))
    num_decode = len(builder.decode_rows)
    ends = kv_starts + q_lens
    tables.state_half[rows] = halves
    # The number of tokens before the first state that the step writes. With unread drafts, only the
    # result of the previous step determines it.
    is_decode = np.arange(len(rows)) < num_decode
    firsts = np.where(is_decode, kv_starts + 1, ends)
    tables.state_drafts[halves, rows] = np.where(is_decode, q_lens - 1, 0)
    tables.state_lens[halves, rows] = np.where(unread_drafts > 0, NO_STATE, firsts)
    wanted = []
    if rank.keeps_snapshots:
        decode = slice(num_decode)
        wanted = _decode_snapshots(
            rank, rows, kv_starts[decode], unread_drafts[decode], ends[decode]
        )
        wanted += _prompt_snapshots(builder, num_decode, kv_starts)
    kept = []
    for index, length in wanted[: sizes.max_step_snapshots]:
        slot = take_snapshot_slot(rank.memory, int(rows[index]), length)
        if slot:
            kept.append((index, length, slot))
    return StatePlan(sources, halves, np.array(kept, np.int32).reshape(-1, 3))


def _half_of(sizes: EngineSizes, row: int, slot: int, otherwise: int) -> int:
    """Return the half of `row` with `slot`; `otherwise` for a snapshot's slot."""
    first = sizes.own_slot(row, 0)
    return (slot - first) // (1 + sizes.max_draft_tokens) if slot >= first else otherwise


def _decode_snapshots(
    rank: RankScheduler,
    rows: RowIndex,
    kv_starts: Int32Array,
    unread_drafts: Int32Array,
    ends: Int32Array,
) -> list[tuple[int, int]]:
    """Return index and length of decode rows' snapshots: multiples of the tail interval up to
    `ends`.

    A row begins between `kv_starts` and `kv_starts` + `unread_drafts`. A length that a step in
    flight may cross is requested again until a crossing is certain: so each step that may cross it
    has the request, and the step that does writes the snapshot. For the same reason a slot is first
    taken for a length that no step in flight can cross.
    """
    interval = rank.memory.sizes.tail_interval
    firsts = kv_starts // interval + 1
    lasts = (ends + unread_drafts) // interval
    wanted = []
    for i in (firsts <= lasts).nonzero()[0].tolist():
        latest = int(kv_starts[i] + unread_drafts[i])
        for length in range(int(firsts[i]) * interval, int(lasts[i]) * interval + 1, interval):
            if length > latest or has_snapshot(rank.memory, int(rows[i]), length):
                wanted.append((i, length))
    return wanted


def _prompt_snapshots(
    builder: StepBuilder, num_decode: int, kv_starts: Int32Array
) -> list[tuple[int, int]]:
    """Return index and length of prefill rows' snapshots: last whole page, branches, interval."""
    wanted = []
    for i, (row, count) in enumerate(builder.chunks.items()):
        start = int(kv_starts[num_decode + i])
        lengths = sorted(_lengths_of_prompt(builder.rank, row, start, start + count))
        wanted += [(num_decode + i, length) for length in lengths]
    return wanted


def _lengths_of_prompt(rank: RankScheduler, row: int, start: int, end: int) -> set[int]:
    sizes, interval = rank.memory.sizes, rank.memory.sizes.snapshot_interval
    # A prompt's last token is always computed, for its logits.
    matchable = int(rank.columns.known_len[row]) - 1
    lengths = set(range(start // interval * interval + interval, end + 1, interval))
    others = {matchable // sizes.page_size * sizes.page_size, *rank.prompts.branch_lens(row)}
    return lengths | {length for length in others if start < length <= end}
