"""A compressed, page-aligned radix tree of token sequences: the core under every prefix cache.

It owns the shape: nodes, edges, their tokens and ages. It never touches an allocator: components
own the values of edges, their locks and the freed pages. With windows, `resumable.py` determines
the resumable positions; without them, every position is resumable.

Edges are multiples of `page_size` tokens, siblings differ in their first page, and tokens are
compared, not hashes. The root holds nothing, is never locked or evicted, and is never counted.

A path belongs to one namespace: children of the root are found by namespace and first page, all
others by first page alone. So paths of different namespaces share only the root.

A path has few nodes: a node and its only child merge if locks, values and use do not distinguish
them, unless the upper edge is at least twice as long as the lower. So the lengths of edges that
could merge halve downwards, and a page is copied about once each time its edge doubles.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from sgl_jax.core.step_plan import Int32Array
from sgl_jax.mem_cache.errors import LedgerError
from sgl_jax.mem_cache.eviction.eviction_policy import EvictionPolicy
from sgl_jax.mem_cache.tree.cursor_index import CursorIndex
from sgl_jax.mem_cache.tree.full_component import FullComponent
from sgl_jax.mem_cache.tree.prefix_cursor import common_prefix_len
from sgl_jax.mem_cache.tree.resumable import Resumable
from sgl_jax.mem_cache.tree.tree_component import FirstPages, LeaseOffer, TreeComponent
from sgl_jax.mem_cache.tree.tree_node import TreeNode, front, only_child, parent_of
from sgl_jax.mem_cache.tree.window_component import WindowComponent


class RadixTree:
    """The tree over `full`, which locks paths, and `windows`; lengths are tokens, whole pages only.

    `num_locks` counts the locks not yet undone, `num_locked_tokens` the tokens from the root to
    each locked node, summed over the locks: both must equal the sums over the live leases. The tree
    reports uses and evictions to `policy`.
    """

    def __init__(
        self,
        page_size: int,
        full: FullComponent,
        policy: EvictionPolicy,
        windows: Sequence[WindowComponent] = (),
    ) -> None:
        self.page_size = page_size
        self.full = full
        self.components: tuple[TreeComponent, ...] = (full, *windows)
        self.resumable: Resumable | None = None  # before the root is made
        self._policy = policy
        self.num_locks = 0
        self.num_locked_tokens = 0
        self._clock = 0
        self._next_id = 0
        self.root = self._new_node(np.zeros(0, np.int32), None, b"", "")
        usable_len = None
        if windows:
            self.resumable = Resumable(windows, self.root, page_size)
            usable_len = self.resumable.usable_len
        self.cursors = CursorIndex(page_size, self.root, self._walk, self.key_at, usable_len)

    # -- matching ---------------------------------------------------------------------------

    def peek(
        self, tokens: Int32Array, namespace: str = "", start: TreeNode | None = None
    ) -> tuple[TreeNode, int]:
        """Return the length of the longest resumable prefix, and a node that its path leads to or
        through. Read-only.

        `start` is a locked node on that path: the search begins below it.
        """
        node, length = self._walk(tokens, namespace, start)
        if self.resumable is not None:
            length, _ = self.resumable.usable_len(node, length, start.end if start else 0)
        return node, length

    def match(
        self,
        tokens: Int32Array,
        namespace: str = "",
        start: TreeNode | None = None,
        first_pages: FirstPages = None,
    ) -> TreeNode | None:
        """Lock the longest usable prefix of `tokens` and return its last node.

        None if nothing matches: then nothing is locked. Needs one `unlock`. With `start`, as in
        `peek`, a lock moves from there to the returned node, which is `start` if nothing below
        matches; `first_pages` are the lease's. `settle` ends the change.
        """
        node, length = self.peek(tokens, namespace, start)
        if length == 0:
            return None
        if start is not None and length == start.end:
            return start
        node = self._node_at(node, length)
        self._touch(node, start)
        if self.resumable is not None:
            self.resumable.read(node, self._clock)
        if start is None:
            self.lock(node)
            self._merge_path(node)
        else:
            self._merge_path(node, start)
            self.move_lock(start, node, first_pages)
        return node

    def lock(self, node: TreeNode, first_pages: FirstPages = None) -> None:
        """Lock all pages that a lease ending at `node` reads. Undone by `unlock`."""
        self.num_locks += 1
        self.num_locked_tokens += node.end
        for component in self.components:
            component.lock(node, first_pages)

    def unlock(self, node: TreeNode, first_pages: FirstPages = None) -> None:
        """Undo one lock of `node`, which may then be removed. `settle` ends the change."""
        for component in self.components:
            component.unlock(node, first_pages)
        self.num_locks -= 1
        self.num_locked_tokens -= node.end
        if self.resumable is not None:
            self.resumable.released(node)
        self._merge_into_only_child(node)

    def move_lock(self, old: TreeNode, new: TreeNode, first_pages: FirstPages = None) -> None:
        """Move one lock from `old` to `new`, which is `old` or lies below it.

        `old` may then be removed, if the lock was its last. `settle` ends the change.
        """
        self.num_locked_tokens += new.end - old.end
        for component in self.components:
            component.move_lock(old, new, first_pages)
        if self.resumable is not None:
            self.resumable.released(old)
        self._merge_into_only_child(old)

    def let_go(self, node: TreeNode) -> None:
        """A lease that ends at `node` has unlocked window pages. `settle` ends the change."""
        if self.resumable is not None:
            self.resumable.released(node)

    def settle(self) -> None:
        """Free dead pages and update the cursors, at the end of each change."""
        if self.resumable is None:
            return
        self.resumable.sweep(self._trim)
        for component in self.components:
            component.flush_dropped()
        self.cursors.measure(self.resumable.take_remarked())

    # -- changing ---------------------------------------------------------------------------

    def insert(
        self, tokens: Int32Array, offer: LeaseOffer, start: TreeNode | None = None
    ) -> TreeNode:
        """Make `tokens` (whole pages, at least one) a path of the offer's namespace.

        Components take the pages they lack. `start` is a locked node on that path: only nodes below
        it are visited, so a long conversation costs no more to continue than a short one. Returns
        the node that ends exactly at len(tokens), not locked. `settle` ends the change, after a
        lock.
        """
        start = start or self.root
        node, length = self._walk(tokens, offer.namespace, start)
        node = self._node_at(node, length)
        self._touch(node, start)
        is_new = length < len(tokens)
        if is_new:
            node = self._add_child(node, tokens[length:].copy(), offer.namespace)
        # An old node may lack window pages only.
        added = [node] if self.resumable is None else self.path_to(node, start)
        for step in added:
            for component in self.components:
                component.absorb(step, offer)
        if self.resumable is not None:
            self.resumable.added(added)
        if is_new:
            self._recall_uses(node)
        self._merge_path(node, start)
        return node

    def num_evictable(self, pool: int) -> int:
        if self.resumable is None:
            return self.full.num_evictable
        return sum(each.num_evictable for each in self.components if each.pool == pool)

    def evict(self, num_pages: int, pool: int = 0) -> int:
        """Free `num_pages` of the pool, or all unlocked pages; return the number freed.

        The last victim's edge is shortened, so without windows the number is exact. A page of
        tokens takes its window pages along, and tokens that become not resumable are freed too.
        """
        before = self.num_evictable(pool)
        target = max(before - num_pages, 0)
        while (present := self.num_evictable(pool)) > target:
            if not self._evict_some(present - target, pool):
                break
            self.settle()
        for component in self.components:
            component.flush_dropped()
        return before - self.num_evictable(pool)

    def _evict_some(self, num_pages: int, pool: int) -> bool:
        """Free up to `num_pages` of the least useful pages; False if there are none."""
        leaf = self._policy.next_victim(self._clock)
        if self.resumable is not None:
            # A pool of windows has no ages of tokens.
            least = self.resumable.least_useful(pool, leaf, self._policy, self._clock)
            if least is not None:
                window, node, level = least
                window.take(node, num_pages, level)
                self.resumable.tombstoned(node)
                return True
        if leaf is None:
            return False
        keep = self.full.pages_to_keep(leaf, num_pages)
        if self.resumable is not None:
            keep = self.resumable.pages_to_keep(leaf, num_pages, pool, self.full)
        self._trim(leaf, max(keep, self._policy.num_kept(leaf)) * self.page_size)
        return True

    def path_to(self, node: TreeNode, start: TreeNode | None = None) -> list[TreeNode]:
        """The nodes from below `start`, or else the root, to `node`."""
        start = start or self.root
        path = []
        step: TreeNode | None = node
        while step is not None and step is not start:
            path.append(step)
            step = step.parent
        return path[::-1]

    def nodes(self) -> Iterator[TreeNode]:
        """Every node but the root, parents before children."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def is_listed(self, node: TreeNode) -> bool:
        """Return whether a lookup by `node`'s namespace and tokens finds it, below its own
        namespace."""
        parent = parent_of(node)
        key = self.child_key(parent, node.key, node.namespace)
        is_of_parent = parent is self.root or parent.namespace == node.namespace
        return is_of_parent and node.child_key == key and parent.children.get(key) is node

    # -- shape ------------------------------------------------------------------------------

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
        node.last_access = self._clock
        if self.resumable is not None:
            node.start_reading()
        return node

    def child_key(self, parent: TreeNode, tokens: Int32Array, namespace: str) -> bytes:
        """The key, in `parent.children`, of the edge that begins with `tokens` (at least a page).

        The first page has a fixed length, so no two pairs of page and namespace share a key.
        """
        return self.key_at(parent.end, tokens, namespace)

    def key_at(self, start: int, tokens: Int32Array, namespace: str) -> bytes:
        """The `child_key` for a parent that ends at `start`."""
        first_page = tokens[: self.page_size].tobytes()
        return first_page if start else first_page + namespace.encode()

    def _add_child(self, parent: TreeNode, key: Int32Array, namespace: str) -> TreeNode:
        child_key = self.child_key(parent, key, namespace)
        child = self._new_node(key, parent, child_key, namespace)
        parent.children[child_key] = child
        self._refresh(parent)
        self.cursors.child_added(parent, child)
        return child

    def _walk(
        self, tokens: Int32Array, namespace: str, below: TreeNode | None = None
    ) -> tuple[TreeNode, int]:
        """Return the node in whose edge the walk along `tokens` ends, and the tokens matched from
        the root, whole pages."""
        node = below or self.root
        length = node.end
        limit = len(tokens) // self.page_size * self.page_size
        while length == node.end < limit:
            rest = tokens[length:limit]
            child = node.children.get(self.key_at(length, rest, namespace))
            if child is None:
                break
            node = child
            length += common_prefix_len(child.key, rest) // self.page_size * self.page_size
        return node, length

    def _node_at(self, node: TreeNode, length: int) -> TreeNode:
        """Return the node that ends at `length` on the path to `node`; split an edge if needed."""
        while node.parent is not None and node.parent.end >= length:
            node = node.parent
        if node.end == length:
            return node
        upper = self._split(node, len(node.key) - (node.end - length))
        # The rest of the edge may be short enough to merge now. Leave the edges above: `upper` is
        # about to get a lock or a child.
        rest = only_child(node)
        if rest is not None and self.may_merge(node, rest):
            self._merge(node, rest)
        return upper

    def _split(self, lower: TreeNode, num_tokens: int) -> TreeNode:
        """Put a new node after the first `num_tokens` of `lower`'s edge; `lower` stays the end.

        Leases point at the node where their prefix ends, so the lower node keeps its identity.
        """
        parent = parent_of(lower)
        key, namespace = lower.key[:num_tokens].copy(), lower.namespace
        upper = self._new_node(key, parent, lower.child_key, namespace)
        upper.last_access = lower.last_access
        if self.resumable is not None:
            upper.read.last_access = lower.read.last_access
            upper.read.num_uses = upper.num_uses = lower.num_uses
        parent.children[upper.child_key] = upper
        lower.key = lower.key[num_tokens:].copy()
        lower.parent = upper
        lower.child_key = self.child_key(upper, lower.key, namespace)
        upper.children[lower.child_key] = lower
        for component in self.components:
            component.split(upper, lower)
        if self.resumable is not None:
            self.resumable.split(upper, lower)
        self._policy.split(upper, lower)
        self.cursors.node_split(upper, lower)
        return upper

    def may_merge(self, upper: TreeNode, lower: TreeNode) -> bool:
        """Return whether `lower` and its parent `upper` should be one node.

        A leaf is as old as the latest use through it, so an upper edge used no later than the lower
        one is evicted as if both had been used together.
        """
        return (
            upper is not self.root
            and len(upper.children) == 1
            and len(upper.key) < 2 * len(lower.key)
            and upper.last_access <= lower.last_access
            and upper.num_uses == lower.num_uses
            and all(component.may_merge(upper, lower) for component in self.components)
        )

    def _merge(self, upper: TreeNode, lower: TreeNode) -> None:
        """Undo a split: `lower`, the only child of `upper`, takes over its edge and its place.

        Leases point at the node where their prefix ends, so the lower node keeps its identity.
        """
        parent = parent_of(upper)
        for component in self.components:
            component.merge(upper, lower)
        self._policy.merge(upper, lower)
        lower.key = np.concatenate([upper.key, lower.key])
        lower.parent = parent
        lower.child_key = upper.child_key
        parent.children[lower.child_key] = lower
        if self.resumable is not None:
            self.resumable.merged(upper, lower)
        self.cursors.nodes_merged(upper, lower)

    def _merge_up(self, lower: TreeNode) -> None:
        """Merge the nodes above `lower` into it while allowed."""
        while self.may_merge(parent_of(lower), lower):
            self._merge(parent_of(lower), lower)

    def _merge_into_only_child(self, upper: TreeNode) -> None:
        """Merge `upper` if its separating lock, value or other child is gone."""
        lower = only_child(upper)
        if lower is not None:
            self._merge_up(lower)

    def _merge_path(self, node: TreeNode, start: TreeNode | None = None) -> None:
        """Merge just-used nodes from below `start`, or else the root, to `node`.

        `start` itself stays: it has a lock of its own.
        """
        while node is not (start or self.root):
            self._merge_up(node)
            node = parent_of(node)

    def _trim(self, leaf: TreeNode, keep_tokens: int) -> None:
        """Shorten a leaf's edge to `keep_tokens`; 0 removes the leaf."""
        if leaf.children:
            raise LedgerError(f"{leaf!r} is to be shortened, but it is no leaf")
        parent = parent_of(leaf)
        for component in self.components:
            component.drop(leaf, keep_tokens)
        self._policy.drop(leaf, keep_tokens, self._clock)
        if keep_tokens:
            leaf.end -= len(leaf.key) - keep_tokens
            leaf.key = front(leaf.key, keep_tokens)
            if self.resumable is not None:
                self.resumable.trimmed(leaf)
            self.cursors.leaf_trimmed(leaf, leaf)
            return
        del parent.children[leaf.child_key]
        if self.resumable is not None:
            self.resumable.left(leaf, parent)
        self.cursors.leaf_trimmed(leaf, parent)
        # An insert below a lock does not update the use of the nodes above: they get it once it
        # matters, as they become leaves.
        parent.last_access = max(parent.last_access, leaf.last_access)
        self._refresh(parent)
        if parent is not self.root:
            self._merge_up(parent)  # it may be older than the nodes above it
        self._merge_into_only_child(parent)

    def _touch(self, node: TreeNode, start: TreeNode | None = None) -> None:
        """Record a use of every node from below `start`, or else the root, to `node`."""
        self._clock += 1
        for step in self.path_to(node, start):
            self._policy.use(step, self._clock)
            step.last_access = self._clock
            if not step.children:
                self.full.refresh(step)
            if self.resumable is not None:
                self.resumable.used(step)

    def _recall_uses(self, node: TreeNode) -> None:
        """The new edge to `node` may hold pages cached before: make a node for each number of
        uses."""
        runs = self._policy.begin(node)
        if self.resumable is not None:
            self.resumable.used(node)
        for num_tokens, num_uses in runs:
            if num_tokens < len(node.key):
                upper = self._split(node, num_tokens)
                upper.num_uses = num_uses
                if self.resumable is not None:
                    self.resumable.used(upper)
        self._refresh(node)

    def _refresh(self, node: TreeNode) -> None:
        if node is not self.root:
            for component in self.components:
                component.refresh(node)
