"""The shared prefixes of the prompts that wait, one tree for all ranks.

A prompt waits for any rank, so its tokens are compared with those of other prompts once. Only the
ranks with a prefix on their trees, or a part of it, have cursors (`cursor_index.py`).
"""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import numpy as np

from sgl_jax.core.compiled import compiled
from sgl_jax.core.step_plan import Int32Array
from sgl_jax.mem_cache.tree.prefix_cursor import (
    LIVE,
    NO_PREFIX,
    LiveCursor,
    PrefixColumns,
    SharedPrefix,
    common_prefix_len,
)
from sgl_jax.mem_cache.tree_node import TreeNode, edge_key

NO_TOKENS: Int32Array = np.zeros(0, np.int32)


class RankCursors(Protocol):
    """The cursors on one rank's tree, which follow the changes of the shared prefixes."""

    def enter(self, prefix: SharedPrefix, above: LiveCursor, known: TreeNode | None) -> None:
        """Continue the walk of `above`, which ends where `prefix` begins."""

    def divide(self, upper: SharedPrefix, lower: LiveCursor) -> None:
        """Give `upper`, the new parent of a live prefix, its cursor."""

    def move_to(self, prefix: SharedPrefix, cursor: LiveCursor) -> None:
        """Replace a cursor by one of `prefix`, at the same place."""

    def leave(self, cursor: LiveCursor) -> None:
        """Remove a cursor."""


class PromptTree:
    """The prompts that wait for `num_ranks` ranks. The ranks join before the first prompt."""

    def __init__(self, page_size: int, num_ranks: int) -> None:
        self._page_size = page_size
        self._ranks: dict[int, RankCursors] = {}
        self.columns = PrefixColumns(num_ranks)
        # The empty prefix, of all namespaces; the key of the next prefix holds the namespace.
        self.first = self._new(None, b"", NO_TOKENS, "")

    def join(self, dp_rank: int, cursors: RankCursors) -> None:
        """Let `cursors` follow on a rank, instead of any earlier ones; the first prefix is not live
        there yet."""
        self._ranks[dp_rank] = cursors
        for prefix in self.first.shared_prefixes():
            if prefix.live.pop(dp_rank, None) is not None and prefix.parent is not None:
                self.columns.above[dp_rank, prefix.number] = prefix.parent.number

    def follow(
        self, tokens: Int32Array, namespace: str, known: Mapping[int, TreeNode] | None = None
    ) -> SharedPrefix:
        """Return the prefix of a prompt of `tokens`. Call `unfollow` once for each call.

        `known` has, by rank, a locked node on the walk, from which the search starts. The cursors
        of other prompts do not move.
        """
        tokens = tokens[: len(tokens) // self._page_size * self._page_size]
        prefix = self.first
        while prefix.end < len(tokens):
            rest = tokens[prefix.end :]
            key = edge_key(self._page_size, prefix.end, rest, namespace)
            child = prefix.children.get(key)
            if child is None:
                prefix = self._add(prefix, key, tokens, namespace, known or {})
                break
            num_common = common_prefix_len(child.tokens[prefix.end :], rest)
            end = prefix.end + num_common // self._page_size * self._page_size
            prefix = child if end == child.end else self._divide(child, end)
        prefix.num_prompts += 1
        return prefix

    def unfollow(self, prefix: SharedPrefix) -> None:
        """Release the prefix for one prompt that followed it."""
        prefix.num_prompts -= 1
        parent = prefix.parent
        while parent is not None and not prefix.num_prompts and len(prefix.children) < 2:
            rest = next(iter(prefix.children.values())) if prefix.children else None
            if rest is None:
                del parent.children[prefix.key]
            else:
                self._extend(rest, prefix, parent)
            for dp_rank, cursor in list(prefix.live.items()):
                self._ranks[dp_rank].leave(cursor)
            self.columns.free(prefix.number)
            if rest is not None:
                break
            prefix, parent = parent, parent.parent

    def clear(self) -> None:
        """Remove all prompts without a call to the ranks, which must join again."""
        for prefix in list(self.first.shared_prefixes())[1:]:
            self.columns.free(prefix.number)
        self.first.children.clear()

    def cached_pages(self, prefix: SharedPrefix) -> Int32Array:
        """Return the pages of `prefix` cached on each rank, int32[ranks]."""
        pages: Int32Array = cached_pages(
            prefix.number, self.columns.above, self.columns.usable_pages
        )
        return pages

    def _new(
        self, parent: SharedPrefix | None, key: bytes, tokens: Int32Array, namespace: str
    ) -> SharedPrefix:
        number = self.columns.take()
        prefix = SharedPrefix(self._page_size, number, parent, key, tokens, namespace)
        if parent is None:
            self.columns.parent[number], self.columns.end_pages[number] = NO_PREFIX, 0
            self.columns.above[:, number] = LIVE
        else:
            self._attach(prefix, parent, key)
            self.columns.above[:, number] = parent.number
        return prefix

    def _attach(self, prefix: SharedPrefix, parent: SharedPrefix, key: bytes) -> None:
        prefix.parent, prefix.key = parent, key
        parent.children[key] = prefix
        self.columns.parent[prefix.number] = parent.number
        self.columns.end_pages[prefix.number] = prefix.end // self._page_size

    def _add(
        self,
        parent: SharedPrefix,
        key: bytes,
        tokens: Int32Array,
        namespace: str,
        known: Mapping[int, TreeNode],
    ) -> SharedPrefix:
        """Add a prefix after `parent`, which has no child with this beginning."""
        prefix, end = self._new(parent, key, tokens, namespace), parent.end
        for dp_rank, cursor in parent.live.items():
            if cursor.reached == end and (cursor.at.end > end or key in cursor.at.children):
                self._ranks[dp_rank].enter(prefix, cursor, known.get(dp_rank))
        return prefix

    def _divide(self, lower: SharedPrefix, end: int) -> SharedPrefix:
        """Divide the shared prefix `lower` at `end`. The new prefix is its parent."""
        assert lower.parent is not None
        upper = self._new(lower.parent, lower.key, lower.tokens[:end], lower.namespace)
        self._attach(lower, upper, lower.key_at(end))
        above = self.columns.above[:, lower.number]
        above[above != LIVE] = upper.number
        for dp_rank, cursor in list(lower.live.items()):
            self._ranks[dp_rank].divide(upper, cursor)
        return upper

    def _extend(self, rest: SharedPrefix, prefix: SharedPrefix, parent: SharedPrefix) -> None:
        """Attach `rest`, the only child of `prefix`, to `parent`."""
        self._attach(rest, parent, prefix.key)
        above = self.columns.above[:, rest.number]
        above[above != LIVE] = parent.number
        for dp_rank, cursor in list(prefix.live.items()):
            if dp_rank not in rest.live:
                self._ranks[dp_rank].move_to(rest, cursor)


class RankPrompts(NamedTuple):
    """The waiting prompts, as the tree of one rank follows them."""

    tree: PromptTree
    dp_rank: int


@compiled("(int64, int32[:, ::1], int32[:, ::1])")
def cached_pages(number: int, above: Int32Array, usable_pages: Int32Array) -> Int32Array:
    """Return the pages of prefix `number` cached on each rank, int32[ranks]. The arguments are
    columns of `PrefixColumns`."""
    pages = np.empty(len(above), np.int32)
    for rank in range(len(above)):
        live = number
        assert 0 <= live < above.shape[1]
        while above[rank, live] >= 0:
            live = above[rank, live]
        pages[rank] = usable_pages[rank, live]
    return pages
