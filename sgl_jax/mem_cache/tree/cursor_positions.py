"""The places of live cursors on a prefix tree: by node, and by index in a column.

At most one cursor is at the end of a node, because the walks that continue from there are its
children. Any number of cursors may be within the node's edge.
"""

from sgl_jax.mem_cache.tree.prefix_cursor import LiveCursor
from sgl_jax.mem_cache.tree_node import TreeNode


class CursorPositions:
    """The places of a tree's cursors. `nodes` holds the node of each place, None if it is unused.
    To change a cursor's `at` or `reached`, take it out before and put it back after."""

    def __init__(self) -> None:
        self.nodes: list[TreeNode | None] = []
        self._free_places: list[int] = []
        # By node id, for nodes with cursors.
        self._places: dict[int, int] = {}
        self._cursors: dict[int, dict[int, LiveCursor]] = {}  # by number
        self._at_end: dict[int, LiveCursor] = {}

    def __len__(self) -> int:
        return sum(map(len, self._cursors.values()))

    def put(self, cursor: LiveCursor, node: TreeNode) -> int:
        """Put the cursor on `node`, at its length `reached`; return the node's place."""
        node_id = node.node_id
        if node_id not in self._places:
            if not self._free_places:
                self._free_places.append(len(self.nodes))
                self.nodes.append(None)
            place = self._places[node_id] = self._free_places.pop()
            self.nodes[place], self._cursors[node_id] = node, {}
        self._cursors[node_id][cursor.number] = cursor
        if cursor.reached == node.end:
            self._at_end[node_id] = cursor
        return self._places[node_id]

    def take_out(self, cursor: LiveCursor) -> None:
        node_id = cursor.at.node_id
        del self._cursors[node_id][cursor.number]
        if self._at_end.get(node_id) is cursor:
            del self._at_end[node_id]
        if not self._cursors[node_id]:
            del self._cursors[node_id]
            place = self._places.pop(node_id)
            self.nodes[place] = None
            self._free_places.append(place)

    def at_end(self, node: TreeNode) -> LiveCursor | None:
        return self._at_end.get(node.node_id)

    def cursors(self, node: TreeNode) -> list[LiveCursor]:
        return list(self._cursors.get(node.node_id, {}).values())

    def place(self, cursor: LiveCursor) -> int | None:
        """Return the place of a live cursor; None if it is not listed at its node."""
        node, node_id = cursor.at, cursor.at.node_id
        place = self._places.get(node_id)
        is_at_end = self._at_end.get(node_id) is cursor
        is_listed = self._cursors.get(node_id, {}).get(cursor.number) is cursor
        if place is None or self.nodes[place] is not node or not is_listed:
            return None
        return place if is_at_end == (cursor.reached == node.end) else None
