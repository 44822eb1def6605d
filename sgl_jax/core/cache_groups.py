"""Groups of layers that cache the same tokens of a sequence and share a page table."""

from typing import NamedTuple

# Sliding window of recurrent layers: a query with a window of n tokens reads n - 1 cached tokens,
# and a recurrence reads only the state after the last token.
LAST_VALUE = 2


class CacheGroup(NamedTuple):
    """Layers of one kind: full attention, sliding-window attention, or a recurrence.

    A page holds the KV of its tokens for all layers of one group. Groups with the same number of
    layers have pages of the same shape and share a pool. A recurrent group has no KV. Its states,
    one per snapshot, have a separate pool: each cell of its page table is the slot of the state
    after the page's last token, or 0 if that state was not kept. At most one group is recurrent,
    and it is the last.
    """

    sliding_window: int | None  # in tokens, including the query; None: full attention
    pool: int = 0  # index of the group's pool
    layers: tuple[int, ...] = ()  # indices of the model's layers
    is_recurrent: bool = False  # then `sliding_window` is LAST_VALUE


# Every layer attends to every token.
FULL_ATTENTION = (CacheGroup(None),)
