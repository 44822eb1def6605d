"""The states of recurrent layers that a row can go on from, and the snapshots that it keeps.

A row has slots of its own, in two halves: a step reads what the step before it wrote in one half,
and writes the other (`EngineSizes.own_slot`). They are no allocator's: they go with the row. With
drafts a half holds the states after each token of its step, from `state_lens` on; how many of the
drafts were accepted is known when the next step's half says where that one began.

A snapshot is a copy in the pool of states, for others. It is listed in the row's page table, in the
column of the page whose last token it is after. From `cache_protected_len` on it is the row's own,
before that the tree's, of which a row lists the one that it has locked. A snapshot saves work, and
nothing waits for one: where no slot can be had, none is kept.

No other code but `release.py` frees snapshots.
"""

from typing import TYPE_CHECKING

import numpy as np

from sgl_jax.core.step_plan import Int32Array, IntpArray
from sgl_jax.mem_cache.errors import LeaseError
from sgl_jax.mem_cache.lease import KVLease
from sgl_jax.mem_cache.req_to_token_pool import NO_STATE

if TYPE_CHECKING:
    from sgl_jax.mem_cache.rank_memory import RankMemory

NULL_SLOT = 0  # of the state before the first token


def state_source(memory: "RankMemory", lease: KVLease) -> int:
    """The slot of the state after the committed tokens of `lease`: of the row's own, a snapshot's,
    or the null slot if there are no tokens yet. Raises `LeaseError` if there is no such state."""
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


def resumable_len(memory: "RankMemory", lease: KVLease, length: int) -> int:
    """The most of its first `length` tokens that `lease` can go on from; -1 if there is nothing.

    Without recurrent layers these are all that are committed, unless the tree owns more, or a
    window has passed what is seen from there. With them, there must be a state, too.
    """
    lease.require_live()
    most, protected = min(length, lease.kv_committed_len), lease.cache_protected_len
    if memory.state_group is not None and most >= protected:
        most = _deepest_state(memory, lease.row, most)
        if most < protected and protected == 0:
            most = 0
    return most if most >= protected and memory.sees_windows(lease, most) else -1


def has_snapshot(memory: "RankMemory", row: int, length: int) -> bool:
    """Whether `row` lists a slot for the state after `length` tokens, whole pages."""
    return bool(_listed(memory, row)[length // memory.page_size - 1])


def take_snapshot_slot(memory: "RankMemory", row: int, length: int) -> int:
    """A slot of the pool for the state of `row` after `length` tokens, listed in its page table.

    Evicts if none is free. If the row has one there that is its own, it is that: a step that may
    come past `length` only by its drafts takes a slot, and so does the step after it. 0 if none can
    be had.

    Args:
        memory: of the row's rank.
        row: leased.
        length: a multiple of the page size, more than is published and no more than is allocated.
            Raises `LeaseError` otherwise.
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


def let_go_snapshots(memory: "RankMemory", row: int, certain_len: int) -> None:
    """Give up the snapshots of `row` before its last one of the first `certain_len` tokens.

    Its own are freed, but for those at multiples of the snapshot interval, which are to be
    published; that of the tree is not locked any more. `certain_len` are tokens that no result can
    take from the row: so there is always one behind which it does not go back.
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
        _let_go_of_tree(memory, lease, protected)
    _free(memory, row, own[~is_kept])
    memory.rows.pass_pages(row, group, int(own[is_kept][0]))


def _let_go_of_tree(memory: "RankMemory", lease: KVLease, protected: int) -> None:
    """`lease` gives up its lock of the tree's snapshots, the last of which is of page `protected`
    - 1."""
    group, row = _group(memory), lease.row
    first = int(memory.rows.first_pages[group, row])
    read = _listed(memory, row)[first:protected]
    memory.locked[_pool(memory)].unlock(read[read > 0])
    if lease.node is not None:
        memory.cache.let_go(lease.node, group, first, protected)


# -- what ends with a turn, or with a way back ----------------------------------------------------


def drop_snapshots_past(memory: "RankMemory", lease: KVLease, length: int) -> int:
    """Free the own snapshots of `lease` for more than `length` tokens, no fewer than the tree owns
    of it; how many."""
    if memory.state_group is None:
        return 0
    first, firsts = length // memory.page_size, memory.rows.first_pages[memory.state_group]
    # The next one may be before those that were let go of.
    firsts[lease.row] = min(firsts[lease.row], first)
    columns = first + _listed(memory, lease.row)[first:].nonzero()[0]
    _free(memory, lease.row, columns)
    return len(columns)


def forget_states_past(memory: "RankMemory", lease: KVLease, length: int) -> None:
    """The tokens past the first `length` are the row's no more: nor is what lies past them."""
    rows, row = memory.rows, lease.row
    state_lens, latest = rows.state_lens[:, row], int(rows.state_half[row])
    if state_lens[latest] > length:
        # What was written before it is known to be right up to where it began.
        rows.state_half[row] = 1 - latest
    state_lens[state_lens > length] = NO_STATE


def go_back(memory: "RankMemory", lease: KVLease, length: int) -> None:
    """`lease` goes on from its first `length` tokens: of its own states those after more may not
    be read any more."""
    rows, row = memory.rows, lease.row
    holding = [
        half for half, (first, last) in _states_held(memory, row).items() if first <= length <= last
    ]
    forget_states_past(memory, lease, length)
    if memory.sizes.max_draft_tokens:
        # A half that was cut before is not cut there any more, and holds states past it.
        of_row = rows.state_lens[:, row]
        is_cut = of_row <= rows.resumed_len[row]
        is_cut[holding[:1]] = False
        of_row[is_cut] = NO_STATE
    rows.resumed_len[row] = length
    if holding:
        rows.state_half[row] = holding[0]


# -- inside ---------------------------------------------------------------------------------------


def _states_held(memory: "RankMemory", row: int) -> dict[int, tuple[int, int]]:
    """The halves of `row` that hold states which can be read, the one written last in front: after
    how many tokens the first and the last of them are. Both may claim to hold one: then the earlier
    half's is after drafts that were refused.

    So it is because a row that generates computes no chunk again before it goes back (`go_back`): a
    step after one with drafts begins where that ended, and its first state is after one token more.
    """
    rows = memory.rows
    latest, resumed_len = int(rows.state_half[row]), int(rows.resumed_len[row])
    drafts = rows.state_drafts[:, row]
    if rows.state_lens[latest, row] == NO_STATE:
        # Of the step before, no more is known than that its first token was kept.
        drafts = np.zeros_like(drafts)
    held: dict[int, tuple[int, int]] = {}
    for half in (latest, 1 - latest):
        first = int(rows.state_lens[half, row])
        if first != NO_STATE:
            last = first + int(drafts[half])
            held[half] = first, min(last, resumed_len) if first <= resumed_len else last
    return held


def _deepest_state(memory: "RankMemory", row: int, length: int) -> int:
    """The most of the first `length` tokens after which `row` has a state; `NO_STATE` if none."""
    lengths = [
        min(last, length) for first, last in _states_held(memory, row).values() if first <= length
    ]
    columns = _listed(memory, row)[: length // memory.page_size].nonzero()[0]
    if len(columns):
        lengths.append((int(columns[-1]) + 1) * memory.page_size)
    return max(lengths, default=NO_STATE)


def _group(memory: "RankMemory") -> int:
    if memory.state_group is None:
        raise LeaseError(f"rank {memory.dp_rank}: the model has no recurrent layers, and no states")
    return memory.state_group


def _pool(memory: "RankMemory") -> int:
    return memory.groups[_group(memory)].pool


def _listed(memory: "RankMemory", row: int) -> Int32Array:
    """The snapshots that `row` lists, by page."""
    listed: Int32Array = memory.rows.pages[row, _group(memory)]
    return listed


def _cells(row: int, columns: IntpArray) -> tuple[IntpArray, Int32Array]:
    return np.full(len(columns), row), columns.astype(np.int32)


def _free(memory: "RankMemory", row: int, columns: IntpArray) -> None:
    """Free the row's own snapshots that it lists in `columns`."""
    slots = _listed(memory, row)[columns]
    memory.allocators[_pool(memory)].free(slots, row)
    memory.rows.list_page_each(_group(memory), *_cells(row, columns), np.zeros_like(slots))
