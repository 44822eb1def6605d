"""A compressed, page-aligned radix tree of token sequences: nodes, edges, splits and merges.

It never calls an allocator: components own the values of edges, their locks and the freed pages.
Edges are multiples of `page_size` tokens, siblings differ in their first page, and tokens are
compared, not hashes. The root holds nothing, is never locked or evicted, and is never counted.

A path belongs to one namespace: children of the root are found by namespace and first page, all
further nodes only by first page. So paths of different namespaces share only the root.

A path has few nodes: a node and its only child merge if locks, values and use do not distinguish
them, unless the upper edge is at least twice as long as the lower. So the lengths of edges that
could merge halve downwards, and a page is copied about once each time its edge doubles.

Each change is reported to the components, the eviction policy, the cursors and, with windows, to
`resumable.py`; without windows, every position is resumable.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from hashlib import blake2b

import numpy as np

from sgl_jax.core.step_plan import Int32Array
from sgl_jax.mem_cache.errors import LedgerError
from sgl_jax.mem_cache.eviction.eviction_policy import EvictionPolicy
from sgl_jax.mem_cache.eviction.ghost_pages import PrefixHasher
from sgl_jax.mem_cache.tree.block_log import BlockLog
from sgl_jax.mem_cache.tree.cursor_index import CursorIndex
from sgl_jax.mem_cache.tree.full_component import FullComponent
from sgl_jax.mem_cache.tree.prefix_cursor import common_prefix_len
from sgl_jax.mem_cache.tree.prompt_tree import RankPrompts
from sgl_jax.mem_cache.tree.resumable import Resumable
from sgl_jax.mem_cache.tree.tree_component import TreeComponent
from sgl_jax.mem_cache.tree.window_component import WindowComponent
from sgl_jax.mem_cache.tree_node import (
    TreeNode,
    edge_key,
    front,
    is_on_tree,
    joined,
    only_child,
    parent_of,
)


class RadixTree:
    """The nodes of a tree over `full`, which locks paths, and `windows`. Lengths are in tokens of
    whole pages. `clock` counts uses of paths. If set, `block_log` gets each page of tokens that
    enters or leaves the tree."""

    block_log: BlockLog | None = None

    def __init__(
        self,
        page_size: int,
        full: FullComponent,
        policy: EvictionPolicy,
        prompts: RankPrompts,
        windows: Sequence[WindowComponent] = (),
    ) -> None:
        self.page_size = page_size
        self.key_at = partial(edge_key, page_size)
        self.full = full
        self.components: tuple[TreeComponent, ...] = (full, *windows)
        self.num_groups = 1 + max(each.group for each in self.components)
        self._windows = windows
        self.resumable: Resumable | None = None  # set before the root is created
        self.policy = policy
        self.clock = 0
        self._hasher = PrefixHasher(page_size)
        self._withdrawn: tuple[TreeNode, ...] = ()
        self._next_id = 0
        self.root = self._new_node(np.zeros(0, np.int32), None, b"", "")
        usable_len = None
        if windows:
            self.resumable = Resumable(windows, self.root, page_size)
            usable_len = self.resumable.usable_len
        self.cursors = CursorIndex(page_size, self.root, self.walk, prompts, usable_len)

    def path_to(self, node: TreeNode, start: TreeNode | None = None) -> list[TreeNode]:
        """Return the nodes from below `start`, or else the root, to `node`."""
        start = start or self.root
        path = []
        step: TreeNode | None = node
        while step is not None and step is not start:
            path.append(step)
            step = step.parent
        return path[::-1]

    def pages_to(self, node: TreeNode) -> Int32Array:
        """Return the prefix's pages up to `node` in token order: int32[groups, n], 0 if absent."""
        return self._pages_of(self.path_to(node))

    def pages_after(self, node: TreeNode, first: int) -> Int32Array:
        """Return the prefix's pages from page `first` up to `node`: int32[groups, n]."""
        nodes, step = [], node
        while step.parent is not None and step.end > first * self.page_size:
            nodes.append(step)
            step = step.parent
        num_pages = node.end // self.page_size - first
        held = self._pages_of(nodes[::-1])
        pages: Int32Array = held[:, held.shape[1] - num_pages :]
        return pages

    def _pages_of(self, nodes: Sequence[TreeNode]) -> Int32Array:
        if not self._windows:
            return self.full.pages_of(nodes)[None]
        of_group = {window.group: window.pages_of(nodes) for window in self._windows}
        rows = [of_group.get(group) for group in range(self.num_groups)]
        pages: Int32Array = np.stack(
            [self.full.pages_of(nodes) if row is None else row for row in rows]
        )
        return pages

    def nodes(self, top: TreeNode | None = None) -> Iterator[TreeNode]:
        """Iterate over all nodes but the root, or `top` and those below it, parents first."""
        stack = list(self.root.children.values()) if top is None else [top]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def is_listed(self, node: TreeNode) -> bool:
        """Return whether `node` is listed under its key, in its parent's namespace. A lookup by its
        namespace and tokens finds it, unless it is withdrawn."""
        parent = parent_of(node)
        key = self.own_key(node)
        is_of_parent = parent is self.root or parent.namespace == node.namespace
        return is_of_parent and node.child_key == key and parent.children.get(key) is node

    def own_key(self, node: TreeNode) -> bytes:
        """Return the `child_key` that `node` must have. In the key of a withdrawn node, bytes that
        no namespace has follow the first page, so that no lookup finds it."""
        key = self.key_at(parent_of(node).end, node.key, node.namespace)
        return key + b"\xff%d" % node.node_id if node.is_withdrawn else key

    @staticmethod
    def hash_before(node: TreeNode) -> int:
        """Return the hash of the prefix before `node`'s edge; if empty, the namespace's hash."""
        parent = node.parent
        if parent is not None and len(parent.page_hashes):
            return int(parent.page_hashes[-1])
        if not node.namespace:
            return 0
        return int.from_bytes(blake2b(node.namespace.encode(), digest_size=8).digest())

    def walk(
        self, tokens: Int32Array, namespace: str, below: TreeNode | None = None
    ) -> tuple[TreeNode, int]:
        """Return the node with the edge in which the walk along `tokens` ends, and the tokens
        matched from the root, whole pages. The walk ends before a withdrawn node."""
        node = below or self.root
        length = node.end
        limit = len(tokens) // self.page_size * self.page_size
        while length == node.end < limit:
            rest = tokens[length:limit]
            child = node.children.get(self.key_at(length, rest, namespace))
            if child is None or child.is_withdrawn:
                break
            node = child
            length += common_prefix_len(child.key, rest) // self.page_size * self.page_size
        return node, length

    def node_at(self, node: TreeNode, length: int) -> TreeNode:
        """Return the node that ends at `length` on the path to `node`; split an edge if needed."""
        while node.parent is not None and node.parent.end >= length:
            node = node.parent
        if node.end == length:
            return node
        upper = self.split(node, len(node.key) - (node.end - length))
        # The rest of the edge may be short enough to merge now. Leave the edges above: `upper` is
        # about to get a lock or a child.
        rest = only_child(node)
        if rest is not None and self.may_merge(node, rest):
            self._merge(node, rest)
        return upper

    def _new_node(
        self, key: Int32Array, parent: TreeNode | None, child_key: bytes, namespace: str
    ) -> TreeNode:
        node = TreeNode(
            self._next_id,
            key,
            parent,
            len(self.components),
            child_key=child_key,
            namespace=namespace,
        )
        self._next_id += 1
        node.last_access = self.clock
        if self.resumable is not None:
            node.start_reading()
        return node

    def add_child(self, parent: TreeNode, key: Int32Array, namespace: str) -> TreeNode:
        child_key = self.key_at(parent.end, key, namespace)
        child = self._new_node(key, parent, child_key, namespace)
        child.page_hashes = self._hasher.hashes(key, self.hash_before(child))
        parent.children[child_key] = child
        self.refresh(parent)
        self.cursors.child_added(parent, child)
        if self.block_log is not None:
            before = None if parent is self.root else self.hash_before(child)
            self.block_log.stored(before, child.page_hashes, key)
        return child

    def trim(self, leaf: TreeNode, keep_tokens: int) -> None:
        """Shorten a leaf's edge to `keep_tokens`; 0 removes the leaf."""
        if leaf.children:
            raise LedgerError(f"{leaf!r} is to be shortened, but it is no leaf")
        parent = parent_of(leaf)
        for component in self.components:
            component.drop(leaf, keep_tokens)
        keep_pages = keep_tokens // self.page_size
        if not leaf.is_withdrawn:  # otherwise another node may have these tokens by now
            self.policy.drop(leaf, keep_tokens, self.clock)
            if self.block_log is not None:
                self.block_log.removed(leaf.page_hashes[keep_pages:])
        leaf.page_hashes = front(leaf.page_hashes, keep_pages)
        if keep_tokens:
            leaf.end -= len(leaf.key) - keep_tokens
            leaf.key = front(leaf.key, keep_tokens)
            leaf.was_cut = True
            if self.resumable is not None:
                self.resumable.trimmed(leaf)
            self.cursors.leaf_trimmed(leaf, leaf)
            return
        del parent.children[leaf.child_key]
        if self.resumable is not None:
            self.resumable.left(leaf, parent)
        self.cursors.leaf_trimmed(leaf, parent)
        # An insert below a lock does not update the use of the nodes above. They get it once it
        # matters: when they become leaves.
        parent.last_access = max(parent.last_access, leaf.last_access)
        parent.used_s = max(parent.used_s, leaf.used_s)
        self.refresh(parent)
        if parent is not self.root:
            self.merge_up(parent)  # it may be older than the nodes above it
        self.merge_into_only_child(parent)

    # -- uses -------------------------------------------------------------------------------

    def touch(self, node: TreeNode, start: TreeNode | None = None) -> None:
        """Record a use of every node from below `start`, or else the root, to `node`."""
        self.clock += 1
        for step in self.path_to(node, start):
            self.policy.use(step, self.clock)
            step.last_access = self.clock
            if not step.children:
                self.full.refresh(step)
            if self.resumable is not None:
                self.resumable.used(step)

    def recall_uses(self, node: TreeNode) -> None:
        """Split a new edge by its pages' numbers of uses: some may have been cached before."""
        runs = self.policy.begin(node)
        if self.resumable is not None:
            self.resumable.used(node)
        for num_tokens, num_uses in runs:
            if num_tokens < len(node.key):
                upper = self.split(node, num_tokens)
                upper.num_uses = num_uses
                if self.resumable is not None:
                    self.resumable.used(upper)
        self.refresh(node)

    # -- withdrawn paths --------------------------------------------------------------------

    def withdraw(self, tokens: Int32Array, namespace: str, length: int) -> None:
        """Hide the path of `tokens` past its first `length` tokens, whole pages, from all walks.

        Nodes after that point stay only while leases have them locked, under a key that no lookup
        uses, so another path of the same tokens may take their place. `settle` removes the rest.
        """
        node, matched = self.walk(tokens, namespace)
        if matched <= length:
            return
        above = self.node_at(node, length)
        top = above.children[self.key_at(above.end, tokens[length:], namespace)]
        for each in self.nodes(top):
            if not each.is_withdrawn and self.block_log is not None:
                self.block_log.removed(each.page_hashes)
            each.is_withdrawn = True
            self.cursors.leaf_trimmed(each, above)
            siblings = parent_of(each).children
            del siblings[each.child_key]
            each.child_key = self.own_key(each)
            siblings[each.child_key] = each
        self._withdrawn += (top,)

    def settle(self) -> None:
        """End a change: free dead pages and withdrawn nodes without locks, update the cursors."""
        tops, self._withdrawn = self._withdrawn, ()
        for top in tops:
            for node in reversed(list(self.nodes(top))):
                is_unused = not node.children and not node.locks[self.full.index]
                if is_unused and is_on_tree(node):
                    self.trim(node, 0)
            if is_on_tree(top):
                self._withdrawn += (top,)
        if self.resumable is not None:
            self.resumable.sweep(self.trim)
        if tops or self.resumable is not None:
            self.flush_dropped()
        if self.resumable is not None:
            self.cursors.measure(self.resumable.take_remarked())

    def flush_dropped(self) -> None:
        for component in self.components:
            component.flush_dropped()

    # -- splits and merges ------------------------------------------------------------------

    def split(self, lower: TreeNode, num_tokens: int) -> TreeNode:
        """Put a new node after the first `num_tokens` of `lower`'s edge; `lower` stays the end.
        Leases point at the node where their prefix ends, so the lower node keeps its identity."""
        parent = parent_of(lower)
        key, namespace = lower.key[:num_tokens].copy(), lower.namespace
        upper = self._new_node(key, parent, lower.child_key, namespace)
        upper.last_access, upper.num_uses = lower.last_access, lower.num_uses
        upper.used_s, upper.return_class = lower.used_s, lower.return_class
        upper.retention = lower.retention
        upper.was_cut = True
        if self.resumable is not None:
            upper.read.last_access, upper.read.num_uses = lower.read.last_access, lower.num_uses
        parent.children[upper.child_key] = upper
        lower.key = lower.key[num_tokens:].copy()
        cut = num_tokens // self.page_size
        upper.page_hashes = lower.page_hashes[:cut].copy()
        lower.page_hashes = lower.page_hashes[cut:].copy()
        lower.parent = upper
        lower.child_key = self.key_at(upper.end, lower.key, namespace)
        upper.children[lower.child_key] = lower
        for component in self.components:
            component.split(upper, lower)
        if self.resumable is not None:
            self.resumable.split(upper, lower)
        self.cursors.node_split(upper, lower)
        return upper

    def may_merge(self, upper: TreeNode, lower: TreeNode) -> bool:
        """Return whether `lower` and its parent `upper` should be one node.

        A leaf is as old as the latest use through it. So if the upper edge was used no later than
        the lower edge, it is evicted as if both had been used together. An edge that paths of
        several holders shared stays apart, so that the hints of one count below it.
        """
        return (
            upper is not self.root
            and len(upper.children) == 1
            and len(upper.key) < 2 * len(lower.key)
            and upper.last_access <= lower.last_access
            and upper.num_uses == lower.num_uses
            and not (upper.is_withdrawn or lower.is_withdrawn)
            and upper.is_shared == lower.is_shared
            and all(component.may_merge(upper, lower) for component in self.components)
        )

    def _merge(self, upper: TreeNode, lower: TreeNode) -> None:
        """Undo a split: move the edge and the place of `upper` to `lower`, its only child. Leases
        point at the node where their prefix ends, so the lower node keeps its identity."""
        parent = parent_of(upper)
        for component in self.components:
            component.merge(upper, lower)
        if upper.retention is not None:
            lower.retention = (lower.retention or upper.retention).joined(upper.retention)
        lower.key = joined(upper.key, lower.key)
        lower.page_hashes = joined(upper.page_hashes, lower.page_hashes)
        lower.parent = parent
        lower.child_key = upper.child_key
        parent.children[lower.child_key] = lower
        if self.resumable is not None:
            self.resumable.merged(upper, lower)
        self.cursors.nodes_merged(upper, lower)

    def merge_up(self, lower: TreeNode) -> None:
        """Merge the nodes above `lower` into it while allowed."""
        while self.may_merge(upper := parent_of(lower), lower):
            self._merge(upper, lower)

    def merge_into_only_child(self, upper: TreeNode) -> None:
        """Merge `upper` if its separating lock, value or other child is gone."""
        lower = only_child(upper)
        if lower is not None:
            self.merge_up(lower)

    def merge_path(self, node: TreeNode, start: TreeNode | None = None) -> None:
        """Merge just-used nodes from below `start` (which has a lock) or the root to `node`."""
        while node is not (start or self.root):
            self.merge_up(node)
            node = parent_of(node)

    def refresh(self, node: TreeNode) -> None:
        if node is not self.root:
            for component in self.components:
                component.refresh(node)
            if self.resumable is not None:
                self.resumable.end_changed(node)
