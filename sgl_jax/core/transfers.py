"""Transfers of KV pages and states between the devices and host memory.

The scheduler plans a transfer and numbers it within its rank. The executor runs it in parallel to
the steps and reports its end (`TransferEnd`). Pages are ids in a rank's device pools, and blocks
are ids in its host pools; a block has the size of a page.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sgl_jax.core.step_plan import BoolArray, Int32Array, PageTransfer

# A page is stored as values of this many tokens, or as one value if it is smaller. So engines with
# pages of different sizes find each other's values.
STORED_TOKENS = 16
HASH_BYTES = 16
# Reasons why a lookup finds nothing to load: the store has none of the pages; it has them in values
# of another size; or it lacks the window or state at the ends of this engine's pages.
STORE_MISSES = ("absent", "page_size", "not_resumable")
# [n, bytes of a key]: for each value of a page, the hash of the prefix that ends with it; then the
# number of the layer group, and the binary logarithm of the values' size in tokens.
Keys = NDArray[np.uint8]


class StoreTransfer(NamedTuple):
    """Contents moved between blocks of a rank in host memory and the store.

    `keys[p][i]` names the contents of `blocks[p][i]`, for each pool p of the rank. A search moves
    nothing and has only keys. A load that follows a search has the search's number.
    """

    dp_rank: int
    number: int  # transfer number within the rank
    keys: tuple[Keys, ...]
    blocks: tuple[Int32Array, ...]
    is_awaited: bool = False  # a request waits for it
    # Set by the engine, by its monotonic clock: a load ends then with the blocks loaded so far.
    end_s: float | None = None


class TransferEnd(NamedTuple):
    """A transfer has ended: all its blocks hold their pages' contents, or a fetch can be placed.

    For a search and a load, `found` has a flag for each key of each pool: the store has the key, or
    the block holds its contents.

    `has_other_sizes` is set by a search that found nothing, if the store has values of the same
    tokens in a size that this engine cannot read.
    """

    dp_rank: int
    number: int
    succeeded: bool
    seconds: float = 0.0  # since its start
    found: tuple[BoolArray, ...] = ()
    has_other_sizes: bool = False


class Transfers(NamedTuple):
    """The transfers to begin now, and the fetches that end, in this order.

    Every list is executed before any step that is launched afterwards.
    """

    placed: tuple[PageTransfer, ...] = ()  # complete fetches: write them to their pages
    dropped: tuple[PageTransfer, ...] = ()  # fetches that are no longer needed
    copies: tuple[PageTransfer, ...] = ()  # pages -> blocks
    fetches: tuple[PageTransfer, ...] = ()  # blocks -> staging arrays on the device, until placed
    searches: tuple[StoreTransfer, ...] = ()  # in the store
    loads: tuple[StoreTransfer, ...] = ()  # store -> blocks
    puts: tuple[StoreTransfer, ...] = ()  # blocks -> store
