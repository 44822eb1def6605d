"""Page tables of the rows, and their changes from one step to the next.

Page tables are the largest input of a step, but few cells change between steps. A plan therefore
carries only the changed cells (`PageChanges`), and the executor keeps the tables of all rows
(`PageTables`).
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sgl_jax.core.engine_sizes import EngineSizes


class PageChanges(NamedTuple):
    """Changed cells of the page tables, int32[dp_size, num_rows, groups, pages_per_row].

    If a cell is listed twice, the last entry counts.
    """

    cells: NDArray[np.intp]  # [m] indices into the flattened tables
    pages: NDArray[np.int32]  # [m] new page ids of these cells; 0 (the null page) for none

    @staticmethod
    def listing(
        sizes: EngineSizes, pages: Mapping[tuple[int, int], Sequence[Sequence[int]]]
    ) -> "PageChanges":
        """Return the changes that put `pages` into the first columns of rows. `pages` maps (rank,
        row) to the page ids of each group."""
        num_groups = len(sizes.groups)
        cells = [
            ((dp_rank * sizes.num_rows + row) * num_groups + group) * sizes.pages_per_row + column
            for (dp_rank, row), by_group in pages.items()
            for group, listed in enumerate(by_group)
            for column in range(len(listed))
        ]
        ids = [page for by_group in pages.values() for listed in by_group for page in listed]
        return PageChanges(np.array(cells, np.intp), np.array(ids, np.int32))


NO_PAGE_CHANGES = PageChanges(np.zeros(0, np.intp), np.zeros(0, np.int32))


class PageTables:
    """The page tables of all rows of all ranks; all cells are 0 at first.

    `pages` is int32[dp_size, num_rows, groups, pages_per_row]. Cells after a row's last page and
    before its sliding window are 0.
    """

    def __init__(self, sizes: EngineSizes) -> None:
        shape = (sizes.dp_size, sizes.num_rows, len(sizes.groups), sizes.pages_per_row)
        self.pages: NDArray[np.int32] = np.zeros(shape, np.int32)

    def apply(self, changes: PageChanges) -> None:
        """Apply the changes of a plan; call once for every launched plan, in launch order."""
        self.pages.reshape(-1)[changes.cells] = changes.pages
