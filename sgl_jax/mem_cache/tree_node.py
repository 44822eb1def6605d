"""A node of the prefix tree, used by the tree core and the components."""

from collections.abc import Hashable
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from sgl_jax.core.step_plan import BoolArray, Int32Array
from sgl_jax.mem_cache.errors import LedgerError

_NO_HASHES = np.zeros(0, np.uint64)
_NO_POSITIONS = np.zeros(0, np.bool_)

_Scalar = TypeVar("_Scalar", bound=np.generic)


def front(values: NDArray[_Scalar], count: int) -> NDArray[_Scalar]:
    """Return the first `count` of an edge's values, one-dimensional; a view of `values` or a copy.

    Most leaves are shortened page by page. So the values are copied only if they need less than
    half of the memory that a view would keep.
    """
    kept = values[:count]
    if not count:
        return kept  # of a removed node
    whole = values.base if isinstance(values.base, np.ndarray) else values
    return kept if 2 * count >= len(whole) else kept.copy()


def joined(first: NDArray[_Scalar], second: NDArray[_Scalar]) -> NDArray[_Scalar]:
    """Return both in a new array, in less time than `np.concatenate` takes for short ones."""
    values = np.empty(len(first) + len(second), first.dtype)
    values[: len(first)], values[len(first) :] = first, second
    return values


def edge_key(page_size: int, start: int, tokens: Int32Array, namespace: str) -> bytes:
    """Return the key of the edge that begins with `tokens`, a page or more, in the children of a
    node that ends at `start`. The first page has a fixed length, so no two pairs of page and
    namespace share a key."""
    first_page = tokens[:page_size].tobytes()
    return first_page if start else first_page + namespace.encode()


class Retention(NamedTuple):
    """Whose path a node is on, and until when (by the policy's seconds) its client wants it kept.

    `holder` is None if the paths of several holders go through the node: the hints of one do not
    count there. A higher `level` stands for a longer retention.
    """

    holder: Hashable
    level: int = 0
    until_s: float = 0.0

    def joined(self, other: "Retention | None") -> "Retention":
        """Return the retention of a node on both paths: of one holder, the one that ends last."""
        if other is None:
            return self
        if other.holder != self.holder:
            return Retention(None)
        return max(self, other, key=lambda each: each.until_s)


class ReadTime:
    """The time, by the tree's clock, when a node's windows were last read; eviction lists it.
    `num_uses` is the node's number of uses when it was listed."""

    __slots__ = ("last_access", "node", "node_id", "num_uses")

    def __init__(self, node: "TreeNode", last_access: int) -> None:
        self.node = node
        self.node_id = node.node_id
        self.last_access = last_access
        self.num_uses = 0

    def __repr__(self) -> str:
        return f"ReadTime({self.last_access}, {self.node!r})"


class TreeNode:
    """A node and the edge that leads to it.

    `end` counts tokens from the root to the node. `child_key` is its key in its parent's
    `children`. `namespace` applies to its whole path. `page_hashes` has, for each page of the edge,
    the hash of the prefix up to the page's end. The eviction policy owns `num_uses`, `used_s`,
    `return_class` and `retention` (None before the end of a complete answer); `last_access`
    is a time of the tree's clock. `was_cut` tells that the edge once went on, so that no prompt is
    known to have ended at its end. Walks end before a node with `is_withdrawn`; all nodes below it
    are withdrawn too. The components own `values` and `locks`, each at its index. With windows,
    `tree/resumable.py` owns `read`, `runs` and `is_usable` (whether the end of each page of the
    edge is resumable).
    """

    __slots__ = (
        "__weakref__",
        "child_key",
        "children",
        "end",
        "is_usable",
        "is_withdrawn",
        "key",
        "last_access",
        "locks",
        "namespace",
        "node_id",
        "num_uses",
        "page_hashes",
        "parent",
        "read",
        "retention",
        "return_class",
        "runs",
        "used_s",
        "values",
        "was_cut",
    )

    read: ReadTime  # set by `start_reading`

    def __init__(
        self,
        node_id: int,
        key: Int32Array,
        parent: "TreeNode | None",
        num_components: int,
        *,
        child_key: bytes,
        namespace: str,
    ) -> None:
        self.node_id = node_id
        self.key = key
        self.parent = parent
        self.child_key = child_key
        self.namespace = namespace
        self.end: int = (parent.end if parent else 0) + len(key)
        self.children: dict[bytes, TreeNode] = {}
        self.last_access = 0
        self.num_uses = 0
        self.used_s = 0.0
        self.return_class = 0
        self.retention: Retention | None = None
        self.page_hashes: NDArray[np.uint64] = _NO_HASHES
        self.values: list[Any] = [None] * num_components
        self.locks: list[Any] = [0] * num_components
        self.is_withdrawn = False
        self.was_cut = False
        self.is_usable: BoolArray = _NO_POSITIONS
        self.runs: tuple[int, ...] = ()

    @property
    def holder(self) -> Hashable:
        """Return whose path it is; None also for several holders, or without a complete answer."""
        return None if self.retention is None else self.retention.holder

    @property
    def is_shared(self) -> bool:
        """Return whether complete answers of several holders go through the node."""
        return self.retention is not None and self.retention.holder is None

    def start_reading(self) -> None:
        """Keep a time of reading from now on, starting at the node's creation."""
        self.read = ReadTime(self, self.last_access)

    def __repr__(self) -> str:
        return f"TreeNode({self.node_id}, tokens {self.end - len(self.key)}..{self.end})"


def parent_of(node: TreeNode) -> TreeNode:
    """Return the parent of a node. Raise `LedgerError` for the root, which has no edge."""
    if node.parent is None:
        raise LedgerError(f"{node!r} is the root, which is never split, locked or evicted")
    return node.parent


def is_on_tree(node: TreeNode) -> bool:
    """Return whether a node (not the root) was neither removed nor merged into its child."""
    return node.parent is not None and node.parent.children.get(node.child_key) is node


def only_child(node: TreeNode) -> TreeNode | None:
    return next(iter(node.children.values())) if len(node.children) == 1 else None
