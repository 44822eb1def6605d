"""The places of live cursors on a prefix tree: by node, and by index in a column.

At most one cursor is at the end of a node, because the walks that continue from there are its
children. Any number of cursors may be within the node's edge.
"""

from sgl_jax.mem_cache.tree.prefix_cursor import PrefixCursor
from sgl_jax.mem_cache.tree_node import TreeNode


class _Stop:
    """A node, at `place` in `CursorPositions.nodes`, with live cursors at its end or edge."""

    __slots__ = ("at_end", "node", "place", "within")

    def __init__(self, node: TreeNode, place: int) -> None:
        self.node = node
        self.place = place
        self.at_end: PrefixCursor | None = None
        self.within: dict[int, PrefixCursor] = {}

    def cursors(self) -> list[PrefixCursor]:
        at_end = [] if self.at_end is None else [self.at_end]
        return [*at_end, *self.within.values()]


class CursorPositions:
    """The places of a tree's cursors. `nodes` holds the node of each place, None if it is unused.
    To change a cursor's `at` or `reached`, take it out before and put it back after."""

    def __init__(self) -> None:
        self.nodes: list[TreeNode | None] = []
        self._free_places: list[int] = []
        self._by_node: dict[int, _Stop] = {}  # by node id

    def __len__(self) -> int:
        return sum(len(stop.cursors()) for stop in self._by_node.values())

    def put(self, cursor: PrefixCursor, node: TreeNode) -> int:
        """Put the cursor on `node`, at its length `reached`; return the node's place."""
        stop = self._by_node.get(node.node_id) or self._new_stop(node)
        if cursor.reached == node.end:
            stop.at_end = cursor
        else:
            stop.within[cursor.number] = cursor
        return stop.place

    def take_out(self, cursor: PrefixCursor) -> None:
        assert cursor.at is not None, "the cursor is not live"
        stop = self._by_node[cursor.at.node_id]
        if stop.at_end is cursor:
            stop.at_end = None
        else:
            del stop.within[cursor.number]
        if stop.at_end is None and not stop.within:
            del self._by_node[stop.node.node_id]
            self.nodes[stop.place] = None
            self._free_places.append(stop.place)

    def at_end(self, node: TreeNode) -> PrefixCursor | None:
        stop = self._by_node.get(node.node_id)
        return None if stop is None else stop.at_end

    def cursors(self, node: TreeNode) -> list[PrefixCursor]:
        stop = self._by_node.get(node.node_id)
        return [] if stop is None else stop.cursors()

    def place(self, cursor: PrefixCursor) -> int | None:
        """Return the place of a live cursor; None if it is not listed at its node."""
        node = cursor.node
        stop = self._by_node.get(node.node_id)
        if stop is None or self.nodes[stop.place] is not node:
            return None
        is_at_end = cursor.reached == node.end
        if (stop.at_end is cursor) != is_at_end or (cursor.number in stop.within) == is_at_end:
            return None
        return stop.place

    def _new_stop(self, node: TreeNode) -> _Stop:
        if not self._free_places:
            self._free_places.append(len(self.nodes))
            self.nodes.append(None)
        stop = _Stop(node, self._free_places.pop())
        self._by_node[node.node_id] = stop
        self.nodes[stop.place] = node
        return stop
