"""The pages that hold each running request's tokens, and the three lengths of its lease.

One row per request, of one rank. The row's page ids and lengths are columns of arrays, so that the
scheduler can grow and commit all rows of a step at once; `KVLease` is the view of one row. Row 0 is
the null row: padding refers to it, no request holds it.
"""

import numpy as np

from sgl_jax.core.page_tables import PageChanges
from sgl_jax.core.step_plan import Int32Array, IntpArray
from sgl_jax.mem_cache.errors import LeaseError

NULL_ROW = 0
NO_STATE = -1
# For a row that has written no states: both halves, the half written last, the length of its last
# return, the drafts of both halves.
_NO_STATES = np.array([NO_STATE, NO_STATE, 0, 0, 0, 0], np.int32)


class PageChangeLog:
    """Cells of `pages` that were written since the last `take`, in order."""

    def __init__(self, pages: Int32Array) -> None:
        self._pages = pages
        self._forget()

    def _forget(self) -> None:
        # Not empty, so that concatenation always has an array.
        self._cells: list[IntpArray] = [np.zeros(0, np.intp)]
        self._written: list[Int32Array] = [np.zeros(0, np.int32)]
        self._num_written = 0
        self._is_too_long = False

    def note(self, cells: IntpArray, pages: Int32Array) -> None:
        """Record that cells, by their index into the flattened table, now hold `pages`. Keeps the
        arrays."""
        self._cells.append(cells)
        self._written.append(pages)
        self._num_written += len(cells)
        if self._num_written > self._pages.size:  # `take` was not called for long
            self._forget()
            self._is_too_long = True

    def take(self) -> PageChanges:
        """The changes, in new arrays."""
        if self._is_too_long:
            changes = PageChanges(np.arange(self._pages.size), self._pages.reshape(-1).copy())
        else:
            changes = PageChanges(np.concatenate(self._cells), np.concatenate(self._written))
        self._forget()
        return changes


class RowTables:
    """The pages and lengths of rows, as columns; a rank's columns may be views of all ranks'
    arrays.

    Public arrays, indexed by row:

    - `pages` int32[num_rows, groups, pages_per_row]: 0 before the first and after the last page
      held
    - `first_pages` int32[groups, num_rows]: the first page that a row lists, above 0 behind a
      window
    - `kv_committed_len`, `kv_allocated_len`, `cache_protected_len` int32[num_rows]: tokens, 0 for a
      free row; views of `lengths`, whose lines are in ascending order: 0, protected, committed,
      allocated
    - `epoch` int32[num_rows]: grows whenever a row is freed; a step's result belongs to the row's
      holder only if the epoch is still the launch's

    With recurrent layers, for the two halves of a row's own states:

    - `state_lens` int32[2, num_rows]: the tokens before a half's first state; `NO_STATE` if there
      is none or it is still unknown
    - `state_drafts` int32[2, num_rows]: the number of further states, one after each draft
    - `state_half` int32[num_rows]: the half written last
    - `resumed_len` int32[num_rows]: the row's tokens when it last went back; states after more
      tokens in a half written before that are invalid

    `row_states.py` interprets these. Only methods write `pages`: they log changes for the executor.
    The rows start at `first_row` of the log's table.
    """

    def __init__(
        self,
        pages: Int32Array,
        first_pages: Int32Array,
        lengths: Int32Array,
        epoch: Int32Array,
        states: Int32Array,
        page_log: PageChangeLog,
        first_row: int = 0,
    ) -> None:
        self.pages = pages
        # Page tables of a row, and pages that each can list.
        _, self.num_groups, self.pages_per_row = pages.shape
        self.first_pages = first_pages
        # One array, so that one comparison proves the order of all lengths.
        self.lengths = lengths
        _, self.cache_protected_len, self.kv_committed_len, self.kv_allocated_len = lengths
        self.epoch = epoch
        self.states = states
        self.state_lens, self.state_half, self.resumed_len = states[:2], states[2], states[3]
        self.state_drafts = states[4:]
        self.page_log = page_log
        self.first_row = first_row

    @classmethod
    def empty(cls, num_rows: int, num_groups: int, pages_per_row: int) -> "RowTables":
        """Columns of `num_rows` free rows."""
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
        """List `pages` int32[groups, n], which must not change afterwards, in `row` from column
        `first` on."""
        for group, listed in enumerate(pages):
            self.list_pages_of(row, group, first, listed)

    def list_pages_of(self, row: int, group: int, first: int, pages: Int32Array) -> None:
        """Like `list_pages`, for one group: `pages` int32[n]."""
        end = first + len(pages)
        self.pages[row, group, first:end] = pages
        start = ((self.first_row + row) * self.num_groups + group) * self.pages_per_row
        self.page_log.note(np.arange(start + first, start + end), pages)

    def list_page_each(
        self, group: int, rows: IntpArray, columns: Int32Array, pages: Int32Array
    ) -> None:
        """List `pages[i]` of `group` at `columns[i]` of row `rows[i]`; `pages` must not change
        afterwards."""
        cells: IntpArray = (rows * self.num_groups + group) * self.pages_per_row + columns
        self.pages.reshape(-1)[cells] = pages
        self.page_log.note(cells + self.first_row * self.num_groups * self.pages_per_row, pages)

    def unlist_pages(self, row: int, first: int = 0) -> None:
        """Clear the columns of `row`, in all groups, from column `first` on."""
        for group in range(self.num_groups):
            self.unlist(row, group, first, self.pages_per_row)

    def pass_pages(self, row: int, group: int, first: int) -> None:
        """Clear the columns of `group` in `row` before `first`, where its window now begins."""
        self.unlist(row, group, int(self.first_pages[group, row]), first)
        self.first_pages[group, row] = first

    def unlist(self, row: int, group: int, first: int, end: int) -> None:
        """Clear the columns [first, end) of `group` in `row`."""
        table = self.pages[row, group]
        listed = table[first:end].nonzero()[0]
        listed += first
        table[listed] = 0
        listed += ((self.first_row + row) * self.num_groups + group) * self.pages_per_row
        self.page_log.note(listed, np.zeros(len(listed), np.int32))


class ReqToTokenPool(RowTables):
    """The rows of `tables`, all free at first, including the null row, and the set of held rows."""

    def __init__(self, tables: RowTables) -> None:
        num_rows, _, pages_per_row = tables.pages.shape
        if num_rows < 2 or pages_per_row < 1:
            raise ValueError(
                f"a row pool needs at least 2 rows of 1 page, got {num_rows} of {pages_per_row}"
            )
        super().__init__(
            tables.pages,
            tables.first_pages,
            tables.lengths,
            tables.epoch,
            tables.states,
            tables.page_log,
            tables.first_row,
        )
        self.num_rows = num_rows
        self._free = list(range(num_rows - 1, NULL_ROW, -1))
        self._held = np.zeros(num_rows, np.bool_)

    def reset(self) -> None:
        """Free and clear every row, with new epochs."""
        for row in range(self.num_rows):
            self.unlist_pages(row)
        self.lengths.fill(0)
        self.first_pages.fill(0)
        self.states[:] = _NO_STATES[:, None]
        self.epoch += 1
        self._free = list(range(self.num_rows - 1, NULL_ROW, -1))
        self._held.fill(False)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_held(self) -> int:
        """Rows in use, counted independently of `num_free`."""
        return int(np.count_nonzero(self._held))

    def held_rows(self) -> Int32Array:
        return np.flatnonzero(self._held).astype(np.int32)

    def free_rows(self) -> Int32Array:
        """A copy of the free list, in no particular order."""
        return np.array(self._free, np.int32)

    def alloc(self) -> int:
        """Take a free row. Raises `LeaseError` if there is none: check `num_free` first."""
        if not self._free:
            raise LeaseError(f"all {self.num_rows - 1} rows are held")
        row = self._free.pop()
        self._held[row] = True
        return row

    def free(self, row: int) -> None:
        """Free a row; its lengths, page list and states are cleared."""
        if not self._held[row]:
            raise LeaseError(f"row {row} is given back, but is not held")
        self._held[row] = False
        self.unlist_pages(row)
        self.lengths[:, row] = 0
        self.first_pages[:, row] = 0
        self.states[:, row] = _NO_STATES
        self.epoch[row] += 1
        self._free.append(row)
