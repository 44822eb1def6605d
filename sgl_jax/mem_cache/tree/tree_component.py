"""The interface of a kind of KV on the prefix tree.

The tree core (`radix_tree.py`) owns tokens, edges and splits. Components, one for each cache group,
own the values of edges: FULL attention needs every page before a position, a window only its
lookback. Each component has its own index in `TreeNode.values` and `TreeNode.locks`. Component 0 is
always FULL's or, for models without a full layer, `BareTokens` (`full_component.py`): its locks
hold the path itself.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from sgl_jax.core.step_plan import Int32Array
from sgl_jax.mem_cache.tree.tree_node import TreeNode


class PathStep(NamedTuple):
    """One edge of a walk down the tree and how many of its tokens matched, whole pages only."""

    node: TreeNode
    num_matched: int


# For each cache group, the first page of its row that a lease still lists and, if the tree owns it,
# has locked. None: no window page was released. Entries of FULL groups are ignored.
FirstPages = Sequence[int] | Int32Array | None


class LeaseOffer(NamedTuple):
    """The pages that a lease offers for the prefix [0, len(tokens)): components take missing
    ones."""

    owner: int  # row that owns the pages from `owned_from` on
    owned_from: int  # tokens; before it the pages already belong to the tree
    pages: Int32Array  # [groups, len(tokens) / page_size]; 0 for pages the lease has released
    node: TreeNode | None = None  # locked by the lease; `owned_from` is its end
    namespace: str = ""  # the lease's
    first_pages: FirstPages = None  # the first pages locked at `node`, and needed below it


class LockedEnd(NamedTuple):
    """A lease's lock: FULL locks the path to `node`, a window its pages from `first_pages` on."""

    node: TreeNode
    first_pages: FirstPages = None


class TreeComponent(Protocol):
    """The pages of one cache group on the tree. Counts are pages, of the pool number `pool`."""

    pool: int
    num_evictable: int  # pages on the tree without a lock
    num_protected: int  # pages on the tree with a lock

    def pages_of(self, nodes: Sequence[TreeNode]) -> Int32Array:
        """The values along `nodes`, in token order: a page each, 0 for absent pages."""
        ...

    def absorb(self, node: TreeNode, offer: LeaseOffer) -> None:
        """Take missing pages of `node` from `offer`; the node ends at token `node.end` of the
        offer."""
        ...

    def split(self, upper: TreeNode, lower: TreeNode) -> None:
        """`lower`'s edge lost its first `len(upper.key)` tokens to the new `upper`: divide."""
        ...

    def may_merge(self, upper: TreeNode, lower: TreeNode) -> bool:
        """Return whether nothing in the component distinguishes `upper` from its only child
        `lower`."""
        ...

    def merge(self, upper: TreeNode, lower: TreeNode) -> None:
        """`lower`'s edge is about to take over `upper`'s, in front: join the values."""
        ...

    def lock(self, node: TreeNode, first_pages: FirstPages) -> None:
        """Lock the pages that a lease ending at `node` reads, until `unlock`."""
        ...

    def unlock(self, node: TreeNode, first_pages: FirstPages) -> None: ...

    def move_lock(self, old: TreeNode, new: TreeNode, first_pages: FirstPages) -> None:
        """Equivalent to `lock(new)` and `unlock(old)`, with `new` equal to `old` or below it."""
        ...

    def refresh(self, node: TreeNode) -> None:
        """`node`'s age, lock or children changed: update the eviction sets."""
        ...

    def drop(self, node: TreeNode, keep_tokens: int) -> None:
        """Drop the pages past `keep_tokens` of the edge; `flush_dropped` frees them."""
        ...

    def flush_dropped(self) -> None:
        """Free all dropped pages, in one call to the allocator."""
        ...

    def audit(self, nodes: Sequence[TreeNode], locks: Sequence[LockedEnd]) -> None:
        """Recompute every count and lock from scratch; raise `LedgerError` on a difference.

        `locks` lists the lock of every live lease, with repeats.
        """
        ...
