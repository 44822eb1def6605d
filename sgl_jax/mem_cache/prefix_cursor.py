"""How much of a token sequence a prefix tree holds, kept up to date while the tree changes.

A waiting request is tried in many steps, and between two of them the tree seldom changes where it
matters to that request. So instead of a lookup for each try, the tree keeps a cursor for it, on
the node where the walk along its tokens ended, and moves the cursor when that walk would end
elsewhere: a child was added that continues it, or what it had matched was evicted. A change of
the tree costs time for the cursors that it moves, and none for any other.

A node files its cursors under the key of the child that would continue them; under None are those
that no new child can continue, since they end within the edge or have no whole page left.
"""

from collections.abc import Callable, Iterable, Iterator

from sgl_jax.core.step_plan import Int32Array
from sgl_jax.mem_cache.errors import LedgerError
from sgl_jax.mem_cache.tree_component import PathStep
from sgl_jax.mem_cache.tree_node import TreeNode


class PrefixCursor:
    """A walk along `tokens` of a namespace, made by `PrefixCache.follow` and ended by `unfollow`.

    `length` counts the matched tokens, whole pages; `node` is the last node on the walk (the root
    if none matched, None without a tree). `tag` is the owner's and means nothing to the tree.
    """

    __slots__ = ("is_moved", "length", "namespace", "next_key", "node", "tag", "tokens")

    def __init__(self, tokens: Int32Array, namespace: str, tag: int) -> None:
        self.tokens = tokens
        self.namespace = namespace
        self.tag = tag
        self.length = 0
        self.node: TreeNode | None = None
        self.next_key: bytes | None = None  # of the child of `node` that would continue the walk
        self.is_moved = False  # since `take_moved` last answered it

    def __repr__(self) -> str:
        return f"PrefixCursor({self.length} of {len(self.tokens)} tokens, at {self.node!r})"


class CursorIndex:
    """All cursors of one tree. The tree reports each change of its shape.

    Args:
        page_size: tokens.
        root: of the tree.
        walk: `walk(tokens, namespace, below)` answers the path below a node that lies on it.
        key_of: `key_of(node, tokens, namespace)` is the key of the child of `node` where `tokens`
            go on.
    """

    def __init__(
        self,
        page_size: int,
        root: TreeNode,
        walk: Callable[[Int32Array, str, TreeNode], list[PathStep]],
        key_of: Callable[[TreeNode, Int32Array, str], bytes],
    ) -> None:
        self._page_size = page_size
        self._root = root
        self._walk = walk
        self._key_of = key_of
        self._on: dict[int, dict[bytes | None, dict[int, PrefixCursor]]] = {}  # by node id
        self._moved: list[PrefixCursor] = []

    def follow(
        self, tokens: Int32Array, namespace: str, tag: int, below: TreeNode | None
    ) -> PrefixCursor:
        """A new cursor, placed where the walk along `tokens` ends now.

        `below` is a node that is known to lie on it: what is above is not looked at.
        """
        cursor = PrefixCursor(tokens, namespace, tag)
        self._advance(cursor, below or self._root)
        return cursor

    def unfollow(self, cursor: PrefixCursor) -> None:
        """The cursor is not needed any more."""
        self._take_out(cursor)
        cursor.node = None

    def take_moved(self) -> list[PrefixCursor]:
        """The cursors whose length has changed since the last call, each once."""
        moved = [cursor for cursor in self._moved if cursor.node is not None]
        self._moved.clear()
        for cursor in moved:
            cursor.is_moved = False
        return moved

    # -- what the tree reports ----------------------------------------------------------------

    def child_added(self, parent: TreeNode, child: TreeNode) -> None:
        """`parent` has a new child, which has none: some cursors can go on into its edge."""
        start = parent.end
        for cursor in self._take_filed(parent, child.child_key):
            matched = common_prefix_len(child.key, cursor.tokens[start:])
            cursor.length = start + matched // self._page_size * self._page_size
            self._file(cursor, child)
            self._note_move(cursor)

    def node_split(self, upper: TreeNode, lower: TreeNode) -> None:
        """`lower`'s edge lost its beginning to the new `upper`: cursors that ended there move."""
        for cursor in self._take_filed(lower, None):
            is_above = cursor.length <= upper.end
            self._file(cursor, upper if is_above else lower)

    def nodes_merged(self, upper: TreeNode, lower: TreeNode) -> None:
        """`upper` became the beginning of its only child's edge: its cursors end within that."""
        for cursor in self._take_all(upper):
            self._file(cursor, lower)

    def leaf_trimmed(self, leaf: TreeNode, end: TreeNode) -> None:
        """The path to `leaf` ends at `end` from now on: `leaf`, shortened, or its parent."""
        for cursor in self._take_all(leaf):
            if cursor.length > end.end:
                cursor.length = end.end
                self._note_move(cursor)
            self._file(cursor, end)

    def audit(self) -> None:
        """Prove that each cursor is where a fresh walk ends. Raises `LedgerError`."""
        for node_id, filed in self._on.items():
            for next_key, cursors in filed.items():
                for cursor in cursors.values():
                    path = self._walk(cursor.tokens, cursor.namespace, self._root)
                    node = path[-1].node if path else self._root
                    length = sum(step.num_matched for step in path)
                    found = (node.node_id, length, self._lacking(node, length, cursor))
                    if found != (node_id, cursor.length, next_key) or cursor.node is not node:
                        raise LedgerError(f"{cursor!r} should be at {node!r}, length {length}")

    # -- inside -------------------------------------------------------------------------------

    def _advance(self, cursor: PrefixCursor, start: TreeNode) -> None:
        path = self._walk(cursor.tokens, cursor.namespace, start)
        cursor.length = start.end + sum(step.num_matched for step in path)
        self._file(cursor, path[-1].node if path else start)

    def _lacking(self, node: TreeNode, length: int, cursor: PrefixCursor) -> bytes | None:
        """The key of the child of `node` that would continue a walk of that length, if one can."""
        if length < node.end or len(cursor.tokens) - length < self._page_size:
            return None
        return self._key_of(node, cursor.tokens[length:], cursor.namespace)

    def _file(self, cursor: PrefixCursor, node: TreeNode) -> None:
        cursor.node = node
        cursor.next_key = self._lacking(node, cursor.length, cursor)
        filed = self._on.setdefault(node.node_id, {})
        filed.setdefault(cursor.next_key, {})[id(cursor)] = cursor

    def _take_out(self, cursor: PrefixCursor) -> None:
        assert cursor.node is not None, "the cursor was taken out before"
        filed = self._on[cursor.node.node_id]
        cursors = filed[cursor.next_key]
        del cursors[id(cursor)]
        if not cursors:
            del filed[cursor.next_key]
        if not filed:
            del self._on[cursor.node.node_id]

    def _take_filed(self, node: TreeNode, key: bytes | None) -> Iterable[PrefixCursor]:
        filed = self._on.get(node.node_id)
        if filed is None or key not in filed:
            return ()
        cursors = filed.pop(key)
        if not filed:
            del self._on[node.node_id]
        return cursors.values()

    def _take_all(self, node: TreeNode) -> Iterator[PrefixCursor]:
        for cursors in self._on.pop(node.node_id, {}).values():
            yield from cursors.values()

    def _note_move(self, cursor: PrefixCursor) -> None:
        if not cursor.is_moved:
            cursor.is_moved = True
            self._moved.append(cursor)


def common_prefix_len(a: Int32Array, b: Int32Array) -> int:
    """Length of the common prefix of two token arrays."""
    size = min(len(a), len(b))
    differing = a[:size] != b[:size]
    first = int(differing.argmax()) if size else 0
    return first if size and differing[first] else size
