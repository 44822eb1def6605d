"""Takes the leases of idle sessions away on one rank: if memory is short, past the sessions' share
of it, or if the KV must not be used again.

The least recently used session goes first. It keeps its tokens: its next turn matches the tree like
any request, and recomputes the part that the tree no longer has.
"""

from sgl_jax.mem_cache.rank_memory import RankMemory
from sgl_jax.mem_cache.release import release_idle_lease
from sgl_jax.mem_cache.tree.prefix_cursor import PrefixCursor


class IdleSessions:
    """The idle sessions with leases in `memory`. At most `max_pages` pages may be held by them
    alone.

    Attributes:
        num_evicted: leases ended because memory was short or the sessions had more than their
            share.
    """

    def __init__(self, memory: RankMemory, max_pages: int) -> None:
        self._memory = memory
        self._max_pages = max_pages
        self.num_evicted = 0

    def evict_oldest(self) -> bool:
        """Free the least recently used session's memory; return False if none is idle."""
        session_id = self._memory.sessions.oldest_idle()
        if session_id is None:
            return False
        release_idle_lease(self._memory, session_id)
        self.num_evicted += 1
        return True

    def evict_for(self, num_pages: int) -> bool:
        """Evict sessions until `num_pages` are available; return whether any was evicted."""
        num_before = self.num_evicted
        while self._memory.num_available_pages < num_pages and self.evict_oldest():
            pass
        return self.num_evicted > num_before

    def evict_for_prefix(self, cursor: PrefixCursor, length: int) -> None:
        """Evict sessions until a row, and the pages of a prefix of `length` tokens, are available.
        `cursor` finds the part of the prefix in the tree."""
        if self._memory.row_pool.num_free == 0:
            self.evict_oldest()
        num_pages = self._memory.request_pages(length) - self._memory.num_pages_in_use(cursor)
        self.evict_for(num_pages)

    def evict_excess(self) -> None:
        """Evict sessions until the rest take no more than their share of memory."""
        while self._memory.num_session_pages > self._max_pages:
            self.evict_oldest()

    def drop_row(self, row: int) -> None:
        """End the lease in `row` if an idle session keeps it."""
        for session_id, lease in list(self._memory.sessions.idle()):
            if lease.row == row:
                release_idle_lease(self._memory, session_id)

    def drop_withdrawn(self) -> None:
        """End the leases whose prefix was withdrawn from the cache."""
        for session_id, lease in list(self._memory.sessions.idle()):
            if not self._memory.cache.finds(lease.node):
                release_idle_lease(self._memory, session_id)
