"""Growing and committing the rows of all ranks at once: pages for new tokens, and the lengths
written by launched steps.

`tables` holds the columns of all ranks' rows, rank after rank. Row numbers are indices into them.
The loops are compiled (`core/compiled.py`).
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from sgl_jax.core.compiled import compiled
from sgl_jax.core.engine_sizes import CacheGroup
from sgl_jax.core.step_plan import BoolArray, Int32Array, IntpArray, RowIndex
from sgl_jax.mem_cache.errors import LeaseError
from sgl_jax.mem_cache.pages.page_allocator import PageAllocator
from sgl_jax.mem_cache.pages.req_to_token_pool import RowTables


class GrowingMemory(Protocol):
    """The part of `RankMemory` that growing rows needs."""

    dp_rank: int
    page_size: int
    groups: tuple[CacheGroup, ...]
    rows: RowTables
    allocators: tuple[PageAllocator, ...]
    first_tables: tuple[IntpArray, IntpArray]
    num_tables: list[int]

    def make_room(self, num_pages: int) -> bool: ...


def grow_rows(
    tables: RowTables,
    memories: Sequence[GrowingMemory],
    rows: RowIndex,
    allocated_lens: Int32Array,
    bounds: Sequence[int] | IntpArray,
) -> BoolArray:
    """Reserve slots so that row i holds `allocated_lens[i]` tokens, evicting as needed.

    Args:
        tables: the columns of all `memories`, one after another.
        memories: the memories of all ranks, with equal numbers of rows.
        rows: indices into `tables`, distinct and leased, rank by rank.
        allocated_lens: int32[len(rows)].
        bounds: rank i has the rows `rows[bounds[i] : bounds[i + 1]]`.

    Return whether each rank's rows fit, bool[ranks]. If they do not, even after eviction, the rank
    is unchanged.
    """
    bounds, fits = np.asarray(bounds), np.ones(len(memories), np.bool_)
    lacking, num_lacking = _lacking_pages(
        rows,
        allocated_lens,
        bounds,
        tables.kv_allocated_len,
        memories[0].page_size,
        memories[0].rows.num_rows,
    )
    if len(lacking):
        ranks = np.array([memory.dp_rank for memory in memories])
        is_short = np.zeros(len(memories), np.bool_)
        for num_tables, allocator in zip(
            memories[0].num_tables, memories[0].allocators, strict=True
        ):
            is_short |= num_lacking * num_tables > allocator.records.num_free(ranks)
        for k in is_short.nonzero()[0].tolist():
            fits[k] = memories[k].make_room(int(num_lacking[k]))
        if not fits.all():
            lacking = lacking[np.repeat(fits, num_lacking)]
            num_lacking *= fits
        owners = np.ascontiguousarray(lacking["owner"])
        for number, group in enumerate(memories[0].groups):
            if group.is_recurrent:
                continue  # snapshots are taken one by one: `row_states.py`
            records = memories[0].allocators[group.pool].records
            pages = records.alloc_each(ranks, num_lacking, owners)
            tables.list_page_each(number, lacking["row"], lacking["column"], pages)
    _reserve(rows, allocated_lens, bounds, fits, tables.kv_allocated_len)
    return fits


# A page that a row lacks.
_LACKING = np.dtype(
    [
        ("row", np.int64),  # index among all ranks' rows
        ("owner", np.int32),  # index of the row within its rank
        ("column", np.int32),  # column of the row's page table
    ]
)


@compiled("(int64[:], int32[:], int64[::1], int32[::1], int32, int64)")
def _lacking_pages(
    rows: RowIndex,
    lens: Int32Array,
    bounds: IntpArray,
    allocated_len: Int32Array,
    page_size: int,
    num_rows: int,
) -> tuple[NDArray[Any], IntpArray]:
    """List the pages that `rows` lack to hold `lens` tokens.

    Return `_LACKING` records, row by row, and the number of each rank's records, int64[ranks].
    `bounds` delimit the ranks' rows; each rank has `num_rows` rows. `allocated_len` covers the rows
    of all ranks.
    """
    assert len(rows) == len(lens) == bounds[len(bounds) - 1]
    num_lacking = np.zeros(len(bounds) - 1, np.int64)
    growing = np.empty(len(rows), np.int64)  # indices of rows that lack a page
    num_growing = 0
    for rank in range(len(num_lacking)):
        for i in range(bounds[rank], bounds[rank + 1]):
            assert 0 <= rows[i] < len(allocated_len)
            held_len = allocated_len[rows[i]]
            num_left = -held_len % page_size  # slots of its last page
            if lens[i] - held_len > num_left:
                growing[num_growing] = i
                num_growing += 1
                num_lacking[rank] += (lens[i] - held_len - num_left + page_size - 1) // page_size
    lacking = np.empty(num_lacking.sum(), _LACKING)
    count = 0
    for i in growing[:num_growing]:
        held = (allocated_len[rows[i]] + page_size - 1) // page_size
        for column in range(held, (lens[i] + page_size - 1) // page_size):
            page = lacking[count]
            page.row, page.owner, page.column = rows[i], rows[i] % num_rows, column
            count += 1
    return lacking, num_lacking


@compiled("(int64[:], int32[:], int64[::1], boolean[::1], int32[::1])")
def _reserve(
    rows: RowIndex,
    lens: Int32Array,
    bounds: IntpArray,
    fits: BoolArray,
    allocated_len: Int32Array,
) -> None:
    assert len(rows) == len(lens) == bounds[len(bounds) - 1]
    assert len(fits) == len(bounds) - 1
    for rank in range(len(fits)):
        if fits[rank]:
            for i in range(bounds[rank], bounds[rank + 1]):
                assert 0 <= rows[i] < len(allocated_len)
                allocated_len[rows[i]] = max(allocated_len[rows[i]], lens[i])


def commit_rows(
    tables: RowTables, memories: Sequence[GrowingMemory], rows: RowIndex, committed_lens: Int32Array
) -> None:
    """Record that a launched step writes rows' KV up to `committed_lens` tokens.

    `rows` are indices into `tables`, the columns of all `memories`. Raise `LeaseError`, changing
    nothing, if a row has too few slots.
    """
    beyond = _commit(rows, committed_lens, tables.kv_allocated_len, tables.kv_committed_len)
    if beyond >= 0:
        rank, row = divmod(int(rows[beyond]), memories[0].rows.num_rows)
        raise LeaseError(
            f"rank {memories[rank].dp_rank}: row {row} would commit "
            f"{committed_lens[beyond]} tokens of {tables.kv_allocated_len[rows[beyond]]}"
        )


@compiled("(int64[:], int32[:], int32[::1], int32[::1])")
def _commit(
    rows: RowIndex, lens: Int32Array, allocated_len: Int32Array, committed_len: Int32Array
) -> int:
    """Set the committed lengths of `rows`; return -1. If rows have too few slots, set nothing and
    return the index of the first."""
    assert len(rows) == len(lens)
    assert len(allocated_len) == len(committed_len)
    for i in range(len(rows)):
        assert 0 <= rows[i] < len(allocated_len)
        if lens[i] > allocated_len[rows[i]]:
            return i
    for i in range(len(rows)):
        committed_len[rows[i]] = lens[i]
    return -1


def pages_held_and_lacking(
    memory: GrowingMemory, tables: RowTables, rows: RowIndex, lens: Int32Array
) -> Int32Array:
    """Count the pages of the first pool that each row lists, and lacks for `lens` tokens.

    `memory` may be any rank's. `rows` int64[n] are indices into `tables`; `lens` is int32[k, n].
    Return int32[1 + k, n].
    """
    numbers, most = memory.first_tables
    pages: Int32Array = _held_and_lacking(
        rows, lens, tables.kv_allocated_len, tables.first_pages, numbers, most, memory.page_size
    )
    return pages


@compiled("(int64[::1], int32[:, ::1], int32[::1], int32[:, :], int64[::1], int64[::1], int64)")
def _held_and_lacking(
    rows: RowIndex,
    lens: Int32Array,
    allocated_len: Int32Array,
    first_pages: Int32Array,
    groups: IntpArray,
    most: IntpArray,
    page_size: int,
) -> Int32Array:
    """Count the pages for `groups`; a row lists at most `most[k]` pages of group `groups[k]`."""
    num_lens, num_rows = lens.shape
    pages = np.zeros((1 + num_lens, num_rows), np.int32)
    assert len(rows) == num_rows
    assert len(groups) == len(most)
    for i in range(num_rows):
        row = rows[i]
        assert 0 <= row < len(allocated_len)
        held = (allocated_len[row] + page_size - 1) // page_size
        for k in range(len(groups)):
            assert 0 <= groups[k] < len(first_pages)
            listed = held - first_pages[groups[k], row]
            pages[0, i] += listed
            room = max(most[k] - listed, 0)
            for j in range(num_lens):
                beyond = (lens[j, i] + page_size - 1) // page_size - held
                pages[1 + j, i] += min(max(beyond, 0), room)
    return pages
