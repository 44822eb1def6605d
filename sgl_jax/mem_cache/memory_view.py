"""A snapshot of the state of every page and row of a rank, returned by `RankMemory.view`."""

from typing import Any, Literal, NamedTuple


class PoolView(NamedTuple):
    """The pages of a pool by state: total = free + leased + cached + session_held + reserved.

    `protected_pages` are the cached pages locked by live leases, including leases of idle sessions.
    `sliding_windows` has the window of each cache group in the pool, None if the group keeps every
    token. A pool of "states" holds snapshots instead of pages and has no window; `own_slots` counts
    the slots for the current states of rows.
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


class CpuPoolView(NamedTuple):
    """The blocks of a pool in CPU memory: total = free + arriving + cached + reserved.
    `leaving_blocks` are the cached blocks locked by fetches and copies in flight."""

    total_blocks: int
    free_blocks: int
    arriving_blocks: int
    cached_blocks: int
    leaving_blocks: int
    reserved_blocks: int


PAGE_COUNTS = PoolView._fields[3:]


class MemoryView(NamedTuple):
    """The pages and rows of a rank by state. Page counts are sums over all `pools` of pages. A row
    is free, or held by a running request or an idle session."""

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
        return {**self._asdict(), "pools": [pool._asdict() for pool in self.pools]}
