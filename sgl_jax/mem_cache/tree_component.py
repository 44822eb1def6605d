"""What a kind of KV must provide to live on the prefix tree.

The tree core (`radix_tree.py`) knows tokens, edges and splits. What an edge is worth is known to
components, one for each cache group: FULL attention needs every page before a position, a window
those of its lookback. Each component sits at an index of `TreeNode.values` and `TreeNode.locks`
that is its own. Component 0 is always FULL's or, for models without a full layer, that of bare
tokens (`full_component.py`): its locks hold the path itself.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from sgl_jax.core.step_plan import Int32Array
from sgl_jax.mem_cache.tree_node import TreeNode


class PathStep(NamedTuple):
    """One edge of a walk down the tree and how many of its tokens matched, whole pages only."""

    node: TreeNode
    num_matched: int


# Of each cache group the first page of its row that a lease still lists and, if it is the tree's,
# has locked. None: windows have let go of nothing. Entries of FULL groups are not looked at.
FirstPages = Sequence[int] | Int32Array | None


class LeaseOffer(NamedTuple):
    """What a lease offers for the prefix [0, len(tokens)): components take what they lack."""

    owner: int  # row that owns the pages from `owned_from` on
    owned_from: int  # tokens; before it the pages already belong to the tree
    pages: Int32Array  # [groups, len(tokens) / page_size]; 0 where the lease has let go of a page
    node: TreeNode | None = None  # that the lease has locked, where `owned_from` ends
    namespace: str = ""  # the lease's
    first_pages: FirstPages = None  # what it still has of the lock on `node`, and wants below it


class LockedEnd(NamedTuple):
    """The lock of a lease: FULL's of the path to `node`, a window's from `first_pages` on."""

    node: TreeNode
    first_pages: FirstPages = None


class TreeComponent(Protocol):
    """The pages of one cache group on the tree. Counts are pages, of the pool number `pool`."""

    pool: int
    num_evictable: int  # pages on the tree that no lock holds
    num_protected: int  # and those that one holds

    def pages_of(self, nodes: Sequence[TreeNode]) -> Int32Array:
        """The values along `nodes`, in token order: a page each, 0 where there is none."""
        ...

    def absorb(self, node: TreeNode, offer: LeaseOffer) -> None:
        """Take over from `offer` what `node` lacks; it ends at token `node.end` of the offer."""
        ...

    def split(self, upper: TreeNode, lower: TreeNode) -> None:
        """`lower`'s edge lost its first `len(upper.key)` tokens to the new `upper`: divide."""
        ...

    def may_merge(self, upper: TreeNode, lower: TreeNode) -> bool:
        """Whether nothing that is known of `upper` tells it from `lower`, its only child."""
        ...

    def merge(self, upper: TreeNode, lower: TreeNode) -> None:
        """`lower`'s edge is about to take over that of `upper`, in front: join the values."""
        ...

    def lock(self, node: TreeNode, first_pages: FirstPages) -> None:
        """Keep what a lease that ends at `node` reads from eviction, until `unlock`."""
        ...

    def unlock(self, node: TreeNode, first_pages: FirstPages) -> None:
        """Undo one `lock(node, first_pages)`."""
        ...

    def move_lock(self, old: TreeNode, new: TreeNode, first_pages: FirstPages) -> None:
        """As `lock(new)` and `unlock(old)`, where `new` is `old` or lies below it."""
        ...

    def refresh(self, node: TreeNode) -> None:
        """`node`'s age, lock or children changed: bring eviction sets up to date."""
        ...

    def drop(self, node: TreeNode, keep_tokens: int) -> None:
        """Let go of what lies past `keep_tokens` of the edge; freed by `flush_dropped`."""
        ...

    def flush_dropped(self) -> None:
        """Free all that was dropped, in one call to the allocator."""
        ...

    def audit(self, nodes: Sequence[TreeNode], locks: Sequence[LockedEnd]) -> None:
        """Recompute every count and lock from scratch; raise `LedgerError` on a difference.

        `locks` lists the lock of every live lease, with repeats.
        """
        ...
