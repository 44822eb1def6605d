"""Cursors on a prefix tree that changes.

The scheduler tries to admit a waiting request in many steps, and the tree rarely changes near its
prefix between two tries. So the tree keeps a cursor at the end of each request's walk instead of
repeating the lookup, and moves the cursor when the walk would end elsewhere. A change of the tree
costs time for the live cursors (`prefix_cursor.py`) on the changed nodes, however many prompts
continue them.

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
    NO_CURSOR,
    CursorColumns,
    KeyAt,
    PrefixCursor,
    common_prefix_len,
)
from sgl_jax.mem_cache.tree_node import TreeNode


class CursorIndex:
    """All cursors of one tree. The tree reports each change of its shape.

    Args:
        page_size: page size in tokens.
        root: root of the tree.
        walk: `walk(tokens, namespace, below)` walks from a node on the path. It returns the node
            with the edge in which the walk ends, and the tokens matched from the root.
        key_at: returns the key of a child.
        usable_len: `usable_len(node, matched)` returns the resumable length of a walk of that
            length, and the nodes searched. None if the whole walk is always resumable.
    """

    def __init__(
        self,
        page_size: int,
        root: TreeNode,
        walk: Callable[[Int32Array, str, TreeNode], tuple[TreeNode, int]],
        key_at: KeyAt,
        usable_len: Callable[[TreeNode, int], tuple[int, list[TreeNode]]] | None = None,
    ) -> None:
        self._page_size = page_size
        self._root = root
        self._walk = walk
        self._key_at = key_at
        self._usable_len = usable_len
        self._watchers: dict[int, dict[int, PrefixCursor]] = {}  # by node id, by number
        self._unmeasured: dict[int, PrefixCursor] = {}  # their walks end elsewhere now
        self._stops = CursorPositions()
        self.nodes = self._stops.nodes  # the nodes of live cursors, by place
        self.columns = CursorColumns()
        self._has_moved = False
        # The empty prefix, of all namespaces; the key of the next cursor holds the namespace.
        self._first = PrefixCursor(self._key_at, self.columns.take(), None, b"", root.key, "")
        self.columns.parent[self._first.number] = NO_CURSOR
        self._file(self._first, root, 0)
        self._measure_all()

    # -- prompts come and go ------------------------------------------------------------------

    def follow(
        self, tokens: Int32Array, namespace: str, below: TreeNode | None = None
    ) -> PrefixCursor:
        """Return the cursor of a prompt of `tokens`. Call `unfollow` once for each call.

        `below` is a locked node on the walk, from which the search starts. The cursors of other
        prompts do not move.
        """
        tokens = tokens[: len(tokens) // self._page_size * self._page_size]
        cursor = self._first
        while cursor.end < len(tokens):
            key = self._key_at(cursor.end, tokens[cursor.end :], namespace)
            child = cursor.children.get(key)
            if child is None:
                cursor = self._add(cursor, key, tokens, namespace, below)
                break
            end = cursor.end + self._num_common(child.tokens[cursor.end :], tokens[cursor.end :])
            cursor = child if end == child.end else self._part(child, end)
        cursor.num_prompts += 1
        self._measure_all()
        return cursor

    def unfollow(self, cursor: PrefixCursor) -> None:
        """Release the cursor for one prompt that followed it."""
        cursor.num_prompts -= 1
        parent = cursor.parent
        while parent is not None and not cursor.num_prompts and len(cursor.children) < 2:
            rest = next(iter(cursor.children.values())) if cursor.children else None
            if rest is None:
                del parent.children[cursor.key]
            else:
                self._extend(rest, cursor, parent)
            if cursor.at is not None:
                self._rest(cursor)
            self.columns.free(cursor.number)
            if rest is not None:
                break
            cursor, parent = parent, parent.parent
        if self._unmeasured:
            self._measure_all()

    def take_has_moved(self) -> bool:
        """Return whether a cursor's length or place may have changed since the last call."""
        has_moved, self._has_moved = self._has_moved, False
        return has_moved

    def waiting_for(self, node: TreeNode, key: bytes | None) -> PrefixCursor | None:
        """Return the shared prefix that a new child of `node` under `key` would continue."""
        cursor = self._stops.at_end(node)
        if cursor is None or key is None:
            return None
        if cursor.end == node.end:
            return cursor.children.get(key)
        return cursor if cursor.next_key == key else None

    def filed(self, node: TreeNode, key: bytes | None, most: int) -> list[PrefixCursor]:
        """Return up to `most` followed cursors that a new child of `node` would move."""
        first = self.waiting_for(node, key)
        if first is None:
            return []
        return list(islice((each for each in first.shared_prefixes() if each.num_prompts), most))

    def num_awaiting(self, node: TreeNode, key: bytes, most: int) -> int:
        """Count up to `most` prompts that would continue from `node` through a child under `key`;
        if it exists, prompts that need more of it to be resumable."""
        child = node.children.get(key)
        if child is not None:
            watching = self._watchers.get(child.node_id, {}).values()
            standing = [live.resting() for live in watching]
        else:
            first = self.waiting_for(node, key)
            standing = [] if first is None else [first.shared_prefixes()]
        count = 0
        for cursor in chain.from_iterable(standing):
            count += cursor.num_prompts
            if count >= most:
                return most
        return count

    # -- reports from the tree ---------------------------------------------------------------

    def child_added(self, parent: TreeNode, child: TreeNode) -> None:
        """Continue shared prefixes into the edge of `child`, a new leaf below `parent`."""
        cursor = self.waiting_for(parent, child.child_key)
        if cursor is not None:
            self._has_moved = True
            self._go_along(cursor, child, parent.end)

    def node_split(self, upper: TreeNode, lower: TreeNode) -> None:
        """Move the cursors that ended in the start of `lower`'s edge, which `upper` took."""
        for cursor in self._moving_from(lower):
            if cursor.reached <= upper.end:
                self._file(cursor, upper, cursor.reached)
        self._measure_watchers(lower)

    def nodes_merged(self, upper: TreeNode, lower: TreeNode) -> None:
        """Move the cursors of `upper` to its only child `lower`, which got its edge."""
        for cursor in self._moving_from(upper):
            self._file(cursor, lower, cursor.reached)
        self._measure_watchers(upper)

    def leaf_trimmed(self, leaf: TreeNode, end: TreeNode) -> None:
        """Move the cursors of `leaf` back to `end`, the new end of its path."""
        for cursor in self._moving_from(leaf):
            if cursor.start < end.end:
                self._file(cursor, end, min(cursor.reached, end.end))
            else:
                self._rest(cursor)

    def measure(self, nodes: Iterable[TreeNode]) -> None:
        """Measure the cursors affected by changed positions in `nodes` or by moved walks. Call this
        at the end of each change of a tree with windows."""
        for node in nodes:
            self._measure_watchers(node)
        if self._measure_all():
            self._has_moved = True

    def audit(self) -> None:
        """Verify that each cursor is where a fresh walk ends, or raise `LedgerError`."""
        shared_prefixes = list(self._first.shared_prefixes())
        for cursor in shared_prefixes:
            self._audit_walk(cursor)
        live = [cursor for cursor in shared_prefixes if cursor.at is not None]
        for cursor in live:
            self._audit_length(cursor)
        if len(live) != len(self._stops):
            raise LedgerError("cursors stand at nodes that are not live, or are gone")
        if sum(map(len, self._watchers.values())) != sum(len(each.watched) for each in live):
            raise LedgerError("nodes are watched for cursors that do not list them")

    # -- the tree of shared prefixes ----------------------------------------------------------

    def _add(
        self,
        parent: PrefixCursor,
        key: bytes,
        tokens: Int32Array,
        namespace: str,
        below: TreeNode | None,
    ) -> PrefixCursor:
        """Add a cursor after `parent`, which has no child with this beginning."""
        cursor = PrefixCursor(self._key_at, self.columns.take(), parent, key, tokens, namespace)
        self._attach(cursor, parent, key)
        self.columns.above[cursor.number] = parent.number
        if parent.at is None or parent.reached < parent.end:
            return cursor
        node, start = parent.at, parent.end
        if below is not None and node.end < below.end <= cursor.end:
            node, start = below, below.end
            self._file(cursor, node, start)
        elif start < node.end:
            self._go_along(cursor, node, start)
            start = cursor.matched
        if start == node.end:
            node, reached = self._walk(tokens, namespace, node)
            if reached > start:
                self._file(cursor, node, reached)
        return cursor

    def _part(self, lower: PrefixCursor, end: int) -> PrefixCursor:
        """Divide the shared prefix of `lower` at `end`. The new cursor is its parent."""
        parent, key = lower.parent, lower.key
        assert parent is not None
        tokens, namespace = lower.tokens[:end], lower.namespace
        upper = PrefixCursor(self._key_at, self.columns.take(), parent, key, tokens, namespace)
        self._attach(upper, parent, key)
        self._attach(lower, upper, self._key_at(end, lower.tokens[end:], namespace))
        self.columns.above[upper.number] = parent.number
        node = lower.at
        if node is None:
            self.columns.above[lower.number] = upper.number
        elif lower.reached <= end:
            self._take_over(upper, lower)
        else:
            while node.parent is not None and node.parent.end >= end:
                node = node.parent
            self._file(upper, node, end)
        return upper

    def _extend(self, rest: PrefixCursor, cursor: PrefixCursor, parent: PrefixCursor) -> None:
        self._attach(rest, parent, cursor.key)
        if rest.at is None:
            self.columns.above[rest.number] = parent.number
            if cursor.at is not None:
                self._take_over(rest, cursor)

    def _attach(self, cursor: PrefixCursor, parent: PrefixCursor, key: bytes) -> None:
        cursor.parent, cursor.key = parent, key
        parent.children[key] = cursor
        self.columns.parent[cursor.number] = parent.number
        self.columns.end_pages[cursor.number] = cursor.end // self._page_size

    def _take_over(self, cursor: PrefixCursor, live: PrefixCursor) -> None:
        node, reached = live.at, live.reached
        assert node is not None
        self._rest(live)
        self._file(cursor, node, reached)  # at the same place: the last place freed is taken first

    # -- places of cursors --------------------------------------------------------------------

    def _go_along(self, cursor: PrefixCursor | None, node: TreeNode, start: int) -> None:
        """Move a cursor, and its continuations, along the edge of `node` from `start`."""
        edge = node.key[len(node.key) - (node.end - start) :]
        while cursor is not None and (num_common := self._num_common(edge, cursor.tokens[start:])):
            start, edge = start + num_common, edge[num_common:]
            self._file(cursor, node, start)
            if start < cursor.end or not len(edge):
                return
            cursor = cursor.children.get(self._key_at(start, edge, cursor.namespace))

    def _num_common(self, a: Int32Array, b: Int32Array) -> int:
        return common_prefix_len(a, b) // self._page_size * self._page_size

    def _file(self, cursor: PrefixCursor, node: TreeNode, reached: int) -> None:
        if cursor.at is not None:
            self._stops.take_out(cursor)
        cursor.at, cursor.reached = node, reached
        self.columns.above[cursor.number] = LIVE
        self.columns.place[cursor.number] = self._stops.put(cursor, node)
        if self._usable_len is None:
            self._set_usable(cursor, reached)
        else:
            self._unmeasured[cursor.number] = cursor

    def _rest(self, cursor: PrefixCursor) -> None:
        assert cursor.parent is not None, "the first cursor is live"
        self._stops.take_out(cursor)
        self._unwatch(cursor)
        self._unmeasured.pop(cursor.number, None)
        cursor.at = None
        self.columns.above[cursor.number] = cursor.parent.number

    def _moving_from(self, node: TreeNode) -> list[PrefixCursor]:
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

    def _measure(self, cursor: PrefixCursor) -> None:
        assert self._usable_len is not None
        assert cursor.at is not None
        self._unwatch(cursor)
        length, cursor.watched = self._usable_len(cursor.at, cursor.reached)
        self._set_usable(cursor, length)
        for node in cursor.watched:
            self._watchers.setdefault(node.node_id, {})[cursor.number] = cursor

    def _set_usable(self, cursor: PrefixCursor, length: int) -> None:
        cursor.usable = length
        self.columns.usable_pages[cursor.number] = length // self._page_size

    def _unwatch(self, cursor: PrefixCursor) -> None:
        for node in cursor.watched:
            watchers = self._watchers[node.node_id]
            del watchers[cursor.number]
            if not watchers:
                del self._watchers[node.node_id]
        cursor.watched = []

    def _measure_watchers(self, node: TreeNode) -> None:
        self._unmeasured.update(self._watchers.get(node.node_id, ()))

    # -- proof --------------------------------------------------------------------------------

    def _audit_walk(self, cursor: PrefixCursor) -> None:
        node, matched = self._walk(cursor.tokens, cursor.namespace, self._root)
        if (cursor.node.node_id, cursor.matched) != (node.node_id, matched):
            raise LedgerError(f"{cursor!r} should be at {node!r}, length {matched}")
        parent, above = cursor.parent, LIVE
        said = self.columns.parent[cursor.number], self.columns.end_pages[cursor.number]
        number = NO_CURSOR if parent is None else parent.number
        if said != (number, cursor.end // self._page_size):
            raise LedgerError(f"{cursor!r}: its columns hold {said}")
        if parent is not None:
            if not cursor.num_prompts and len(cursor.children) < 2:
                raise LedgerError(f"{cursor!r} is not needed")
            if matched <= parent.end:
                above = parent.number
        is_live = cursor.at is not None
        if is_live != (above == LIVE) or self.columns.above[cursor.number] != above:
            raise LedgerError(f"{cursor!r}: live is {is_live}, {matched} tokens matched")

    def _audit_length(self, cursor: PrefixCursor) -> None:
        """Check a live cursor's place, its length, and that it watches the searched nodes."""
        node = cursor.node
        length = cursor.reached
        seen: list[TreeNode] = []
        if self._usable_len is not None:
            length, seen = self._usable_len(node, cursor.reached)
        is_watched = all(cursor.number in self._watchers.get(each.node_id, ()) for each in seen)
        if cursor.usable != length or not is_watched or cursor.watched != seen:
            raise LedgerError(f"{cursor!r}: {length} tokens can be resumed, in {seen}")
        place = self._stops.place(cursor)
        if place is None:
            raise LedgerError(f"{cursor!r} is not listed where it stands")
        columns = self.columns.usable_pages[cursor.number], self.columns.place[cursor.number]
        if columns != (length // self._page_size, place):
            raise LedgerError(f"{cursor!r}: its columns hold {columns}")
