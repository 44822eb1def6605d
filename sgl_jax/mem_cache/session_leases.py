"""The leases that streaming sessions keep between their turns, on one rank.

While a turn runs, its lease is lent to the request and only that is noted here; when the turn's
lease comes to its end, it is kept instead (`take_over`, called by `release_kv_cache`), row, pages,
locks and all. So the next turn starts where this one stopped.

Owns which lease belongs to which session, and which session was used longest ago. Never frees a
page, and knows nothing of tokens or turns.
"""

from collections import OrderedDict
from collections.abc import Iterator

from sgl_jax.mem_cache.errors import LeaseError
from sgl_jax.mem_cache.lease import KVLease


class SessionLeases:
    """A lease for each streaming session of this rank, idle or lent to the turn that runs."""

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
        """Sessions whose turn runs, and the row of the lease that it runs on."""
        return ((session_id, row) for row, session_id in self._lent.items())

    def idle_lease(self, session_id: str) -> KVLease | None:
        """The lease of an idle session; None if it runs, was evicted, or is not known here."""
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

    def lends(self, lease: KVLease) -> bool:
        """Whether a session's running turn holds `lease`."""
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
        """The next turn starts: its request becomes the holder of the session's lease."""
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

    def take_over(self, lease: KVLease, num_tokens: int) -> None:
        """A turn's lease is at its end: the session keeps it, for its first `num_tokens` tokens.

        Raises `LeaseError` if no session lends it.
        """
        session_id = self._take_back(lease)
        if session_id is None:
            raise LeaseError(f"{lease!r} is no session's to keep")
        lease.change_holder(num_tokens)
        self._idle[session_id] = lease

    def remove(self, session_id: str) -> KVLease | None:
        """Forget an idle session; the caller releases its lease, if it has one."""
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
