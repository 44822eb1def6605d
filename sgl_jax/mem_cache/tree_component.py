"""What a kind of KV must provide to live on the prefix tree.

The tree core (`radix_tree.py`) knows tokens, edges and splits. What an edge is worth is known to
components: FULL attention keeps pages for every token of the edge; a sliding window may have let
go of old ones; linear attention keeps a state snapshot at some node ends. Each component sits at
an index of `TreeNode.values` and `TreeNode.locks` that is its own.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from sgl_jax.core.step_plan import Int32Array
from sgl_jax.mem_cache.tree_node import TreeNode


class PathStep(NamedTuple):
    """One edge of a walk down the tree and how many of its tokens matched, whole pages only."""

    node: TreeNode
    num_matched: int


class LeaseOffer(NamedTuple):
    """What a lease offers for the prefix [0, len(tokens)): components take what they lack."""

    owner: int  # row that owns the pages from `owned_from` on
    owned_from: int  # tokens; before it the pages already belong to the tree
    pages: Int32Array  # [len(tokens) / page_size] FULL pages
    node: TreeNode | None = None  # that the lease has locked, where `owned_from` ends
    namespace: str = ""  # the lease's


class TreeComponent(Protocol):
    """One kind of value on the tree. Counts are in the component's own units (pages, slots)."""

    num_evictable: int  # units on the tree that no lock holds
    num_protected: int  # and those that one holds

    def usable_len(self, path: Sequence[PathStep], length: int) -> int:
        """The longest prefix of at most `length` matched tokens that this component can serve.

        `length` is page-aligned and so is the answer. Must not grow when `length` shrinks: the
        tree asks all components in turn until none shortens the prefix any more.
        """
        ...

    def absorb(self, node: TreeNode, offer: LeaseOffer) -> None:
        """Take over from `offer` what `node` lacks; it ends at token `node.end` of the offer."""
        ...

    def split(self, upper: TreeNode, lower: TreeNode) -> None:
        """`lower`'s edge lost its first `len(upper.key)` tokens to the new `upper`: divide."""
        ...

    def may_merge(self, upper: TreeNode, lower: TreeNode) -> bool:
        """Whether `upper` has no lock and no value of its own: what `lower`, its only child, says
        would be said of both edges as one."""
        ...

    def merge(self, upper: TreeNode, lower: TreeNode) -> None:
        """`lower`'s edge is about to take over that of `upper`, in front: join the values."""
        ...

    def lock(self, node: TreeNode) -> None:
        """Keep what a lease that ends at `node` reads from eviction, until `unlock`."""
        ...

    def unlock(self, node: TreeNode) -> None:
        """Undo one `lock(node)`."""
        ...

    def move_lock(self, old: TreeNode, new: TreeNode) -> None:
        """As `lock(new)` and `unlock(old)`, where `new` is `old` or lies below it."""
        ...

    def refresh(self, node: TreeNode) -> None:
        """`node`'s age, lock or children changed: bring eviction sets up to date."""
        ...

    def drop(self, node: TreeNode, keep_tokens: int) -> None:
        """Let go of what lies past `keep_tokens` of the edge; freed by `flush_dropped`."""
        ...

    def tombstone(self, node: TreeNode) -> None:
        """Let go of this component's value at `node` while the edge stays; for `flush_dropped`."""
        ...

    def flush_dropped(self) -> None:
        """Free all that was dropped, in one call to the allocator."""
        ...

    def next_victim(self, num_units: int, now: int) -> tuple[TreeNode, int] | None:
        """The node to take from next to free `num_units`, and the tokens of its edge to keep.

        `now` is the clock of which `last_access` is an earlier reading.
        Only a leaf may keep less than its whole edge; to keep all of it asks for `tombstone`.
        """
        ...

    def audit(self, nodes: Sequence[TreeNode], leaves_of_leases: Sequence[TreeNode]) -> None:
        """Recompute every count and lock from scratch; raise `LedgerError` on a difference.

        `leaves_of_leases` lists the locked node of every live lease, with repeats.
        """
        ...
