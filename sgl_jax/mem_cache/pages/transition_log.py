"""The latest moves of a pool's pages in order, with owners: taken, given to the tree, freed.

Every call to the allocator writes it, and only failed checks read it. It keeps the arrays that it
receives, up to a limit of calls and of pages. Its clock counts calls and reads no time.
"""

from collections import deque
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sgl_jax.core.step_plan import Int32Array

Action = Literal["take", "give to the tree", "free"]

MAX_CALLS = 4096
MAX_PAGES = 65_536


class Transition(NamedTuple):
    """One call: `owners` (one for all pages, or one each) performed `action` at tick `clock`."""

    clock: int
    action: Action
    owners: int | Int32Array
    pages: Int32Array


class TransitionLog:
    """The latest transitions, at most `MAX_CALLS` of them and about `MAX_PAGES` pages."""

    def __init__(self) -> None:
        self.clock = 0
        # Plain tuples of a transition's fields, because the log is written far more often than
        # read.
        self._ring: deque[tuple[int, Action, int | Int32Array, Int32Array]] = deque()
        self._num_pages = 0

    def note(self, action: Action, owners: int | Int32Array, pages: Int32Array) -> None:
        """Record a call and its arrays, which must not change afterwards. If a call has more than
        `MAX_PAGES` pages, only the first `MAX_PAGES` are recorded."""
        self.clock += 1
        if len(pages) > MAX_PAGES:
            pages = pages[:MAX_PAGES]
            owners = owners if isinstance(owners, int) else owners[:MAX_PAGES]
        self._ring.append((self.clock, action, owners, pages))
        self._num_pages += len(pages)
        while self._num_pages > MAX_PAGES or len(self._ring) > MAX_CALLS:
            self._num_pages -= len(self._ring.popleft()[3])

    def clear(self) -> None:
        """Remove all transitions; the clock continues."""
        self._ring.clear()
        self._num_pages = 0

    def all(self) -> list[Transition]:
        return [Transition(*fields) for fields in self._ring]

    def of(self, pages: NDArray[np.integer[Any]]) -> list[Transition]:
        found = []
        for transition in self.all():
            concerned = np.isin(transition.pages, pages)
            if concerned.any():
                owners = transition.owners
                if not isinstance(owners, int):
                    owners = owners[concerned]
                found.append(transition._replace(owners=owners, pages=transition.pages[concerned]))
        return found
