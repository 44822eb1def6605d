"""How much of waiting prompts a prefix tree holds: one cursor for all that are alike so far.

Prompts that begin alike share cursors, which form a tree of their own: each is a stem, a path that
some prompts have in common up to `end`, and its children are the stems that go on from there. A
cursor is live if the walk along its path goes past its parent; it then stands on a node of the
prefix tree. One that is not live stands where its parent does, since the walk does not get to where
they differ. `cursor_index.py` keeps all this up to date.
"""

from collections.abc import Callable, Iterator
from typing import TypeAlias

import numpy as np

from sgl_jax.core.compiled import compiled
from sgl_jax.core.step_plan import Int32Array
from sgl_jax.mem_cache.tree_node import TreeNode

LIVE = -1  # in the column `above`
NO_CURSOR = -1  # in the column `parent`

# `key_at(start, tokens, namespace)` is the key of the child of a node that ends at `start`, where
# `tokens` go on.
KeyAt: TypeAlias = Callable[[int, Int32Array, str], bytes]


class PrefixCursor:
    """The walk along `tokens`, whole pages, for all prompts that begin with these.

    `num_followers` prompts end there but for a part of a page; without any, prompts part there.
    `number` is its line of the index's columns. The properties say where the walk ends; the fields
    `at`, `reached` and `usable` do so for a live cursor, and `at` is None for another.
    """

    __slots__ = (
        *("_key_at", "at", "children", "end", "key", "namespace", "num_followers", "number"),
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
        self.children: dict[bytes, PrefixCursor] = {}  # by the first page behind `end`
        self.num_followers = 0
        self.at: TreeNode | None = None
        self.reached = 0
        self.usable = 0
        self.watched: list[TreeNode] = []

    @property
    def start(self) -> int:
        """Tokens that it has in common with its siblings."""
        return 0 if self.parent is None else self.parent.end

    @property
    def live(self) -> "PrefixCursor":
        """The live cursor that stands where this walk ends."""
        cursor = self
        while cursor.at is None:
            assert cursor.parent is not None, "the first cursor is live"
            cursor = cursor.parent
        return cursor

    @property
    def node(self) -> TreeNode:
        """The last node on the walk; the root if none matched."""
        node = self.live.at
        assert node is not None
        return node

    @property
    def matched(self) -> int:
        """Tokens that the walk goes along, whole pages."""
        return self.live.reached

    @property
    def length(self) -> int:
        """Tokens that a match would find, whole pages; no more than `matched`."""
        return self.live.usable

    @property
    def next_key(self) -> bytes | None:
        """The key of the child of `node` that would continue the walk, if one can."""
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

    def places(self) -> list[tuple[TreeNode, bytes]]:
        """The nodes that tokens may come behind which the walk goes along, or would go along next,
        with their keys: nodes from where the walk ends up to where what can be resumed of it ends,
        since between the two is a gap."""
        live = self.live
        node, key, places = live.at, self.next_key, []
        while node is not None and node.end >= live.usable:
            if key is not None:
                places.append((node, key))
            key, node = node.child_key, node.parent
        return places

    def stems(self) -> "Iterator[PrefixCursor]":
        """This one and those that continue it."""
        stack = [self]
        while stack:
            cursor = stack.pop()
            yield cursor
            stack.extend(cursor.children.values())

    def resting(self) -> "Iterator[PrefixCursor]":
        """This live one and those that stand where it does."""
        stack = [self]
        while stack:
            cursor = stack.pop()
            yield cursor
            stack.extend(child for child in cursor.children.values() if child.at is None)

    def __repr__(self) -> str:
        return f"PrefixCursor({self.length} of {self.end} tokens, {self.num_followers} followers)"


class CursorColumns:
    """A line for each cursor, for loops over many: int32 arrays, longer than what is used.

    `above` is the number of the parent of a cursor that is not live, else `LIVE`; of live ones
    `usable_pages` are the pages of `length`, and `place` that of the stop. `parent` is the number
    of the parent of any, `end_pages` are the pages of `end`, and `num_prompts` begin with
    its tokens.
    """

    def __init__(self) -> None:
        self._set(np.zeros((6, 64), np.int32))
        self._free = list(range(64))[::-1]

    def _set(self, table: Int32Array) -> None:
        self._table = table
        self.above, self.usable_pages, self.place, self.parent, self.end_pages, self.num_prompts = (
            table
        )

    def take(self) -> int:
        """The number of a new cursor."""
        if not self._free:
            size = len(self.above)
            self._free = list(range(size, 2 * size))[::-1]
            self._set(np.concatenate([self._table, self._table], axis=1))
        return self._free.pop()

    def free(self, number: int) -> None:
        """No cursor has that number any more."""
        self.above[number] = LIVE
        self._free.append(number)


@compiled("(int32[::1], int32[::1])")
def common_prefix_len(a: Int32Array, b: Int32Array) -> int:
    """Length of the common prefix of two token arrays."""
    size = min(len(a), len(b))
    for i in range(size):
        if a[i] != b[i]:
            return i
    return size
