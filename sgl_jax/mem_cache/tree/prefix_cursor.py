"""The matched prefixes of waiting prompts on the prefix tree: one cursor for all equal beginnings.

Prompts with equal beginnings share cursors, which form a separate tree. Each cursor stands for a
prefix up to `end` that some prompts share, and its children for the prefixes that continue it. A
cursor is live if the walk along its path goes past its parent; it is then at a node of the prefix
tree. Any other cursor is at its parent's place, since the walk ends before the two differ.
`cursor_index.py` keeps cursors up to date.
"""

from collections.abc import Callable, Container, Iterator
from typing import TypeAlias

import numpy as np

from sgl_jax.core.compiled import compiled
from sgl_jax.core.step_plan import Int32Array
from sgl_jax.mem_cache.tree_node import TreeNode

LIVE = -1  # value in the column `above`
NO_CURSOR = -1  # value in the column `parent`
_BLOCK = 64  # tokens compared together

# `key_at(start, tokens, namespace)` returns the key under which a node that ends at `start` lists
# the child that continues with `tokens`.
KeyAt: TypeAlias = Callable[[int, Int32Array, str], bytes]


class PrefixCursor:
    """The walk along `tokens`, whole pages, for all prompts that begin with them.

    `num_prompts` prompts end there, except for a partial page; if it is 0, prompts diverge there.
    `number` is its index in the columns. The properties give the end of the walk. A live cursor
    stores it in the fields `at`, `reached` and `usable`; in any other cursor, `at` is None.
    """

    __slots__ = (
        *("_key_at", "at", "children", "end", "key", "namespace", "num_prompts", "number"),
        *("parent", "reached", "tokens", "usable", "watched"),
    )

    def __init__(
        self,
        key_at: KeyAt,
        number: int,
        parent: "PrefixCursor | None",
        key: bytes,
        tokens: Int32Array,
        namespace: str,
    ) -> None:
        self._key_at = key_at
        self.number = number
        self.parent = parent
        self.key = key  # in the children of `parent`
        self.tokens = tokens
        self.namespace = namespace
        self.end = len(tokens)
        self.children: dict[bytes, PrefixCursor] = {}  # by the first page after `end`
        self.num_prompts = 0
        self.at: TreeNode | None = None
        self.reached = 0
        self.usable = 0
        self.watched: list[TreeNode] = []

    @property
    def start(self) -> int:
        return 0 if self.parent is None else self.parent.end

    @property
    def live(self) -> "PrefixCursor":
        cursor = self
        while cursor.at is None:
            assert cursor.parent is not None, "the first cursor is live"
            cursor = cursor.parent
        return cursor

    @property
    def node(self) -> TreeNode:
        node = self.live.at
        assert node is not None
        return node

    @property
    def matched(self) -> int:
        return self.live.reached

    @property
    def length(self) -> int:
        """Return the number of tokens that a match would find, whole pages; at most `matched`."""
        cursor = self  # as in `live`, for many calls
        while cursor.at is None:
            assert cursor.parent is not None, "the first cursor is live"
            cursor = cursor.parent
        return cursor.usable

    @property
    def next_key(self) -> bytes | None:
        """Return the key of the child of `node` that would continue the walk, if one can."""
        cursor: PrefixCursor | None = None
        above = self
        while above.at is None:
            assert above.parent is not None, "the first cursor is live"
            cursor, above = above, above.parent
        matched = above.reached
        if matched < above.at.end:
            return None
        if matched < above.end:
            return self._key_at(matched, above.tokens[matched:], above.namespace)
        return None if cursor is None else cursor.key

    def places(self, node_ids: Container[int]) -> list[tuple[TreeNode, bytes]]:
        """Return the nodes with these ids, and keys, at which a new child would extend the walk or
        its resumable part. They are between the end of the resumable prefix and of the walk."""
        live = self.live
        node, below, places = live.at, None, []
        while node is not None and node.end >= live.usable:
            if node.node_id in node_ids:
                key = self.next_key if below is None else below.child_key
                if key is not None:
                    places.append((node, key))
            below, node = node, node.parent
        return places

    def shared_prefixes(self) -> "Iterator[PrefixCursor]":
        stack = [self]
        while stack:
            cursor = stack.pop()
            yield cursor
            stack.extend(cursor.children.values())

    def resting(self) -> "Iterator[PrefixCursor]":
        stack = [self]
        while stack:
            cursor = stack.pop()
            yield cursor
            stack.extend(child for child in cursor.children.values() if child.at is None)

    def __repr__(self) -> str:
        return f"PrefixCursor({self.length} of {self.end} tokens, {self.num_prompts} prompts)"


class CursorColumns:
    """Columns with an entry for each cursor, for loops: int32 arrays, longer than the used part.

    `above` is the parent's number if the cursor is not live, else `LIVE`. For live cursors,
    `usable_pages` counts the pages of `length`, and `place` is the node's place. For all cursors,
    `parent` is the parent's number, and `end_pages` counts the pages of `end`.
    """

    def __init__(self) -> None:
        self._set(np.zeros((5, 64), np.int32))
        self._free = list(range(64))[::-1]

    def _set(self, table: Int32Array) -> None:
        self._table = table
        self.above, self.usable_pages, self.place, self.parent, self.end_pages = table

    def take(self) -> int:
        if not self._free:
            size = len(self.above)
            self._free = list(range(size, 2 * size))[::-1]
            self._set(np.concatenate([self._table, self._table], axis=1))
        return self._free.pop()

    def free(self, number: int) -> None:
        self.above[number] = LIVE
        self._free.append(number)


@compiled("(int32[::1], int32[::1])")
def common_prefix_len(a: Int32Array, b: Int32Array) -> int:
    size, start = min(len(a), len(b)), 0
    while start + _BLOCK <= size:  # without branches within a block: several tokens at once
        difference = np.int32(0)
        for i in range(start, start + _BLOCK):
            difference |= a[i] ^ b[i]
        if difference:
            break
        start += _BLOCK
    while start < size and a[start] == b[start]:
        start += 1
    return start
