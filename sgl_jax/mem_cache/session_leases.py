"""The leases that streaming sessions keep between their turns, on one rank.

While a turn runs, its request holds the lease, and only the session is recorded here. At the end of
the turn the session takes the lease back (`check_in`, called by `release_kv_cache`), including
row, pages and locks. So the next turn starts at the end of the last one.

This file owns the map from sessions to leases, and the order of their last use. It never frees a
page, and never reads tokens or turns.
"""

from collections import OrderedDict
from collections.abc import Iterator

from sgl_jax.mem_cache.errors import LeaseError
from sgl_jax.mem_cache.lease import KVLease


class SessionLeases:
    """A lease for each streaming session of this rank, idle or checked out to its running turn."""

    def __init__(self) -> None:
        self._idle: OrderedDict[str, KVLease] = OrderedDict()  # least recently used first
        self._session_of: dict[int, str] = {}  # row of a running turn's lease -> session
        self._row_of: dict[str, int] = {}  # the inverse: session -> row

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    def idle(self) -> Iterator[tuple[str, KVLease]]:
        return iter(self._idle.items())

    def checked_out(self) -> Iterator[tuple[str, int]]:
        return ((session_id, row) for row, session_id in self._session_of.items())

    def idle_lease(self, session_id: str) -> KVLease | None:
        """Return an idle session's lease; None if it runs, was evicted, or is not on this rank."""
        return self._idle.get(session_id)

    def checked_out_row(self, session_id: str) -> int | None:
        return self._row_of.get(session_id)

    def oldest_idle(self) -> str | None:
        return next(iter(self._idle), None)

    def holds(self, session_id: str) -> bool:
        return session_id in self._idle or session_id in self._row_of

    def has_checked_out(self, lease: KVLease) -> bool:
        return lease.row in self._session_of

    def bind(self, session_id: str, lease: KVLease) -> None:
        """Record that a turn of the session runs on the new `lease`, which the session will keep.
        Raise `LeaseError` if the session has a lease, or the lease a session."""
        lease.require_live()
        if self.holds(session_id):
            raise LeaseError(f"session {session_id!r} has a lease already; {lease!r} is another")
        if lease.row in self._session_of:
            raise LeaseError(
                f"{lease!r} is that of session {self._session_of[lease.row]!r} already"
            )
        self._check_out(session_id, lease)

    def check_out(self, session_id: str) -> KVLease:
        """Start the next turn: make its request the holder of the session's lease. Raise
        `LeaseError` if the session is not idle here."""
        if session_id not in self._idle:
            raise LeaseError(f"session {session_id!r} has no idle lease")
        lease = self._idle.pop(session_id)
        self._check_out(session_id, lease)
        return lease

    def unbind(self, lease: KVLease) -> None:
        """Drop the session's claim to `lease`, if any, so that the lease ends without it. Used
        after a retract or an error, or if the session was closed in the meantime."""
        self._take_back(lease)

    def check_in(self, lease: KVLease, num_tokens: int) -> None:
        """Keep a finished turn's lease for the session, with its first `num_tokens` tokens. Raise
        `LeaseError` if no session has checked it out."""
        session_id = self._take_back(lease)
        if session_id is None:
            raise LeaseError(f"{lease!r} is no session's to keep")
        lease.change_holder(num_tokens)
        self._idle[session_id] = lease

    def remove(self, session_id: str) -> KVLease | None:
        """Remove an idle session and return its lease, if any. The caller releases the lease."""
        return self._idle.pop(session_id, None)

    def touch(self, session_id: str) -> None:
        """Mark an idle session as just used, so that it is evicted last: a turn of it waits."""
        if session_id in self._idle:
            self._idle.move_to_end(session_id)

    def _check_out(self, session_id: str, lease: KVLease) -> None:
        self._session_of[lease.row] = session_id
        self._row_of[session_id] = lease.row

    def _take_back(self, lease: KVLease) -> str | None:
        """End the check-out of `lease`; return its session, None if it had none."""
        session_id = self._session_of.pop(lease.row, None)
        if session_id is not None:
            del self._row_of[session_id]
        return session_id
