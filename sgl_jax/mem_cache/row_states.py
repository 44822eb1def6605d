"""States of one row: what it can go on from, and the snapshots that it holds until they are
published.

A row's own slots hold the states that its last two steps wrote (`RowTables.state_lens`). Its
snapshots are listed in the page table of the recurrent group, each at the page that it is after the
last token of.
"""

import numpy as np

from sgl_jax.core.step_plan import Int32Array
from sgl_jax.mem_cache.errors import LeaseError
from sgl_jax.mem_cache.lease import KVLease
from sgl_jax.mem_cache.rank_memory import RankMemory
from sgl_jax.mem_cache.req_to_token_pool import NO_STATE

_NONE = -1


def resumable_len(memory: RankMemory, lease: KVLease, num_tokens: int) -> int:
    """How many of the first `num_tokens` tokens of `lease` can be gone on from; -1 for none.

    Not less than the lease protects: what is before that the tree has. Without recurrent layers
    all can that are committed.
    """
    length = min(lease.kv_committed_len, num_tokens)
    if memory.state_group is None or length == 0:
        return length
    protected = lease.cache_protected_len
    found = [each for each in _snapshot_lens(memory, lease) if protected <= each <= length]
    for first, end in _own_lens(memory, lease):
        if first <= length and max(first, protected) <= end:
            found.append(min(end, length))
    if not protected:
        found.append(0)
    return max(found, default=_NONE)


def state_source(memory: RankMemory, lease: KVLease) -> int:
    """The slot with the state after the committed tokens of `lease`.

    Raises `LeaseError` if there is none.
    """
    length, row = lease.kv_committed_len, lease.row
    if length == 0:
        return 0
    for half, (first, end) in enumerate(_own_lens(memory, lease)):
        if first <= length <= end:
            return memory.sizes.own_slot(row, half, length - first)
    page, rest = divmod(length, memory.page_size)
    slot = int(_listed(memory, row)[page - 1]) if rest == 0 else 0
    if slot == 0:
        raise LeaseError(f"{lease!r} has no state to go on from")
    return slot


def _own_lens(memory: RankMemory, lease: KVLease) -> tuple[tuple[int, int], tuple[int, int]]:
    """Of each half of the row's own slots, after how many tokens its first and its last state are
    that still count; none if the last is below the first.

    Of the half written before, states past the first of the other are of drafts that were refused.
    """
    rows, row = memory.rows, lease.row
    newest = int(rows.state_half[row])
    firsts = rows.state_lens[:, row].tolist()
    ends = [first + memory.sizes.max_draft_tokens for first in firsts]
    if firsts[newest] != NO_STATE:
        ends[1 - newest] = min(ends[1 - newest], firsts[newest] - 1)
    lens = [
        (first, end) if first != NO_STATE else (0, NO_STATE)
        for first, end in zip(firsts, ends, strict=True)
    ]
    return lens[0], lens[1]


def _snapshot_lens(memory: RankMemory, lease: KVLease) -> list[int]:
    """After how many tokens the snapshots are that the row lists."""
    pages = _listed(memory, lease.row).nonzero()[0] + 1
    lens: list[int] = (pages * memory.page_size).tolist()
    return lens


def _listed(memory: RankMemory, row: int) -> Int32Array:
    """The row's line of snapshots, by page."""
    assert memory.state_group is not None
    listed: Int32Array = memory.rows.pages[row, memory.state_group]
    return listed


def has_snapshot(memory: RankMemory, row: int, length: int) -> bool:
    """Whether `row` lists a slot for the state after `length` tokens, whole pages."""
    return bool(_listed(memory, row)[length // memory.page_size - 1])


def take_snapshot_slot(memory: RankMemory, row: int, length: int) -> int:
    """A slot for the state of `row` after `length` tokens, whole pages; 0 if there is none.

    One that the row has taken for that length already is answered again. Takes what is least
    useful from the tree if no slot is free.
    """
    assert memory.state_group is not None
    page = length // memory.page_size - 1
    listed = int(_listed(memory, row)[page])
    if listed:
        return listed
    pool = memory.groups[memory.state_group].pool
    allocator = memory.allocators[pool]
    if allocator.num_free == 0 and not memory.cache.evict(1, pool):
        return 0
    slot = allocator.alloc(1, row)
    memory.rows.list_page_each(
        memory.state_group, np.array([row]), np.array([page], np.int32), slot
    )
    memory.num_row_snapshots += 1
    return int(slot[0])


def let_go_snapshots(memory: RankMemory, row: int, certain_len: int) -> None:
    """Free the snapshots of `row` that are its own and that it needs no more.

    `certain_len` are tokens that no result takes from it. Of the snapshots up to there it keeps the
    last, and those at multiples of the snapshot interval, to be published.
    """
    assert memory.state_group is not None
    first = int(memory.rows.cache_protected_len[row]) // memory.page_size
    end = certain_len // memory.page_size
    listed = _listed(memory, row)
    own = first + listed[first:end].nonzero()[0][:-1]
    pages = own[(own + 1) * memory.page_size % memory.sizes.snapshot_interval != 0]
    if not len(pages):
        return
    memory.allocators[memory.groups[memory.state_group].pool].free(listed[pages].copy(), row)
    memory.num_row_snapshots -= len(pages)
    memory.rows.list_page_each(
        memory.state_group,
        np.full(len(pages), row),
        pages.astype(np.int32),
        np.zeros(len(pages), np.int32),
    )
