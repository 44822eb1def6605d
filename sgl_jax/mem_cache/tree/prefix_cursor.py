"""The matched prefixes of waiting prompts on the prefix trees of all ranks.

Prompts with equal beginnings share prefixes, which form a tree of their own (`prompt_tree.py`), the
same for all ranks. A prefix is live on a rank if the walk along its tokens goes past its parent on
that rank's tree; it then has a cursor at a node there. On any other rank it is at its parent's
place, since the walk ends before the two differ. `cursor_index.py` keeps a rank's cursors up to
date.
"""

from collections.abc import Container, Iterator
from typing import NamedTuple

import numpy as np

from sgl_jax.core.compiled import compiled
from sgl_jax.core.step_plan import Int32Array
from sgl_jax.mem_cache.tree_node import TreeNode, edge_key

LIVE = -1  # value in the column `above`
NO_PREFIX = -1  # value in the column `parent`
_BLOCK = 64  # tokens compared together


class SharedPrefix:
    """The first `end` tokens, whole pages, of all prompts that begin with `tokens`.

    `num_prompts` prompts end there, except for a partial page; if it is 0, prompts diverge there.
    `number` is its index in the columns. `live` has its cursor on each rank where it is live.
    """

    __slots__ = (
        *("children", "end", "key", "live", "namespace", "num_prompts", "number", "page_size"),
        *("parent", "tokens"),
    )

    def __init__(
        self,
        page_size: int,
        number: int,
        parent: "SharedPrefix | None",
        key: bytes,
        tokens: Int32Array,
        namespace: str,
    ) -> None:
        self.page_size = page_size
        self.number = number
        self.parent = parent
        self.key = key  # in the children of `parent`
        self.tokens = tokens
        self.namespace = namespace
        self.end = len(tokens)
        self.children: dict[bytes, SharedPrefix] = {}  # by the first page after `end`
        self.num_prompts = 0
        self.live: dict[int, LiveCursor] = {}  # by rank

    @property
    def start(self) -> int:
        return 0 if self.parent is None else self.parent.end

    def key_at(self, start: int) -> bytes:
        """Return the key of the edge that continues with the tokens from `start` on."""
        return edge_key(self.page_size, start, self.tokens[start:], self.namespace)

    def shared_prefixes(self) -> "Iterator[SharedPrefix]":
        stack = [self]
        while stack:
            prefix = stack.pop()
            yield prefix
            stack.extend(prefix.children.values())

    def resting(self, dp_rank: int) -> "Iterator[SharedPrefix]":
        """Iterate over this prefix and those below it that are at its place on a rank."""
        stack = [self]
        while stack:
            prefix = stack.pop()
            yield prefix
            stack.extend(each for each in prefix.children.values() if dp_rank not in each.live)

    def __repr__(self) -> str:
        return f"SharedPrefix({self.end} tokens, {self.num_prompts} prompts)"


class LiveCursor:
    """The end of the walk along a live prefix on one rank: the node `at`, and the length `reached`,
    of which `usable` tokens can be resumed; `watched` nodes may change that."""

    __slots__ = ("at", "number", "prefix", "reached", "usable", "watched")

    def __init__(self, prefix: SharedPrefix, at: TreeNode) -> None:
        self.prefix = prefix
        self.number = prefix.number
        self.at = at
        self.reached = 0
        self.usable = 0
        self.watched: list[TreeNode] = []

    def __repr__(self) -> str:
        return f"LiveCursor({self.usable} of {self.reached} tokens of {self.prefix!r})"


class PrefixCursor(NamedTuple):
    """The end of the walk along a prompt on the tree of one rank."""

    prefix: SharedPrefix
    dp_rank: int

    @property
    def live(self) -> LiveCursor:
        prefix = self.prefix
        while (live := prefix.live.get(self.dp_rank)) is None:
            assert prefix.parent is not None, "the first prefix is live"
            prefix = prefix.parent
        return live

    @property
    def node(self) -> TreeNode:
        return self.live.at

    @property
    def matched(self) -> int:
        return self.live.reached

    @property
    def length(self) -> int:
        """Return the number of tokens that a match would find, whole pages; at most `matched`."""
        return self.live.usable

    @property
    def next_key(self) -> bytes | None:
        """Return the key of the child of `node` that would continue the walk, if one can."""
        below: SharedPrefix | None = None
        prefix = self.prefix
        while (live := prefix.live.get(self.dp_rank)) is None:
            assert prefix.parent is not None, "the first prefix is live"
            below, prefix = prefix, prefix.parent
        if live.reached < live.at.end:
            return None
        if live.reached < prefix.end:
            return prefix.key_at(live.reached)
        return None if below is None else below.key

    def places(self, node_ids: Container[int]) -> list[tuple[TreeNode, bytes]]:
        """Return the nodes with these ids, and keys, at which a new child would extend the walk or
        its resumable part. They are between the end of the resumable prefix and of the walk."""
        live = self.live
        node: TreeNode | None = live.at
        below, places = None, []
        while node is not None and node.end >= live.usable:
            if node.node_id in node_ids:
                key = self.next_key if below is None else below.child_key
                if key is not None:
                    places.append((node, key))
            below, node = node, node.parent
        return places


class PrefixColumns:
    """Columns with an entry for each prefix, for loops: int32 arrays, longer than the used part.

    By rank and prefix, `above` is the parent's number if the prefix is not live there, else `LIVE`.
    For live prefixes, `usable_pages` counts the pages of the cursor's `usable`, and `place` is the
    node's place. By prefix, `parent` is the parent's number, and `end_pages` counts the pages of
    `end`.
    """

    def __init__(self, num_ranks: int) -> None:
        self._set(np.zeros((3, num_ranks, 64), np.int32), np.zeros((2, 64), np.int32))
        self._free = list(range(64))[::-1]

    def _set(self, by_rank: Int32Array, shared: Int32Array) -> None:
        self._by_rank, self._shared = by_rank, shared
        self.above, self.usable_pages, self.place = by_rank
        self.parent, self.end_pages = shared

    def take(self) -> int:
        if not self._free:
            size = len(self.parent)
            self._free = list(range(size, 2 * size))[::-1]
            tables = (self._by_rank, self._shared)
            self._set(*(np.concatenate([table, table], axis=-1) for table in tables))
        return self._free.pop()

    def free(self, number: int) -> None:
        self.above[:, number] = LIVE
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
