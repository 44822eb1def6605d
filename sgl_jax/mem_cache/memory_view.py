"""Where every page and row of a rank is: what `RankMemory.view` answers, also for JSON."""

from typing import Any, Literal, NamedTuple


class PoolView(NamedTuple):
    """Where every page of a pool is: total = free + leased + cached + session_held + reserved.

    `protected_pages` are those of the cached that live leases have locked, those of idle sessions
    included. `sliding_windows` are those of the cache groups whose pages it holds, None for one
    that keeps every token. A pool of "states" holds snapshots, not pages, and is of no window;
    beside it, rows have `own_slots` for the states that they go on from.
    """

    kind: Literal["pages", "states"]
    sliding_windows: tuple[int | None, ...]
    own_slots: int
    total_pages: int
    free_pages: int
    leased_pages: int
    cached_pages: int
    protected_pages: int
    session_held_pages: int
    reserved_pages: int


class MemoryView(NamedTuple):
    """Where every page and row of a rank is. Pages are of all `pools` of pages together, counted as
    in `PoolView`. A row is free, a running request's, or an idle session's."""

    dp_rank: int
    page_size: int
    total_pages: int
    free_pages: int
    leased_pages: int
    cached_pages: int
    protected_pages: int
    session_held_pages: int
    reserved_pages: int
    total_rows: int
    free_rows: int
    session_rows: int
    pools: tuple[PoolView, ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**self._asdict(), "pools": [pool._asdict() for pool in self.pools]}
