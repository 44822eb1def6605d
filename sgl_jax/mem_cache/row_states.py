"""The states of recurrent layers from which a row can continue, and its snapshots.

A row has fixed slots, in two halves: a step reads the previous step's half and writes to the other
(`EngineSizes.own_slot`). They belong to the row; no allocator manages them. With drafts, a half
holds the states after each token of its step, from `state_lens` on. The start of the next step's
half shows how many drafts were accepted.

A snapshot is a copy in the pool of states, for further requests. The row's page table lists it in
the column of the page that ends at its position. From `cache_protected_len` on, the row owns the
snapshots. Before that the tree owns them, and the row lists only the snapshot that it has locked.
Snapshots are optional: if no slot is available, none is taken.

Only this file and `release.py` free snapshots.
"""

import numpy as np

from sgl_jax.core.step_plan import Int32Array, IntpArray
from sgl_jax.mem_cache.errors import LeaseError
from sgl_jax.mem_cache.lease import KVLease
from sgl_jax.mem_cache.pages.req_to_token_pool import NO_STATE
from sgl_jax.mem_cache.rank_memory import RankMemory

NULL_SLOT = 0  # slot of the state before the first token


def state_source(memory: RankMemory, lease: KVLease) -> int:
    """Return the slot of the state after the committed tokens of `lease`.

    It is a slot of the row or a snapshot, or the null slot if there are no tokens yet. Raise
    `LeaseError` if there is no such state.
    """
    lease.require_live()
    length = lease.kv_committed_len
    if length == 0:
        return NULL_SLOT
    held = _states_held(memory, lease.row)
    for half, (first, last) in held.items():
        if first <= length <= last:
            return memory.sizes.own_slot(lease.row, half, length - first)
    if length % memory.page_size == 0:
        slot = int(_listed(memory, lease.row)[length // memory.page_size - 1])
        if slot:
            return slot
    raise LeaseError(f"{lease!r} has no state after its committed tokens: its halves hold {held}")


def resumable_len(memory: RankMemory, lease: KVLease, length: int) -> int:
    """Return the longest prefix of the first `length` tokens that `lease` can resume from, or -1.

    Without recurrent layers, this is the committed part, unless the tree owns more or a window has
    passed the pages needed from there. Recurrent layers also need a state.
    """
    lease.require_live()
    most, protected = min(length, lease.kv_committed_len), lease.cache_protected_len
    if memory.state_group is not None and most >= protected:
        most = _deepest_state(memory, lease.row, most)
        if most < protected and protected == 0:
            most = 0
    return most if most >= protected and memory.sees_windows(lease, most) else -1


def can_go_back(memory: RankMemory, lease: KVLease, length: int) -> bool:
    """Return whether `lease` can resume from its first `length` tokens or, with recurrent layers,
    from the last state within them."""
    if memory.state_group is not None:
        return resumable_len(memory, lease, length) >= 0
    return memory.sees_windows(lease, length)


def has_snapshot(memory: RankMemory, row: int, length: int) -> bool:
    """Return whether `row` lists a slot for the state after `length` tokens, whole pages."""
    return bool(_listed(memory, row)[length // memory.page_size - 1])


def take_snapshot_slot(memory: RankMemory, row: int, length: int) -> int:
    """Return a pool slot for the state of `row` after `length` tokens, listed in its page table.

    Evict a state if no slot is free. If the row already has a slot there, return that: a step that
    may pass `length` only through its drafts takes a slot, and so does the next step. Return 0 if
    none is available. Raise `LeaseError` unless `length` is a multiple of the page size, above the
    published length and at most the allocated length.
    """
    rows = memory.rows
    lease, column = memory.leases[row], length // memory.page_size - 1
    is_own = lease.cache_protected_len < length <= lease.kv_allocated_len
    if not is_own or length % memory.page_size:
        raise LeaseError(f"{lease!r} cannot keep a state after {length} tokens")
    listed = int(_listed(memory, row)[column])
    if listed:
        return listed
    pool = _pool(memory)
    if memory.allocators[pool].num_free == 0 and memory.cache.evict(1, pool) == 0:
        return NULL_SLOT
    slots = memory.allocators[pool].alloc(1, row)
    rows.list_page_each(_group(memory), *_cells(row, np.array([column])), slots)
    return int(slots[0])


def free_passed_snapshots(memory: RankMemory, row: int, certain_len: int) -> None:
    """Release the snapshots of `row` before its last snapshot within `certain_len` tokens.

    The row's snapshots are freed, except at multiples of the snapshot interval, which will be
    published. The tree's snapshot is unlocked. No result can take the first `certain_len` tokens
    from the row, so it never goes back past the last snapshot within them.
    """
    group, page_size = _group(memory), memory.page_size
    lease, listed = memory.leases[row], _listed(memory, row)
    first = int(memory.rows.first_pages[group, row])
    columns = first + listed[first : certain_len // page_size].nonzero()[0]
    if len(columns) < 2:
        return
    protected = lease.cache_protected_len // page_size
    own = columns[columns >= protected]
    is_kept = (own + 1) * page_size % memory.sizes.snapshot_interval == 0
    is_kept[-1:] = True
    if first < protected:
        _unlock_passed_nodes(memory, lease, protected)
    _free(memory, row, own[~is_kept])
    memory.rows.pass_pages(row, group, int(own[is_kept][0]))


def _unlock_passed_nodes(memory: RankMemory, lease: KVLease, protected: int) -> None:
    """Unlock the tree's snapshots for `lease`; the last is at page `protected` - 1."""
    group, row = _group(memory), lease.row
    first = int(memory.rows.first_pages[group, row])
    read = _listed(memory, row)[first:protected]
    memory.locked[_pool(memory)].unlock(read[read > 0])
    if lease.node is not None:
        memory.cache.unlock_passed(lease.node, group, first, protected)


# -- end of a turn, or going back ------------------------------------------------------------------


def drop_snapshots_past(memory: RankMemory, lease: KVLease, length: int) -> int:
    """Free the snapshots that `lease` owns after more than `length` tokens; return their number.
    `length` must be at least the length of the lease's prefix in the tree."""
    if memory.state_group is None:
        return 0
    first, firsts = length // memory.page_size, memory.rows.first_pages[memory.state_group]
    # The next snapshot may come before the released ones.
    firsts[lease.row] = min(firsts[lease.row], first)
    columns = first + _listed(memory, lease.row)[first:].nonzero()[0]
    _free(memory, lease.row, columns)
    return len(columns)


def forget_states_past(memory: RankMemory, lease: KVLease, length: int) -> None:
    rows, row = memory.rows, lease.row
    state_lens, latest = rows.state_lens[:, row], int(rows.state_half[row])
    if state_lens[latest] > length:
        # The earlier half is valid up to the start of the later half.
        rows.state_half[row] = 1 - latest
    state_lens[state_lens > length] = NO_STATE


def go_back(memory: RankMemory, lease: KVLease, length: int) -> None:
    """Continue `lease` from its first `length` tokens. The row's later states become unreadable."""
    rows, row = memory.rows, lease.row
    holding = [
        half for half, (first, last) in _states_held(memory, row).items() if first <= length <= last
    ]
    forget_states_past(memory, lease, length)
    if memory.sizes.max_draft_tokens:
        # A half that was cut at an earlier return would seem to hold states past that cut.
        of_row = rows.state_lens[:, row]
        is_cut = of_row <= rows.resumed_len[row]
        is_cut[holding[:1]] = False
        of_row[is_cut] = NO_STATE
    rows.resumed_len[row] = length
    if holding:
        rows.state_half[row] = holding[0]


# -- inside ---------------------------------------------------------------------------------------


def _states_held(memory: RankMemory, row: int) -> dict[int, tuple[int, int]]:
    """Return the readable halves of `row`, the latest first, with the token counts of their first
    and last states.

    If both seem to hold the same state, the state of the earlier half follows rejected drafts. This
    holds because a generating row computes no chunk again before it goes back (`go_back`): a step
    after one with drafts begins at its end, and its first state follows one more token.
    """
    rows = memory.rows
    latest, resumed_len = int(rows.state_half[row]), int(rows.resumed_len[row])
    drafts = rows.state_drafts[:, row]
    if rows.state_lens[latest, row] == NO_STATE:
        # Only the first token of the previous step is certain to be kept.
        drafts = np.zeros_like(drafts)
    held: dict[int, tuple[int, int]] = {}
    for half in (latest, 1 - latest):
        first = int(rows.state_lens[half, row])
        if first != NO_STATE:
            last = first + int(drafts[half])
            held[half] = first, min(last, resumed_len) if first <= resumed_len else last
    return held


def _deepest_state(memory: RankMemory, row: int, length: int) -> int:
    """Return the most tokens, up to `length`, after which `row` has a state; `NO_STATE` if none."""
    lengths = [
        min(last, length) for first, last in _states_held(memory, row).values() if first <= length
    ]
    columns = _listed(memory, row)[: length // memory.page_size].nonzero()[0]
    if len(columns):
        lengths.append((int(columns[-1]) + 1) * memory.page_size)
    return max(lengths, default=NO_STATE)


def _group(memory: RankMemory) -> int:
    if memory.state_group is None:
        raise LeaseError(f"rank {memory.dp_rank}: the model has no recurrent layers, and no states")
    return memory.state_group


def _pool(memory: RankMemory) -> int:
    return memory.groups[_group(memory)].pool


def _listed(memory: RankMemory, row: int) -> Int32Array:
    listed: Int32Array = memory.rows.pages[row, _group(memory)]
    return listed


def _cells(row: int, columns: IntpArray) -> tuple[IntpArray, Int32Array]:
    return np.full(len(columns), row), columns.astype(np.int32)


def _free(memory: RankMemory, row: int, columns: IntpArray) -> None:
    slots = _listed(memory, row)[columns]
    memory.allocators[_pool(memory)].free(slots, row)
    memory.rows.list_page_each(_group(memory), *_cells(row, columns), np.zeros_like(slots))
