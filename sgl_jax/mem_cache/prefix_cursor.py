"""How much of a token sequence a prefix tree holds, kept up to date while the tree changes.

A waiting request is tried in many steps, and between two of them the tree seldom changes where it
matters to that request. So instead of a lookup for each try, the tree keeps a cursor for it, on
the node where the walk along its tokens ended, and moves the cursor when that walk would end
elsewhere: a child was added that continues it, or what it had matched was evicted. A change of
the tree costs time for the cursors that it moves, and none for any other.

A node files its cursors under the key of the child that would continue them; under None are those
that no new child can continue, since they end within the edge or have no whole page left.

Where there are windows, less may be usable than matched. A cursor then also watches the nodes from
that where its usable prefix ends to that where its walk does: it is measured anew when what can be
resumed in one of these changes.
"""

from collections.abc import Callable, Iterable
from itertools import islice

from sgl_jax.core.compiled import compiled
from sgl_jax.core.step_plan import Int32Array
from sgl_jax.mem_cache.errors import LedgerError
from sgl_jax.mem_cache.tree_component import PathStep
from sgl_jax.mem_cache.tree_node import TreeNode


class PrefixCursor:
    """A walk along `tokens` of a namespace, made by `CursorIndex.follow` and ended by `unfollow`.

    `length` counts the tokens that a match would find, whole pages; `matched` those that the walk
    went along, which are no fewer; `node` is the last node on the walk (the root
    if none matched, None when it was ended). `place` is a small number, the same for all cursors
    of one tree at that node: see `CursorIndex.nodes`. `tag` is the owner's and means nothing to the
    tree.
    """

    __slots__ = (
        *("is_moved", "length", "matched", "namespace", "next_key", "node", "place", "tag"),
        *("tokens", "watched"),
    )

    def __init__(self, tokens: Int32Array, namespace: str, tag: int) -> None:
        self.tokens = tokens
        self.namespace = namespace
        self.tag = tag
        self.length = 0
        self.matched = 0
        self.watched: list[TreeNode] = []
        self.node: TreeNode | None = None
        self.place = 0
        self.next_key: bytes | None = None  # of the child of `node` that would continue the walk
        self.is_moved = False  # to another length or place since `take_moved` last answered it

    def __repr__(self) -> str:
        return f"PrefixCursor({self.length} of {len(self.tokens)} tokens, at {self.node!r})"


class _Stop:
    """A node where cursors are, filed by the key of the child that would continue them."""

    __slots__ = ("filed", "node", "place")

    def __init__(self, node: TreeNode, place: int) -> None:
        self.node = node
        self.place = place
        self.filed: dict[bytes | None, dict[int, PrefixCursor]] = {}


class CursorIndex:
    """All cursors of one tree. The tree reports each change of its shape.

    Args:
        page_size: tokens.
        root: of the tree.
        walk: `walk(tokens, namespace, below)` answers the path below a node that lies on it.
        key_of: `key_of(node, tokens, namespace)` is the key of the child of `node` where `tokens`
            go on.
        usable_len: `usable_len(node, matched)` answers how much can be resumed of a walk of that
            length, and the nodes where that was looked for. None: all of it always.
    """

    def __init__(
        self,
        page_size: int,
        root: TreeNode,
        walk: Callable[[Int32Array, str, TreeNode], list[PathStep]],
        key_of: Callable[[TreeNode, Int32Array, str], bytes],
        usable_len: Callable[[TreeNode, int], tuple[int, list[TreeNode]]] | None = None,
    ) -> None:
        self._page_size = page_size
        self._root = root
        self._walk = walk
        self._key_of = key_of
        self._usable_len = usable_len
        self._watchers: dict[int, dict[int, PrefixCursor]] = {}  # by node id
        self._unmeasured: dict[int, PrefixCursor] = {}  # whose walk ends elsewhere now
        self._stops: dict[int, _Stop] = {}  # by node id
        # The nodes of all stops, by place; None where none is.
        self.nodes: list[TreeNode | None] = []
        self._free_places: list[int] = []
        self._moved: list[PrefixCursor] = []

    def follow(
        self, tokens: Int32Array, namespace: str, tag: int, below: TreeNode | None = None
    ) -> PrefixCursor:
        """A new cursor, placed where the walk along `tokens` ends now; to be ended by `unfollow`.

        `below` is a locked node that is known to lie on it: what is above is not looked at.
        `tag` is for who asks `take_moved`.
        """
        cursor = PrefixCursor(tokens, namespace, tag)
        self._advance(cursor, below or self._root)
        return cursor

    def unfollow(self, cursor: PrefixCursor) -> None:
        """The cursor is not needed any more."""
        self._take_out(cursor)
        cursor.node = None
        if self._usable_len is not None:
            self._unwatch(cursor)
            self._unmeasured.pop(id(cursor), None)

    def take_moved(self) -> list[PrefixCursor]:
        """The cursors whose length or place has changed since the last call, each once."""
        if not self._moved:
            return []
        moved = [cursor for cursor in self._moved if cursor.node is not None]
        self._moved.clear()
        for cursor in moved:
            cursor.is_moved = False
        return moved

    def has_filed(self, node: TreeNode, key: bytes | None) -> bool:
        """Whether a child of `node` under `key` would move a cursor."""
        stop = self._stops.get(node.node_id)
        return stop is not None and key in stop.filed

    def filed(self, node: TreeNode, key: bytes | None, most: int) -> list[PrefixCursor]:
        """Some of the cursors, `most` of them at most, that a child of `node` under `key` would
        move."""
        stop = self._stops.get(node.node_id)
        cursors = {} if stop is None else stop.filed.get(key, {})
        return list(islice(cursors.values(), most))

    def num_alike(self, cursor: PrefixCursor, start: int, most: int) -> int:
        """How many cursors, `most` at most, have the page of `cursor` behind its first `start`
        tokens, and cannot resume it: its own included.

        `start` is where its walk ends, or the end of a node between that and its `length`.
        """
        if start < cursor.matched:
            below = next(node for node in cursor.watched if node.end - len(node.key) == start)
            return min(len(self._watchers[below.node_id]), most)
        assert cursor.node is not None, "the cursor was taken out before"
        return min(len(self._stops[cursor.node.node_id].filed[cursor.next_key]), most)

    # -- what the tree reports ----------------------------------------------------------------

    def child_added(self, parent: TreeNode, child: TreeNode) -> None:
        """`parent` has a new child, which has none: some cursors can go on into its edge."""
        start = parent.end
        for cursor in self._take_filed(parent, child.child_key):
            matched = common_prefix_len(child.key, cursor.tokens[start : child.end])
            self._move(cursor, child, start + matched // self._page_size * self._page_size)

    def node_split(self, upper: TreeNode, lower: TreeNode) -> None:
        """`lower`'s edge lost its beginning to the new `upper`: cursors that ended there move."""
        for cursor in self._take_filed(lower, None):
            is_above = cursor.matched <= upper.end
            self._move(cursor, upper if is_above else lower, cursor.matched)
        self._measure_watchers(lower)

    def nodes_merged(self, upper: TreeNode, lower: TreeNode) -> None:
        """`upper` became the beginning of its only child's edge: its cursors end within that."""
        for cursor in self._take_all(upper):
            self._move(cursor, lower, cursor.matched)
        self._measure_watchers(upper)

    def leaf_trimmed(self, leaf: TreeNode, end: TreeNode) -> None:
        """The path to `leaf` ends at `end` from now on: `leaf`, shortened, or its parent."""
        for cursor in self._take_all(leaf):
            self._move(cursor, end, min(cursor.matched, end.end))

    def measure(self, nodes: Iterable[TreeNode]) -> None:
        """What can be resumed in `nodes` has changed, or walks have moved: measure what that
        concerns. To be called at the end of each change of a tree with windows."""
        for node in nodes:
            self._measure_watchers(node)
        while self._unmeasured:
            _, cursor = self._unmeasured.popitem()
            before = cursor.length
            self._measure(cursor)
            if cursor.length != before and not cursor.is_moved:
                cursor.is_moved = True
                self._moved.append(cursor)

    def audit(self) -> None:
        """Prove that each cursor is where a fresh walk ends. Raises `LedgerError`."""
        for node_id, stop in self._stops.items():
            if self.nodes[stop.place] is not stop.node:
                raise LedgerError(f"{stop.node!r} is not listed at its place {stop.place}")
            for next_key, cursors in stop.filed.items():
                for cursor in cursors.values():
                    path = self._walk(cursor.tokens, cursor.namespace, self._root)
                    node = path[-1].node if path else self._root
                    matched = sum(step.num_matched for step in path)
                    found = (node.node_id, matched, self._lacking(node, matched, cursor))
                    is_there = cursor.node is node and cursor.place == stop.place
                    if found != (node_id, cursor.matched, next_key) or not is_there:
                        raise LedgerError(f"{cursor!r} should be at {node!r}, length {matched}")
                    self._audit_length(cursor)
        num_watched = sum(map(len, self._watchers.values()))
        if num_watched != sum(len(each.watched) for each in self._all()):
            raise LedgerError("nodes are watched for cursors that do not say so")

    # -- inside -------------------------------------------------------------------------------

    def _advance(self, cursor: PrefixCursor, start: TreeNode) -> None:
        path = self._walk(cursor.tokens, cursor.namespace, start)
        cursor.matched = start.end + sum(step.num_matched for step in path)
        self._file(cursor, path[-1].node if path else start)
        self._measure(cursor)

    def _measure(self, cursor: PrefixCursor) -> None:
        """Say how much of the walk can be resumed."""
        if self._usable_len is None or cursor.node is None:
            cursor.length = cursor.matched
            return
        self._unwatch(cursor)
        cursor.length, cursor.watched = self._usable_len(cursor.node, cursor.matched)
        for node in cursor.watched:
            self._watchers.setdefault(node.node_id, {})[id(cursor)] = cursor

    def _unwatch(self, cursor: PrefixCursor) -> None:
        for node in cursor.watched:
            watchers = self._watchers[node.node_id]
            del watchers[id(cursor)]
            if not watchers:
                del self._watchers[node.node_id]
        cursor.watched = []

    def _measure_watchers(self, node: TreeNode) -> None:
        self._unmeasured.update(self._watchers.get(node.node_id, ()))

    def _audit_length(self, cursor: PrefixCursor) -> None:
        """What can be resumed is what was measured last, and each change of it would be told."""
        length = cursor.matched
        seen: list[TreeNode] = []
        if self._usable_len is not None and cursor.node is not None:
            length, seen = self._usable_len(cursor.node, cursor.matched)
        is_told = all(id(cursor) in self._watchers.get(node.node_id, ()) for node in seen)
        if cursor.length != length or not is_told or cursor.watched != seen:
            raise LedgerError(f"{cursor!r}: {length} tokens can be resumed, in {seen}")

    def _all(self) -> Iterable[PrefixCursor]:
        return (
            cursor
            for stop in self._stops.values()
            for cursors in stop.filed.values()
            for cursor in cursors.values()
        )

    def _lacking(self, node: TreeNode, length: int, cursor: PrefixCursor) -> bytes | None:
        """The key of the child of `node` that would continue a walk of that length, if one can."""
        if length < node.end or len(cursor.tokens) - length < self._page_size:
            return None
        return self._key_of(node, cursor.tokens[length:], cursor.namespace)

    def _move(self, cursor: PrefixCursor, node: TreeNode, length: int) -> None:
        """File a cursor that was taken out, at another place or matched length than before."""
        before = cursor.length, cursor.place
        cursor.matched = length
        self._file(cursor, node)
        if self._usable_len is None:
            cursor.length = length
        else:
            self._unmeasured[id(cursor)] = cursor
            length = cursor.length
        if not cursor.is_moved and (length, cursor.place) != before:
            cursor.is_moved = True
            self._moved.append(cursor)

    def _file(self, cursor: PrefixCursor, node: TreeNode) -> None:
        stop = self._stops.get(node.node_id) or self._new_stop(node)
        cursor.node, cursor.place = node, stop.place
        cursor.next_key = self._lacking(node, cursor.matched, cursor)
        stop.filed.setdefault(cursor.next_key, {})[id(cursor)] = cursor

    def _new_stop(self, node: TreeNode) -> _Stop:
        if not self._free_places:
            self._free_places.append(len(self.nodes))
            self.nodes.append(None)
        stop = _Stop(node, self._free_places.pop())
        self._stops[node.node_id] = stop
        self.nodes[stop.place] = node
        return stop

    def _take_out(self, cursor: PrefixCursor) -> None:
        assert cursor.node is not None, "the cursor was taken out before"
        stop = self._stops[cursor.node.node_id]
        cursors = stop.filed[cursor.next_key]
        del cursors[id(cursor)]
        if not cursors:
            del stop.filed[cursor.next_key]
        self._close_if_empty(stop)

    def _take_filed(self, node: TreeNode, key: bytes | None) -> Iterable[PrefixCursor]:
        stop = self._stops.get(node.node_id)
        if stop is None or key not in stop.filed:
            return ()
        cursors = stop.filed.pop(key)
        self._close_if_empty(stop)
        return cursors.values()

    def _take_all(self, node: TreeNode) -> list[PrefixCursor]:
        stop = self._stops.get(node.node_id)
        if stop is None:
            return []
        cursors = [cursor for filed in stop.filed.values() for cursor in filed.values()]
        stop.filed.clear()
        self._close_if_empty(stop)
        return cursors

    def _close_if_empty(self, stop: _Stop) -> None:
        if not stop.filed:
            del self._stops[stop.node.node_id]
            self.nodes[stop.place] = None
            self._free_places.append(stop.place)


@compiled("(int32[::1], int32[::1])")
def common_prefix_len(a: Int32Array, b: Int32Array) -> int:
    """Length of the common prefix of two token arrays."""
    size = min(len(a), len(b))
    for i in range(size):
        if a[i] != b[i]:
            return i
    return size
