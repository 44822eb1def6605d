"""A prefix cache that also keeps whole leases between the turns of streaming sessions.

`SessionAwareCache` decorates any prefix cache. A session has a *slot* on the rank that computes
its turns. While a turn runs, its lease is lent to the request and the slot only remembers that;
when the turn's lease comes to its end, the slot takes it over instead (`take_over`, called by
`release_kv_cache`), row, pages, locks and all. So the next turn starts where this one stopped.

Owns which lease belongs to which session, and which session was used longest ago. Never frees a
page itself, and knows nothing of tokens or turns.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from sgl_jax.core.step_plan import Int32Array
from sgl_jax.mem_cache.errors import LeaseError
from sgl_jax.mem_cache.lease import KVLease
from sgl_jax.mem_cache.prefix_cache import PrefixCache, PrefixMatch, PrefixPeek
from sgl_jax.mem_cache.prefix_cursor import PrefixCursor
from sgl_jax.mem_cache.tree_component import LeaseOffer
from sgl_jax.mem_cache.tree_node import TreeNode


class SessionAwareCache:
    """`inner`, and a slot for each streaming session that holds a lease on this rank.

    Of the sessions, `inner` sees no more than their locks: it counts them as any lease's.
    """

    def __init__(self, inner: PrefixCache) -> None:
        self.inner = inner
        self._idle: OrderedDict[str, KVLease] = OrderedDict()  # used longest ago first
        self._lent: dict[int, str] = {}  # row of the lease that a running turn holds -> session
        self._lent_rows: dict[str, int] = {}  # the same, from session to row

    # -- sessions ---------------------------------------------------------------------------

    @property
    def num_idle(self) -> int:
        """Sessions that hold a lease and run nothing."""
        return len(self._idle)

    def idle(self) -> Iterator[tuple[str, KVLease]]:
        """Idle sessions and the leases that their slots hold, used longest ago first."""
        return iter(self._idle.items())

    def lent(self) -> Iterator[tuple[str, int]]:
        """Sessions whose turn runs, and the row of the lease that it runs on."""
        return ((session_id, row) for row, session_id in self._lent.items())

    def idle_lease(self, session_id: str) -> KVLease | None:
        """What the slot holds; None if the session runs, was evicted, or is not known here."""
        return self._idle.get(session_id)

    def lent_row(self, session_id: str) -> int | None:
        """The row of the lease that the session's running turn holds; None if none runs here."""
        return self._lent_rows.get(session_id)

    def oldest_idle(self) -> str | None:
        """The idle session used longest ago."""
        return next(iter(self._idle), None)

    def holds(self, session_id: str) -> bool:
        """Whether the session's lease is of this rank, idle or lent to a running turn."""
        return session_id in self._idle or session_id in self._lent_rows

    def bind(self, session_id: str, lease: KVLease) -> None:
        """A turn of the session runs on `lease`, newly opened: its slot will take it over."""
        lease.require_live()
        if self.holds(session_id):
            raise LeaseError(f"session {session_id!r} has a lease already; {lease!r} is another")
        if lease.row in self._lent:
            raise LeaseError(f"{lease!r} is that of session {self._lent[lease.row]!r} already")
        self._lend(session_id, lease)

    def lend(self, session_id: str) -> KVLease:
        """The next turn starts: its request becomes the holder of the slot's lease."""
        if session_id not in self._idle:
            raise LeaseError(f"session {session_id!r} has no lease to lend")
        lease = self._idle.pop(session_id)
        self._lend(session_id, lease)
        return lease

    def unbind(self, lease: KVLease) -> None:
        """The session gives its claim up: `lease` will end as any other. Nothing if it has none.

        After a retract, an error, or when the session was closed meanwhile.
        """
        self._take_back(lease)

    def take_over(self, lease: KVLease, num_tokens: int) -> bool:
        """A lease is at its end: if a session's turn held it, its slot is the new holder.

        The KV of the first `num_tokens` tokens will be wanted again; what lies behind stays
        attached until the next turn. False if the lease belongs to no session.
        """
        session_id = self._take_back(lease)
        if session_id is None:
            return False
        lease.change_holder(num_tokens)
        self._idle[session_id] = lease
        return True

    def remove(self, session_id: str) -> KVLease | None:
        """Empty the slot; the caller releases the lease it held, if any."""
        return self._idle.pop(session_id, None)

    def touch(self, session_id: str) -> None:
        """A turn of the session waits: it is now the one used last, and evicted last."""
        if session_id in self._idle:
            self._idle.move_to_end(session_id)

    def _lend(self, session_id: str, lease: KVLease) -> None:
        self._lent[lease.row] = session_id
        self._lent_rows[session_id] = lease.row

    def _take_back(self, lease: KVLease) -> str | None:
        """The session whose turn holds `lease`, which it does no more; None if it is no turn's."""
        session_id = self._lent.pop(lease.row, None)
        if session_id is not None:
            del self._lent_rows[session_id]
        return session_id

    # -- the prefix cache -------------------------------------------------------------------

    @property
    def num_evicted(self) -> int:
        """Pages given back by eviction since the start."""
        return self.inner.num_evicted

    @property
    def num_evictable(self) -> int:
        """Pages the cache could give back now."""
        return self.inner.num_evictable

    @property
    def num_protected(self) -> int:
        """Pages of the cache that live leases, those of idle sessions included, have locked."""
        return self.inner.num_protected

    @property
    def num_locks(self) -> int:
        """Locks taken and not yet undone."""
        return self.inner.num_locks

    @property
    def num_locked_tokens(self) -> int:
        """Prefix lengths of these locks, summed over the locks."""
        return self.inner.num_locked_tokens

    def peek(
        self, tokens: Int32Array, namespace: str = "", start: TreeNode | None = None
    ) -> PrefixPeek:
        """What `match_prefix` would find. Changes nothing."""
        return self.inner.peek(tokens, namespace, start)

    def follow(
        self, tokens: Int32Array, namespace: str, tag: int, below: TreeNode | None = None
    ) -> PrefixCursor:
        """Keep track of how much of `tokens` the cache holds, until `unfollow`."""
        return self.inner.follow(tokens, namespace, tag, below)

    def unfollow(self, cursor: PrefixCursor) -> None:
        """End a cursor of `follow`, once."""
        self.inner.unfollow(cursor)

    def take_moved(self) -> Sequence[PrefixCursor]:
        """The cursors whose length or place has changed since the last call."""
        return self.inner.take_moved()

    @property
    def followed_nodes(self) -> Sequence[TreeNode | None]:
        """The nodes where cursors are, by `PrefixCursor.place`."""
        return self.inner.followed_nodes

    def next_key(self, node: TreeNode | None, tokens: Int32Array, namespace: str) -> bytes | None:
        """The `next_key` of a cursor that ends at `node`, where `tokens` come next."""
        return self.inner.next_key(node, tokens, namespace)

    def match_prefix(
        self, tokens: Int32Array, namespace: str = "", start: TreeNode | None = None
    ) -> PrefixMatch:
        """Find and lock the longest cached prefix of `tokens`; a lock of `start` moves there."""
        return self.inner.match_prefix(tokens, namespace, start)

    def accept(self, tokens: Int32Array, offer: LeaseOffer) -> PrefixMatch | None:
        """Keep `tokens` (whole pages), taking over the offered pages that are new.

        The lock of the offer moves to their end.
        """
        return self.inner.accept(tokens, offer)

    def unlock(self, node: TreeNode) -> None:
        """Undo one lock."""
        self.inner.unlock(node)

    def evict(self, num_pages: int) -> int:
        """Free `num_pages` pages, or all that can be freed; sessions are not touched."""
        return self.inner.evict(num_pages)

    def reset(self) -> None:
        """Evict everything. Raises `LedgerError` if a lock is still held, by a session too."""
        self.inner.reset()

    def pages_to(self, node: TreeNode) -> Int32Array:
        """The pages of the prefix that ends at `node`, in token order."""
        return self.inner.pages_to(node)

    def nodes(self) -> Sequence[TreeNode]:
        """All nodes that hold something, parents before children."""
        return self.inner.nodes()

    def held_pages(self) -> Int32Array:
        """All pages the cache holds, in no particular order."""
        return self.inner.held_pages()

    def audit(self, locked_nodes: Sequence[TreeNode]) -> None:
        """Prove the inner cache's books; slots are looked at with the leases that they hold."""
        self.inner.audit(locked_nodes)
