"""Which pages each row lists, by cache group. Plans carry the changes, never whole tables.

Page tables are most of a step's input, and hardly change from one step to the next. So a plan
carries the cells that changed since the plan before (`PageChanges`), and an executor keeps the
tables of all rows (`PageTables`), as it keeps their tokens.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sgl_jax.core.engine_sizes import EngineSizes


class PageChanges(NamedTuple):
    """Cells of the page tables of all ranks, int32[dp_size, num_rows, groups, pages_per_row].

    If a cell is listed twice, the last counts.
    """

    cells: NDArray[np.intp]  # [m] indices into the flattened tables
    pages: NDArray[np.int32]  # [m] page ids there from now on, 0 (the null page) for none

    @staticmethod
    def listing(
        sizes: EngineSizes, pages: Mapping[tuple[int, int], Sequence[Sequence[int]]]
    ) -> "PageChanges":
        """That rows, by (rank, row), list `pages` of each group, from their first column on."""
        num_groups = len(sizes.groups)
        cells = [
            ((dp_rank * sizes.num_rows + row) * num_groups + group) * sizes.pages_per_row + column
            for (dp_rank, row), by_group in pages.items()
            for group, listed in enumerate(by_group)
            for column in range(len(listed))
        ]
        told = [page for by_group in pages.values() for listed in by_group for page in listed]
        return PageChanges(np.array(cells, np.intp), np.array(told, np.int32))


NO_PAGE_CHANGES = PageChanges(np.zeros(0, np.intp), np.zeros(0, np.int32))


class PageTables:
    """The pages of every row of every rank, as far as plans have listed them; at first none.

    `pages` is int32[dp_size, num_rows, groups, pages_per_row], 0 beyond each row's last page and
    where a window has passed.
    """

    def __init__(self, sizes: EngineSizes) -> None:
        shape = (sizes.dp_size, sizes.num_rows, len(sizes.groups), sizes.pages_per_row)
        self.pages: NDArray[np.int32] = np.zeros(shape, np.int32)

    def apply(self, changes: PageChanges) -> None:
        """Take over the changes of a plan: of each that is launched, in order."""
        self.pages.reshape(-1)[changes.cells] = changes.pages
