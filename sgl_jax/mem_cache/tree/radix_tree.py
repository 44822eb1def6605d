"""A compressed, page-aligned radix tree of token sequences: the core of every prefix cache.

It matches, locks, inserts and evicts paths of a `TreeShape`. It never calls an allocator:
components own the values of edges, their locks and the freed pages. With windows, `resumable.py`
determines the resumable positions; without windows, every position is resumable.
"""

from collections.abc import Callable

from sgl_jax.core.step_plan import Int32Array
from sgl_jax.mem_cache.errors import LedgerError
from sgl_jax.mem_cache.tree.block_log import BlockLog
from sgl_jax.mem_cache.tree.tree_component import FirstPages, LeaseOffer
from sgl_jax.mem_cache.tree.tree_shape import TreeShape
from sgl_jax.mem_cache.tree_node import TreeNode, front, is_on_tree, parent_of


class RadixTree(TreeShape):
    """A tree with paths that leases lock. It takes the arguments of `TreeShape`.

    `num_locks` counts the locks not yet undone. `num_locked_tokens` sums, over these locks, the
    tokens from the root to the locked node. Both must equal the sums over the live leases. If set,
    `block_log` gets each page of tokens that enters or leaves the tree, and `before_eviction` gets
    each leaf about to lose pages to `evict`.
    """

    num_locks = 0
    num_locked_tokens = 0
    _withdrawn: tuple[TreeNode, ...] = ()
    block_log: BlockLog | None = None
    before_eviction: Callable[[TreeNode], object] | None = None

    # -- matching -------------------------------------------------------------------------

    def peek(
        self, tokens: Int32Array, namespace: str = "", start: TreeNode | None = None
    ) -> tuple[TreeNode, int]:
        """Return a node with the longest resumable prefix on its path, and the prefix's length.
        Read-only. `start` is a locked node on that path; the search begins below it."""
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
        """Lock the longest usable prefix of `tokens` until `unlock`, and return its last node.

        Return None, locking nothing, if nothing matches. If `start`, a locked node on the path, is
        given, a lock moves from there to the returned node, which is `start` if nothing below it
        matches; `first_pages` are the lease's. Call `settle` to end the change.
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

    # -- locks ----------------------------------------------------------------------------

    def lock(self, node: TreeNode, first_pages: FirstPages = None) -> None:
        """Lock all pages that a lease ending at `node` reads, until `unlock`."""
        self.num_locks += 1
        self.num_locked_tokens += node.end
        for component in self.components:
            component.lock(node, first_pages)

    def unlock(self, node: TreeNode, first_pages: FirstPages = None) -> None:
        """Undo one lock of `node`, which may then be removed. Call `settle` to end the change."""
        for component in self.components:
            component.unlock(node, first_pages)
        self.num_locks -= 1
        self.num_locked_tokens -= node.end
        if self.resumable is not None:
            self.resumable.released(node)
        self._merge_into_only_child(node)

    def move_lock(self, old: TreeNode, new: TreeNode, first_pages: FirstPages = None) -> None:
        """Move one lock from `old` to `new`, which is `old` or below it. If the lock was its last,
        `old` may then be removed. Call `settle` to end the change."""
        self.num_locked_tokens += new.end - old.end
        for component in self.components:
            component.move_lock(old, new, first_pages)
        if self.resumable is not None:
            self.resumable.released(old)
        self._merge_into_only_child(old)

    def unlock_passed(self, node: TreeNode) -> None:
        """Record that a lease at `node` unlocked window pages. Call `settle` to end the change."""
        if self.resumable is not None:
            self.resumable.released(node)

    def settle(self) -> None:
        """End a change: free withdrawn and dead pages, and update the cursors."""
        if self._withdrawn:
            self._drop_withdrawn()
        if self.resumable is None:
            return
        self.resumable.sweep(self._trim)
        for component in self.components:
            component.flush_dropped()
        self.cursors.measure(self.resumable.take_remarked())

    # -- changing -------------------------------------------------------------------------

    def insert(
        self, tokens: Int32Array, offer: LeaseOffer, start: TreeNode | None = None
    ) -> TreeNode | None:
        """Make `tokens` (whole pages, at least one) a path of the offer's namespace.

        Components take the pages that they lack. `start` is a locked node on that path. Only nodes
        below it are visited, so a long conversation costs no more to continue than a short one.
        Return the node that ends exactly at len(tokens), not locked; or None, changing nothing, if
        `start` is withdrawn. Lock the node if needed, then call `settle` to end the change.
        """
        start = start or self.root
        if start.is_withdrawn:
            return None
        node, length = self._walk(tokens, offer.namespace, start)
        node = self._node_at(node, length)
        self._touch(node, start)
        is_new = length < len(tokens)
        if is_new:
            node = self._add_child(node, tokens[length:].copy(), offer.namespace)
            if self.block_log is not None:
                parent = self.hash_before(node) if len(parent_of(node).key) else None
                self.block_log.stored(parent, node.page_hashes, node.key)
        # An old node may lack only window pages.
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

    def withdraw(self, tokens: Int32Array, namespace: str, length: int) -> None:
        """Hide the path of `tokens` past its first `length` tokens, whole pages, from all walks.

        Nodes after that point stay only while leases have them locked, under a key that no lookup
        uses, so another path of the same tokens may take their place. Call `settle` to end the
        change.
        """
        node, matched = self._walk(tokens, namespace)
        if matched <= length:
            return
        above = self._node_at(node, length)
        top = above.children[self.child_key(above, tokens[length:], namespace)]
        for each in self.nodes(top):
            if not each.is_withdrawn and self.block_log is not None:
                self.block_log.removed(each.page_hashes)
            each.is_withdrawn = True
            self.cursors.leaf_trimmed(each, above)
        del above.children[top.child_key]
        top.child_key = self.own_key(top)
        above.children[top.child_key] = top
        self._withdrawn += (top,)

    def _drop_withdrawn(self) -> None:
        """Remove the withdrawn nodes that no lease has locked any more."""
        tops, self._withdrawn = self._withdrawn, ()
        for top in tops:
            for node in reversed(list(self.nodes(top))):
                is_unused = not node.children and not node.locks[self.full.index]
                if is_unused and is_on_tree(node):
                    self._trim(node, 0)
            if is_on_tree(top):
                self._withdrawn += (top,)
        for component in self.components:
            component.flush_dropped()

    def num_evictable(self, pool: int) -> int:
        if self.resumable is None:
            return self.full.num_evictable
        return sum(each.num_evictable for each in self.components if each.pool == pool)

    def evict(self, num_pages: int, pool: int = 0) -> int:
        """Free `num_pages` of the pool, or all unlocked pages; return the number freed.

        The last victim's edge is shortened, so without windows the number is exact. With a page of
        tokens, its window pages are freed too, and so are tokens not resumable any more.
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
        """Free up to `num_pages` of the least useful pages; return False if there are none."""
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
        if self.before_eviction is not None:
            self.before_eviction(leaf)
        keep = self.full.pages_to_keep(leaf, num_pages)
        if self.resumable is not None:
            keep = self.resumable.pages_to_keep(leaf, num_pages, pool, self.full)
        self._trim(leaf, max(keep, self._policy.num_kept(leaf)) * self.page_size)
        return True

    def _trim(self, leaf: TreeNode, keep_tokens: int) -> None:
        """Shorten a leaf's edge to `keep_tokens`; 0 removes the leaf."""
        if leaf.children:
            raise LedgerError(f"{leaf!r} is to be shortened, but it is no leaf")
        parent = parent_of(leaf)
        for component in self.components:
            component.drop(leaf, keep_tokens)
        keep_pages = keep_tokens // self.page_size
        if not leaf.is_withdrawn:  # otherwise another node may have these tokens by now
            self._policy.drop(leaf, keep_tokens, self._clock)
            if self.block_log is not None:
                self.block_log.removed(leaf.page_hashes[keep_pages:])
        leaf.page_hashes = front(leaf.page_hashes, keep_pages)
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
        # An insert below a lock does not update the use of the nodes above. They get it once it
        # matters: when they become leaves.
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
        """Split a new edge by its pages' numbers of uses: some may have been cached before."""
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
