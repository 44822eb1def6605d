"""The leases that streaming sessions keep between their turns, on one rank.

While a turn runs, its request holds the lease and only the loan is recorded here. At the end of the
turn the session keeps the lease (`take_over`, called by `release_kv_cache`): row, pages, locks and
all. So the next turn starts at the end of the last one.

Owns the map from sessions to leases, and the order of their last use. Never frees a page, and never
reads tokens or turns.
"""

from collections import OrderedDict
from collections.abc import Iterator

from sgl_jax.mem_cache.errors import LeaseError
from sgl_jax.mem_cache.lease import KVLease


class SessionLeases:
    """A lease for each streaming session of this rank, idle or lent to its running turn."""

    def __init__(self) -> None:
        self._idle: OrderedDict[str, KVLease] = OrderedDict()  # used longest ago first
        self._lent: dict[int, str] = {}  # row of the lease that a running turn holds -> session
        self._lent_rows: dict[str, int] = {}  # the same, from session to row

    @property
    def num_idle(self) -> int:
        """Sessions that hold a lease and run nothing."""
        return len(self._idle)

    def idle(self) -> Iterator[tuple[str, KVLease]]:
        """Idle sessions and their leases, used longest ago first."""
        return iter(self._idle.items())

    def lent(self) -> Iterator[tuple[str, int]]:
        """Sessions with a running turn, and the row of its lease."""
        return ((session_id, row) for row, session_id in self._lent.items())

    def idle_lease(self, session_id: str) -> KVLease | None:
        """The lease of an idle session; None if it runs, was evicted, or is not on this rank."""
        return self._idle.get(session_id)

    def lent_row(self, session_id: str) -> int | None:
        """The row of the lease of the session's running turn; None if none runs here."""
        return self._lent_rows.get(session_id)

    def oldest_idle(self) -> str | None:
        return next(iter(self._idle), None)

    def holds(self, session_id: str) -> bool:
        """Return whether the session's lease is on this rank, idle or lent."""
        return session_id in self._idle or session_id in self._lent_rows

    def lends(self, lease: KVLease) -> bool:
        return lease.row in self._lent

    def bind(self, session_id: str, lease: KVLease) -> None:
        """A turn of the session runs on `lease`, newly opened, which the session will keep."""
        lease.require_live()
        if self.holds(session_id):
            raise LeaseError(f"session {session_id!r} has a lease already; {lease!r} is another")
        if lease.row in self._lent:
            raise LeaseError(f"{lease!r} is that of session {self._lent[lease.row]!r} already")
        self._lend(session_id, lease)

    def lend(self, session_id: str) -> KVLease:
        """Start the next turn: its request becomes the holder of the session's lease."""
        if session_id not in self._idle:
            raise LeaseError(f"session {session_id!r} has no lease to lend")
        lease = self._idle.pop(session_id)
        self._lend(session_id, lease)
        return lease

    def unbind(self, lease: KVLease) -> None:
        """Give up the session's claim: `lease` will end as any other. No effect without a claim.

        After a retract, an error, or when the session was closed meanwhile.
        """
        self._take_back(lease)

    def take_over(self, lease: KVLease, num_tokens: int) -> None:
        """Keep a finished turn's lease for the session, with its first `num_tokens` tokens.

        Raises `LeaseError` if no session lends it.
        """
        session_id = self._take_back(lease)
        if session_id is None:
            raise LeaseError(f"{lease!r} is no session's to keep")
        lease.change_holder(num_tokens)
        self._idle[session_id] = lease

    def remove(self, session_id: str) -> KVLease | None:
        """Remove an idle session and return its lease, if any; the caller releases it."""
        return self._idle.pop(session_id, None)

    def touch(self, session_id: str) -> None:
        """Mark the session, which has a waiting turn, as used last, so that it is evicted last."""
        if session_id in self._idle:
            self._idle.move_to_end(session_id)

    def _lend(self, session_id: str, lease: KVLease) -> None:
        self._lent[lease.row] = session_id
        self._lent_rows[session_id] = lease.row

    def _take_back(self, lease: KVLease) -> str | None:
        """End the loan of `lease` and return its session; None if it is no turn's."""
        session_id = self._lent.pop(lease.row, None)
        if session_id is not None:
            del self._lent_rows[session_id]
        return session_id
