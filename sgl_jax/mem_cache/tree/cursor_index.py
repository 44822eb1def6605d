"""Cursors on a prefix tree that changes.

The scheduler tries to admit a waiting request in many steps, and the tree rarely changes near its
prefix between two tries. So the tree keeps a cursor at the end of each walk instead of repeating
the lookup, and moves the cursor when the walk would end elsewhere. A change of the tree costs time
for the live cursors (`prefix_cursor.py`) on the changed nodes, however many prompts continue them.

With windows, the usable length may be shorter than the match. Then a live cursor also watches the
nodes between the end of its usable prefix and the end of its walk, and is measured again when the
resumable positions of one of these nodes change.
"""

from collections.abc import Callable, Iterable
from itertools import chain, islice

from sgl_jax.core.step_plan import Int32Array
from sgl_jax.mem_cache.errors import LedgerError
from sgl_jax.mem_cache.tree.cursor_positions import CursorPositions
from sgl_jax.mem_cache.tree.prefix_cursor import (
    LIVE,
    NO_PREFIX,
    LiveCursor,
    PrefixCursor,
    SharedPrefix,
    common_prefix_len,
)
from sgl_jax.mem_cache.tree.prompt_tree import RankPrompts
from sgl_jax.mem_cache.tree_node import TreeNode, edge_key


class CursorIndex:
    """The live cursors of one tree, which reports each change of its shape.

    Args:
        page_size: page size in tokens.
        root: root of the tree.
        walk: `walk(tokens, namespace, below)` walks from a node on the path. It returns the node
            with the edge in which the walk ends, and the tokens matched from the root.
        prompts: the waiting prompts, which report each change of their shared prefixes.
        usable_len: `usable_len(node, matched)` returns the resumable length of a walk of that
            length, and the nodes searched. None if the whole walk is always resumable.
    """

    def __init__(
        self,
        page_size: int,
        root: TreeNode,
        walk: Callable[[Int32Array, str, TreeNode], tuple[TreeNode, int]],
        prompts: RankPrompts,
        usable_len: Callable[[TreeNode, int], tuple[int, list[TreeNode]]] | None = None,
    ) -> None:
        self._page_size = page_size
        self._root = root
        self._walk = walk
        self._usable_len = usable_len
        self._watchers: dict[int, dict[int, LiveCursor]] = {}  # by node id, by number
        self._unmeasured: dict[int, LiveCursor] = {}  # their walks end elsewhere now
        self._stops = CursorPositions()
        self.nodes = self._stops.nodes  # the nodes of live cursors, by place
        self._has_moved = False
        tree, self._dp_rank = prompts
        self._first, self._columns = tree.first, tree.columns
        tree.join(self._dp_rank, self)
        self._file(self._first, root, 0)
        self._measure_all()

    # -- prompts come and go ------------------------------------------------------------------

    def enter(self, prefix: SharedPrefix, above: LiveCursor, known: TreeNode | None) -> None:
        node, start = above.at, above.reached
        if known is not None and node.end < known.end <= prefix.end:
            node, start = known, known.end
            self._file(prefix, node, start)
        elif start < node.end:
            self._go_along(prefix, node, start)
            start = PrefixCursor(prefix, self._dp_rank).matched
        if start == node.end:
            node, reached = self._walk(prefix.tokens, prefix.namespace, node)
            if reached > start:
                self._file(prefix, node, reached)
        self._measure_all()

    def divide(self, upper: SharedPrefix, lower: LiveCursor) -> None:
        if lower.reached <= upper.end:
            self.move_to(upper, lower)
            return
        node = lower.at
        while node.parent is not None and node.parent.end >= upper.end:
            node = node.parent
        self._file(upper, node, upper.end)
        self._measure_all()

    def move_to(self, prefix: SharedPrefix, cursor: LiveCursor) -> None:
        self.leave(cursor)
        # At the same place: the last place freed is taken first.
        self._file(prefix, cursor.at, cursor.reached)
        self._measure_all()

    def leave(self, cursor: LiveCursor) -> None:
        parent = cursor.prefix.parent
        assert parent is not None, "the first prefix is live"
        self._stops.take_out(cursor)
        self._unwatch(cursor)
        self._unmeasured.pop(cursor.number, None)
        del cursor.prefix.live[self._dp_rank]
        self._columns.above[self._dp_rank, cursor.number] = parent.number

    def take_has_moved(self) -> bool:
        """Return whether a cursor's length or place may have changed since the last call."""
        has_moved, self._has_moved = self._has_moved, False
        return has_moved

    def waiting_for(self, node: TreeNode, key: bytes | None) -> SharedPrefix | None:
        """Return the shared prefix that a new child of `node` under `key` would continue."""
        cursor = self._stops.at_end(node)
        if cursor is None or key is None:
            return None
        prefix = cursor.prefix
        if prefix.end == node.end:
            return prefix.children.get(key)
        return prefix if prefix.key_at(node.end) == key else None

    def is_awaited(self, node: TreeNode | None, key: bytes | None) -> bool:
        """Return whether a child under `key` after `node` (None: the root) would be useful if it
        became cached: a walk ends there without it, or another request has cached it by now."""
        parent = node or self._root
        is_awaited = key in parent.children or self.waiting_for(parent, key) is not None
        return is_awaited and not parent.is_withdrawn

    def awaited_lens(
        self, node: TreeNode | None, key: bytes | None, tokens: Int32Array, most: int
    ) -> list[int]:
        """Return how many of `tokens`, in whole pages, each of at most `most` prompts awaits after
        `node`. Their walks end there because the child under `key` is missing."""
        parent = node or self._root
        first = self.waiting_for(parent, key)
        followed = (each for each in first.shared_prefixes() if each.num_prompts) if first else ()
        return [
            self._num_common(each.tokens[parent.end :], tokens) for each in islice(followed, most)
        ]

    def num_awaiting(self, node: TreeNode, key: bytes, most: int) -> int:
        """Count up to `most` prompts that would continue from `node` through a child under `key`;
        if it exists, prompts that need more of it to be resumable."""
        child = node.children.get(key)
        if child is not None:
            watching = self._watchers.get(child.node_id, {}).values()
            standing = [cursor.prefix.resting(self._dp_rank) for cursor in watching]
        else:
            first = self.waiting_for(node, key)
            standing = [] if first is None else [first.shared_prefixes()]
        count = 0
        for prefix in chain.from_iterable(standing):
            count += prefix.num_prompts
            if count >= most:
                return most
        return count

    # -- reports from the tree ---------------------------------------------------------------

    def child_added(self, parent: TreeNode, child: TreeNode) -> None:
        """Continue shared prefixes into the edge of `child`, a new leaf below `parent`."""
        prefix = self.waiting_for(parent, child.child_key)
        if prefix is not None:
            self._has_moved = True
            self._go_along(prefix, child, parent.end)

    def node_split(self, upper: TreeNode, lower: TreeNode) -> None:
        """Move the cursors that ended in the start of `lower`'s edge, which `upper` took."""
        for cursor in self._moving_from(lower):
            if cursor.reached <= upper.end:
                self._file(cursor.prefix, upper, cursor.reached)
        self._measure_watchers(lower)

    def nodes_merged(self, upper: TreeNode, lower: TreeNode) -> None:
        """Move the cursors of `upper` to its only child `lower`, which got its edge."""
        for cursor in self._moving_from(upper):
            self._file(cursor.prefix, lower, cursor.reached)
        self._measure_watchers(upper)

    def leaf_trimmed(self, leaf: TreeNode, end: TreeNode) -> None:
        """Move the cursors of `leaf` back to `end`, the new end of its path."""
        for cursor in self._moving_from(leaf):
            if cursor.prefix.start < end.end:
                self._file(cursor.prefix, end, min(cursor.reached, end.end))
            else:
                self.leave(cursor)

    def measure(self, nodes: Iterable[TreeNode]) -> None:
        """Measure the cursors affected by changed positions in `nodes` or by moved walks. Call this
        at the end of each change of a tree with windows."""
        for node in nodes:
            self._measure_watchers(node)
        if self._measure_all():
            self._has_moved = True

    def audit(self) -> None:
        """Verify that each cursor is where a fresh walk ends, or raise `LedgerError`."""
        prefixes = list(self._first.shared_prefixes())
        for prefix in prefixes:
            self._audit_walk(prefix)
        live = [each.live[self._dp_rank] for each in prefixes if self._dp_rank in each.live]
        for cursor in live:
            self._audit_length(cursor)
        if len(live) != len(self._stops):
            raise LedgerError("cursors stand at nodes that are not live, or are gone")
        if sum(map(len, self._watchers.values())) != sum(len(each.watched) for each in live):
            raise LedgerError("nodes are watched for cursors that do not list them")

    # -- places of cursors --------------------------------------------------------------------

    def _go_along(self, prefix: SharedPrefix | None, node: TreeNode, start: int) -> None:
        """Move a prefix, and its continuations, along the edge of `node` from `start`."""
        edge = node.key[len(node.key) - (node.end - start) :]
        while prefix is not None and (num_common := self._num_common(edge, prefix.tokens[start:])):
            start, edge = start + num_common, edge[num_common:]
            self._file(prefix, node, start)
            if start < prefix.end or not len(edge):
                return
            prefix = prefix.children.get(edge_key(self._page_size, start, edge, prefix.namespace))

    def _num_common(self, a: Int32Array, b: Int32Array) -> int:
        return common_prefix_len(a, b) // self._page_size * self._page_size

    def _file(self, prefix: SharedPrefix, node: TreeNode, reached: int) -> None:
        """Put the prefix's cursor on `node`, at the length `reached`; make it live if it is not."""
        cursor = prefix.live.get(self._dp_rank)
        if cursor is None:
            cursor = prefix.live[self._dp_rank] = LiveCursor(prefix, node)
            self._columns.above[self._dp_rank, prefix.number] = LIVE
        else:
            self._stops.take_out(cursor)
        cursor.at, cursor.reached = node, reached
        self._columns.place[self._dp_rank, prefix.number] = self._stops.put(cursor, node)
        if self._usable_len is None:
            self._set_usable(cursor, reached)
        else:
            self._unmeasured[cursor.number] = cursor

    def _moving_from(self, node: TreeNode) -> list[LiveCursor]:
        cursors = self._stops.cursors(node)
        if cursors:
            self._has_moved = True
        return cursors

    # -- resumable lengths --------------------------------------------------------------------

    def _measure_all(self) -> bool:
        has_changed = False
        while self._unmeasured:
            _, cursor = self._unmeasured.popitem()
            before = cursor.usable
            self._measure(cursor)
            has_changed |= cursor.usable != before
        return has_changed

    def _measure(self, cursor: LiveCursor) -> None:
        assert self._usable_len is not None
        self._unwatch(cursor)
        length, cursor.watched = self._usable_len(cursor.at, cursor.reached)
        self._set_usable(cursor, length)
        for node in cursor.watched:
            self._watchers.setdefault(node.node_id, {})[cursor.number] = cursor

    def _set_usable(self, cursor: LiveCursor, length: int) -> None:
        cursor.usable = length
        self._columns.usable_pages[self._dp_rank, cursor.number] = length // self._page_size

    def _unwatch(self, cursor: LiveCursor) -> None:
        for node in cursor.watched:
            watchers = self._watchers[node.node_id]
            del watchers[cursor.number]
            if not watchers:
                del self._watchers[node.node_id]
        cursor.watched = []

    def _measure_watchers(self, node: TreeNode) -> None:
        self._unmeasured.update(self._watchers.get(node.node_id, ()))

    # -- proof --------------------------------------------------------------------------------

    def _audit_walk(self, prefix: SharedPrefix) -> None:
        cursor = PrefixCursor(prefix, self._dp_rank)
        node, matched = self._walk(prefix.tokens, prefix.namespace, self._root)
        if (cursor.node.node_id, cursor.matched) != (node.node_id, matched):
            raise LedgerError(f"{cursor.live!r} should be at {node!r}, length {matched}")
        parent, above, columns = prefix.parent, LIVE, self._columns
        said = int(columns.parent[prefix.number]), int(columns.end_pages[prefix.number])
        number = NO_PREFIX if parent is None else parent.number
        if said != (number, prefix.end // self._page_size):
            raise LedgerError(f"{prefix!r}: its columns hold {said}")
        if parent is not None:
            if not prefix.num_prompts and len(prefix.children) < 2:
                raise LedgerError(f"{prefix!r} is not needed")
            if matched <= parent.end:
                above = parent.number
        is_live = self._dp_rank in prefix.live
        said_above = int(columns.above[self._dp_rank, prefix.number])
        if is_live != (above == LIVE) or said_above != above:
            raise LedgerError(f"{prefix!r}: live is {is_live}, {matched} tokens matched")

    def _audit_length(self, cursor: LiveCursor) -> None:
        """Check a live cursor's place, its length, and that it watches the searched nodes."""
        length, at = cursor.reached, (self._dp_rank, cursor.number)
        seen: list[TreeNode] = []
        if self._usable_len is not None:
            length, seen = self._usable_len(cursor.at, cursor.reached)
        is_watched = all(cursor.number in self._watchers.get(each.node_id, ()) for each in seen)
        if cursor.usable != length or not is_watched or cursor.watched != seen:
            raise LedgerError(f"{cursor!r}: {length} tokens can be resumed, in {seen}")
        place = self._stops.place(cursor)
        if place is None:
            raise LedgerError(f"{cursor!r} is not listed where it stands")
        columns = int(self._columns.usable_pages[at]), int(self._columns.place[at])
        if columns != (length // self._page_size, place):
            raise LedgerError(f"{cursor!r}: its columns hold {columns}")
