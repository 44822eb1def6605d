"""The leases that streaming sessions keep between their turns, on one rank.

While a turn runs, its request holds the lease. At the end of the turn the session takes the lease
back (`check_in`), including row, pages and locks. So the next turn starts at the end of the last
one. This file never frees a page, and never reads tokens or turns.
"""

from collections import OrderedDict
from collections.abc import Iterator

from sgl_jax.mem_cache.errors import LeaseError
from sgl_jax.mem_cache.lease import KVLease


class SessionLeases:
    """A lease for each streaming session of this rank, idle or checked out to its running turn. A
    checked-out lease has the `session_id`."""

    def __init__(self) -> None:
        self._idle: OrderedDict[str, KVLease] = OrderedDict()  # least recently used first
        self._checked_out: dict[str, KVLease] = {}

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    def idle(self) -> Iterator[tuple[str, KVLease]]:
        """Iterate over idle sessions and their leases, least recently used first."""
        return iter(self._idle.items())

    def checked_out(self) -> Iterator[tuple[str, KVLease]]:
        """Iterate over the sessions with a running turn and their leases."""
        return iter(self._checked_out.items())

    def idle_lease(self, session_id: str) -> KVLease | None:
        """Return an idle session's lease; None if it runs, was evicted, or is not on this rank."""
        return self._idle.get(session_id)

    def lease_of(self, session_id: str) -> KVLease | None:
        """Return a session's lease, idle or checked out; None if it is not on this rank."""
        return self._idle.get(session_id) or self._checked_out.get(session_id)

    def oldest_idle(self) -> str | None:
        return next(iter(self._idle), None)

    def bind(self, session_id: str, lease: KVLease) -> None:
        """Record that a turn of the session runs on the new `lease`, which the session will keep.
        Raise `LeaseError` if the session has a lease, or the lease a session."""
        lease.require_live()
        if self.lease_of(session_id) is not None:
            raise LeaseError(f"session {session_id!r} has a lease already; {lease!r} is another")
        if lease.session_id is not None:
            raise LeaseError(f"{lease!r} is that of session {lease.session_id!r} already")
        self._check_out(session_id, lease)

    def check_out(self, session_id: str) -> KVLease:
        """Start the next turn: make its request the holder of the session's lease. Raise
        `LeaseError` if the session is not idle here."""
        if session_id not in self._idle:
            raise LeaseError(f"session {session_id!r} has no idle lease")
        lease = self._idle.pop(session_id)
        self._check_out(session_id, lease)
        return lease

    def _check_out(self, session_id: str, lease: KVLease) -> None:
        self._checked_out[session_id] = lease
        lease.session_id = session_id

    def unbind(self, lease: KVLease) -> None:
        """Drop the session's claim to `lease`, if any, so that the lease ends without it. Used
        after a retract or an error, or if the session was closed in the meantime."""
        if lease.session_id is not None:
            self._checked_out.pop(lease.session_id, None)
            lease.session_id = None

    def check_in(self, lease: KVLease, num_tokens: int) -> None:
        """Keep a finished turn's lease for the session, with its first `num_tokens` tokens. Raise
        `LeaseError` if no session has checked it out."""
        session_id = lease.session_id
        if session_id is None:
            raise LeaseError(f"{lease!r} is no session's to keep")
        self.unbind(lease)
        lease.change_holder(num_tokens)
        self._idle[session_id] = lease

    def remove(self, session_id: str) -> KVLease | None:
        """Remove an idle session and return its lease, if any. The caller releases the lease."""
        return self._idle.pop(session_id, None)

    def touch(self, session_id: str) -> None:
        """Mark an idle session as just used, so that it is evicted last: a turn of it waits."""
        if session_id in self._idle:
            self._idle.move_to_end(session_id)
