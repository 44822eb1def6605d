"""The pages of tokens that enter and leave a prefix tree, for routers outside the process.

A block is a page of tokens together with all tokens before it. Its name is the hash of these tokens
(`TreeNode.page_hashes`), which also depends on the namespace.
"""

from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from sgl_jax.core.step_plan import Int32Array


class BlocksStored(NamedTuple):
    """Consecutive blocks stored in the tree after the block `parent`, if any. `tokens` int32[n *
    page_size] are the tokens of their pages."""

    parent: int | None
    hashes: NDArray[np.uint64]
    tokens: Int32Array


class BlocksRemoved(NamedTuple):
    """Blocks removed from the tree."""

    hashes: NDArray[np.uint64]


class BlocksCleared(NamedTuple):
    """All blocks were removed from the tree."""


BlockEvent: TypeAlias = BlocksStored | BlocksRemoved | BlocksCleared


class BlockLog:
    """Collects the events of one rank's tree, in order, until they are taken."""

    def __init__(self) -> None:
        self._events: list[BlockEvent] = []

    def stored(self, parent: int | None, hashes: NDArray[np.uint64], tokens: Int32Array) -> None:
        self._events.append(BlocksStored(parent, hashes, tokens))

    def removed(self, hashes: NDArray[np.uint64]) -> None:
        self._events.append(BlocksRemoved(hashes))

    def cleared(self) -> None:
        self._events.append(BlocksCleared())

    def take(self) -> list[BlockEvent]:
        events, self._events = self._events, []
        return events
