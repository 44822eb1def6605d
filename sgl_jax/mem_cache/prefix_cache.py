"""What the memory of a rank asks of a prefix cache, and the cache that keeps nothing.

A prefix cache remembers the KV of token prefixes between requests. Matching is split in two:
`peek` only reads (routing, admission), `match_prefix` locks what it found and needs one `unlock`
for each call.

A prefix is kept under a namespace, "" by default, and found under that namespace alone.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sgl_jax.core.step_plan import Int32Array
from sgl_jax.mem_cache.errors import LedgerError
from sgl_jax.mem_cache.prefix_cursor import PrefixCursor
from sgl_jax.mem_cache.tree_component import LeaseOffer
from sgl_jax.mem_cache.tree_node import TreeNode


class PrefixMatch(NamedTuple):
    """A locked prefix: its length in tokens (whole pages), its pages, and the node locked.

    If a lock has moved there from a node on the way, `pages` are those behind that node.
    """

    length: int
    pages: Int32Array  # [length / page_size], less those in front of that node
    node: TreeNode | None  # None if length is 0: then nothing is locked


class PrefixCache(ABC):
    """Keeps prefixes of one rank. Counts are pages.

    Where a `start` is given, it is a node that the asking lease has locked, and known to lie on
    the path of the tokens: only what is below it is looked at.
    """

    @property
    @abstractmethod
    def num_evicted(self) -> int:
        """Pages given back by eviction since the start."""

    @property
    @abstractmethod
    def num_evictable(self) -> int:
        """Pages the cache could give back now."""

    @property
    @abstractmethod
    def num_protected(self) -> int:
        """Pages of the cache that live leases have locked."""

    @property
    @abstractmethod
    def num_locks(self) -> int:
        """Locks taken and not yet undone; a live lease has one, or none."""

    @property
    @abstractmethod
    def num_locked_tokens(self) -> int:
        """Prefix lengths of these locks, summed over the locks."""

    @abstractmethod
    def peek(self, tokens: Int32Array, namespace: str = "", start: TreeNode | None = None) -> int:
        """How many tokens `match_prefix` would find. Changes nothing, not even ages."""

    @abstractmethod
    def follow(
        self, tokens: Int32Array, namespace: str, tag: int, below: TreeNode | None = None
    ) -> PrefixCursor:
        """Keep track of how much of `tokens` the cache holds, until `unfollow`.

        `below` is a locked node that is known to lie on their path: only what follows it is looked
        at. `tag` is the caller's, for what `take_moved` answers.
        """

    @abstractmethod
    def unfollow(self, cursor: PrefixCursor) -> None:
        """End a cursor of `follow`, once."""

    @abstractmethod
    def take_moved(self) -> Sequence[PrefixCursor]:
        """The cursors whose length or place has changed since the last call."""

    @property
    @abstractmethod
    def followed_nodes(self) -> Sequence[TreeNode | None]:
        """The nodes where cursors are, by `PrefixCursor.place`; None where none is."""

    @abstractmethod
    def next_key(self, node: TreeNode | None, tokens: Int32Array, namespace: str) -> bytes | None:
        """The `next_key` of a cursor that ends at `node` (None: nothing matched), where `tokens`,
        at least a page, come next."""

    @abstractmethod
    def is_awaited(self, node: TreeNode | None, next_key: bytes | None) -> bool:
        """Whether what `next_key` tells to come behind `node` would be of use if it were accepted.

        So it is if the walk of a cursor ends there for want of it; or if the cache has it from
        elsewhere by now.
        """

    @abstractmethod
    def match_prefix(
        self, tokens: Int32Array, namespace: str = "", start: TreeNode | None = None
    ) -> PrefixMatch:
        """Find and lock the longest cached prefix of `tokens`; a lock of `start` moves there."""

    @abstractmethod
    def accept(self, tokens: Int32Array, offer: LeaseOffer) -> PrefixMatch | None:
        """Keep `tokens` (whole pages), taking over the offered pages that are new to the cache.

        Answers the prefix as the cache now holds it, or None if it keeps nothing. It is locked:
        the lock of `offer.node` moves there, if there is one, and `pages` are those behind it.
        """

    @abstractmethod
    def unlock(self, node: TreeNode) -> None:
        """Undo one lock taken by `match_prefix` or `accept`."""

    @abstractmethod
    def evict(self, num_pages: int) -> int:
        """Free exactly `num_pages`, or all that are not locked; returns how many."""

    @abstractmethod
    def reset(self) -> None:
        """Evict everything, and forget how it was used. Raises `LedgerError` if a lock is held."""

    @abstractmethod
    def pages_to(self, node: TreeNode) -> Int32Array:
        """The pages of the prefix that ends at `node`, in token order."""

    @abstractmethod
    def nodes(self) -> Sequence[TreeNode]:
        """All nodes that hold something, parents before children."""

    @abstractmethod
    def held_pages(self) -> Int32Array:
        """All pages the cache holds, in no particular order."""

    @abstractmethod
    def audit(self, locked_nodes: Sequence[TreeNode]) -> None:
        """Check the cache's own records against the locked node of every live lease.

        Raises `LedgerError` on a difference.
        """


class ChunkCache(PrefixCache):
    """Keeps nothing between requests: every lease owns all its pages to the end."""

    num_evicted = num_evictable = num_protected = num_locks = num_locked_tokens = 0
    followed_nodes: Sequence[TreeNode | None] = (None,)

    def peek(self, tokens: Int32Array, namespace: str = "", start: TreeNode | None = None) -> int:
        return 0

    def follow(
        self, tokens: Int32Array, namespace: str, tag: int, below: TreeNode | None = None
    ) -> PrefixCursor:
        return PrefixCursor(tokens, namespace, tag)

    def unfollow(self, cursor: PrefixCursor) -> None:
        """No tree leads to it."""

    def take_moved(self) -> Sequence[PrefixCursor]:
        return ()

    def next_key(self, node: TreeNode | None, tokens: Int32Array, namespace: str) -> bytes | None:
        return None

    def is_awaited(self, node: TreeNode | None, next_key: bytes | None) -> bool:
        return False

    def match_prefix(
        self, tokens: Int32Array, namespace: str = "", start: TreeNode | None = None
    ) -> PrefixMatch:
        return PrefixMatch(0, np.zeros(0, np.int32), None)

    def accept(self, tokens: Int32Array, offer: LeaseOffer) -> PrefixMatch | None:
        return None

    def unlock(self, node: TreeNode) -> None:
        raise LedgerError(f"{node!r} is unlocked, but ChunkCache never locks")

    def evict(self, num_pages: int) -> int:
        return 0

    def reset(self) -> None:
        """There is nothing to evict."""

    def pages_to(self, node: TreeNode) -> Int32Array:
        return np.zeros(0, np.int32)

    def nodes(self) -> Sequence[TreeNode]:
        return ()

    def held_pages(self) -> Int32Array:
        return np.zeros(0, np.int32)

    def audit(self, locked_nodes: Sequence[TreeNode]) -> None:
        if locked_nodes:
            raise LedgerError(f"ChunkCache never locks, yet leases hold {list(locked_nodes)}")
