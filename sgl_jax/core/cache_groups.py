"""Which layers need the same of a sequence, for the same time, and so share a page table."""

from typing import NamedTuple

# The lookback of layers that need only the state after the last token: a window's lookback is
# one token less than the window.
LAST_VALUE = 2


class CacheGroup(NamedTuple):
    """Layers that attend to the same tokens: all before a query, or a window of them; or layers
    with a recurrence, whose state after the last token stands for all before it.

    Pages hold all layers of one group. Groups of equally many layers have pages of the same shape
    and share a pool. States are in a pool of their own: a page table lists for them, at the
    last of the page's tokens, a slot with the state after it, or 0 where none was kept. At most
    one group is recurrent, and it is the last.
    """

    sliding_window: int | None  # tokens, the query's own among them; None: all
    pool: int = 0
    layers: tuple[int, ...] = ()
    is_recurrent: bool = False  # then the window is LAST_VALUE


# Every layer attends to every token.
FULL_ATTENTION = (CacheGroup(None),)
