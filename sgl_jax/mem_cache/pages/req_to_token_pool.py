"""The pages that hold each running request's tokens, and the three lengths of its lease.

A rank has one row per request. The page ids and lengths are columns of arrays, so the scheduler can
grow and commit all rows of a step at once; `KVLease` is the view of one row. Row 0 is the null row:
padding refers to it, and no request holds it.
"""

from dataclasses import dataclass

import numpy as np

from sgl_jax.core.compiled import compiled
from sgl_jax.core.page_tables import PageChanges
from sgl_jax.core.step_plan import Int32Array, IntpArray
from sgl_jax.mem_cache.errors import LeaseError

NULL_ROW = 0
NO_STATE = -1
# A row without states: both halves, the half written last, the length at the last return, the
# drafts of both halves.
_NO_STATES = np.array([NO_STATE, NO_STATE, 0, 0, 0, 0], np.int32)
_NO_CELLS = np.zeros(0, np.intp)


class PageChangeLog:
    """Cells of `pages` that were written since the last `take`."""

    def __init__(self, pages: Int32Array) -> None:
        self._pages = pages
        self._cells: list[IntpArray] = []
        self._num_written = 0

    def note(self, cells: IntpArray) -> None:
        """Record the flat indices of written cells. Keeps the array."""
        self._cells.append(cells)
        self._num_written += len(cells)
        if self._num_written > self._pages.size:  # `take` was not called for long
            self._cells, self._num_written = [np.arange(self._pages.size)], 0

    def take(self) -> PageChanges:
        """Return the changes, in new arrays, and clear the log."""
        cells = np.concatenate(self._cells) if self._cells else _NO_CELLS
        self._cells, self._num_written = [], 0
        return PageChanges(cells, self._pages.reshape(-1)[cells])


@dataclass(eq=False)
class RowTables:
    """The pages and lengths of rows, as columns.

    The columns of one rank may be views of arrays of all ranks. Only methods write `pages`, since
    they log changes for the executor. `row_states.py` interprets `states`: the states of recurrent
    layers, in two halves of each row.
    """

    pages: Int32Array  # [num_rows, groups, pages_per_row], 0 before the first and after the last
    # [groups, num_rows] first page that a row lists; above 0 once its window has passed pages
    first_pages: Int32Array
    # [4, num_rows] tokens in ascending order: 0, protected, committed, allocated; all 0 for a free
    # row. One array, so that one comparison checks the order.
    lengths: Int32Array
    # [num_rows] grows when a row is freed. The result of a step is valid for a row only if its
    # epoch is the same as at launch.
    epoch: Int32Array
    states: Int32Array  # [6, num_rows]
    page_log: PageChangeLog
    first_row: int = 0  # row of the log's table at which these rows start

    def __post_init__(self) -> None:
        self.num_rows, self.num_groups, self.pages_per_row = self.pages.shape
        self.cache_protected_len: Int32Array = self.lengths[1]
        self.kv_committed_len: Int32Array = self.lengths[2]
        self.kv_allocated_len: Int32Array = self.lengths[3]
        # The tokens before a half's first state; `NO_STATE` if it has none, or none with known
        # length.
        self.state_lens = self.states[:2]
        self.state_half = self.states[2]  # the half written last
        # The row's tokens when it last went back to an earlier length. In a half written before
        # that, states after more tokens are invalid.
        self.resumed_len = self.states[3]
        self.state_drafts = self.states[4:]  # by half: further states, one after each draft

    @classmethod
    def empty(cls, num_rows: int, num_groups: int, pages_per_row: int) -> "RowTables":
        pages = np.zeros((num_rows, num_groups, pages_per_row), np.int32)
        return cls(
            pages=pages,
            first_pages=np.zeros((num_groups, num_rows), np.int32),
            lengths=np.zeros((4, num_rows), np.int32),
            epoch=np.zeros(num_rows, np.int32),
            states=np.tile(_NO_STATES[:, None], num_rows),
            page_log=PageChangeLog(pages),
        )

    def part(self, rows: slice) -> "RowTables":
        return RowTables(
            self.pages[rows],
            self.first_pages[:, rows],
            self.lengths[:, rows],
            self.epoch[rows],
            self.states[:, rows],
            self.page_log,
            self.first_row + rows.start,
        )

    def list_pages(self, row: int, first: int, pages: Int32Array) -> None:
        """List `pages` int32[groups, n] in `row` from column `first` on."""
        for group in range(self.num_groups):
            self.list_pages_of(row, group, first, pages[group])

    def list_pages_of(self, row: int, group: int, first: int, pages: Int32Array) -> None:
        end = first + len(pages)
        self.pages[row, group, first:end] = pages
        start = ((self.first_row + row) * self.num_groups + group) * self.pages_per_row
        self.page_log.note(np.arange(start + first, start + end))

    def list_page_each(
        self, group: int, rows: IntpArray, columns: Int32Array, pages: Int32Array
    ) -> None:
        """List `pages[i]` of `group` at `columns[i]` of row `rows[i]`."""
        cells: IntpArray = (rows * self.num_groups + group) * self.pages_per_row + columns
        self.pages.reshape(-1)[cells] = pages
        self.page_log.note(cells + self.first_row * self.num_groups * self.pages_per_row)

    def unlist_pages(self, row: int, first: int = 0) -> None:
        """Clear the columns of `row`, in all groups, from column `first` on."""
        for group in range(self.num_groups):
            self.unlist(row, group, first, self.pages_per_row)

    def pass_pages(self, row: int, group: int, first: int) -> None:
        """Clear the columns of `group` in `row` before `first`, where its window now begins."""
        self.unlist(row, group, int(self.first_pages[group, row]), first)
        self.first_pages[group, row] = first

    def unlist(self, row: int, group: int, first: int, end: int) -> None:
        start = ((self.first_row + row) * self.num_groups + group) * self.pages_per_row
        self.page_log.note(_unlist(self.pages[row, group], first, end, start))

    def clear(self, row: int) -> None:
        """Clear all columns of `row`, which gets a new epoch."""
        self.unlist_pages(row)
        self.lengths[:, row] = 0
        self.first_pages[:, row] = 0
        self.states[:, row] = _NO_STATES
        self.epoch[row] += 1


@compiled("(int32[::1], int64, int64, int64)")
def _unlist(table: Int32Array, first: int, end: int, start: int) -> IntpArray:
    """Clear the pages that a row's `table` lists in columns [first, end); return their columns,
    counted from `start`."""
    assert first >= 0
    assert end <= len(table)
    cells, num_cells = np.empty(max(end - first, 0), np.int64), 0
    for column in range(first, end):
        if table[column]:
            table[column] = 0
            cells[num_cells] = start + column
            num_cells += 1
    return cells[:num_cells]


class ReqToTokenPool:
    """The set of held rows of `tables`. All are free at first; the null row is never held."""

    def __init__(self, tables: RowTables) -> None:
        num_rows, pages_per_row = tables.num_rows, tables.pages_per_row
        if num_rows < 2 or pages_per_row < 1:
            raise ValueError(
                f"a row pool needs at least 2 rows of 1 page, got {num_rows} of {pages_per_row}"
            )
        self.tables = tables
        self._free = list(range(num_rows - 1, NULL_ROW, -1))
        self._held = np.zeros(num_rows, np.bool_)

    def reset(self) -> None:
        """Free and clear every row, with new epochs."""
        for row in range(self.tables.num_rows):
            self.tables.clear(row)
        self._free = list(range(self.tables.num_rows - 1, NULL_ROW, -1))
        self._held.fill(False)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_held(self) -> int:
        """Count the rows in use, independently of `num_free`."""
        return int(np.count_nonzero(self._held))

    def held_rows(self) -> Int32Array:
        return np.flatnonzero(self._held).astype(np.int32)

    def free_rows(self) -> Int32Array:
        """Return a copy of the free list, in no particular order."""
        return np.array(self._free, np.int32)

    def alloc(self) -> int:
        """Take a free row. Raise `LeaseError` if there is none: check `num_free` first."""
        if not self._free:
            raise LeaseError(f"all {len(self._held) - 1} rows are held")
        row = self._free.pop()
        self._held[row] = True
        return row

    def free(self, row: int) -> None:
        """Free and clear a row. Raise `LeaseError` if it is not held."""
        if not self._held[row]:
            raise LeaseError(f"row {row} is given back, but is not held")
        self._held[row] = False
        self.tables.clear(row)
        self._free.append(row)
