"""Which layers need a sequence's KV for the same time, and so share a page table."""

from typing import NamedTuple


class CacheGroup(NamedTuple):
    """Layers that attend to the same tokens: all before a query, or a window of them.

    Pages hold all layers of one group. Groups of equally many layers have pages of the same shape
    and share a pool.
    """

    sliding_window: int | None  # tokens, the query's own among them; None: all
    pool: int = 0
    layers: tuple[int, ...] = ()


# Of models whose layers all attend to every token.
FULL_ATTENTION = (CacheGroup(None),)
