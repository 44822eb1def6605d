"""Groups of layers that cache the same tokens of a sequence, and so share a page table."""

from typing import NamedTuple

# The window of recurrent layers, which need only the state after the last token: a query with a
# window of n tokens reads n - 1 cached ones.
LAST_VALUE = 2


class CacheGroup(NamedTuple):
    """Layers of one kind: full attention, sliding-window attention, or a recurrence.

    A page holds the KV of its tokens for all layers of one group. Groups with equally many layers
    have pages of the same shape and share a pool. A recurrent group has no KV but states, one per
    snapshot, in a pool of their own: each cell of its page table is the slot with the state after
    the page's last token, or 0 if that state was not kept. At most one group is recurrent, and it
    is the last.
    """

    sliding_window: int | None  # in tokens, including the query's own; None: full attention
    pool: int = 0  # number of the group's pool
    layers: tuple[int, ...] = ()  # numbers of the model's layers
    is_recurrent: bool = False  # then `sliding_window` is LAST_VALUE


# Every layer attends to every token.
FULL_ATTENTION = (CacheGroup(None),)
