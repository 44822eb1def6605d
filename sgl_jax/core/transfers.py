"""Transfers of KV pages and states between the devices and the host's memory.

The scheduler plans a transfer and numbers it within its rank; the executor runs it beside the steps
and reports its end (`TransferEnd`). Pages are ids in a rank's pools on the device, blocks ids in
its pools in the host's memory; a block holds as much as a page.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sgl_jax.core.step_plan import BoolArray, Int32Array, PageTransfer

Keys = NDArray[np.uint8]  # [n, bytes of a key]


class StoreTransfer(NamedTuple):
    """Contents that move between blocks of a rank in the host's memory and the store behind it.

    `keys[p][i]` names the contents of `blocks[p][i]`, for each pool p of the rank. A search moves
    nothing, and has keys alone. A load that follows a search has the search's number.
    """

    dp_rank: int
    number: int  # of the transfer, by rank
    keys: tuple[Keys, ...]
    blocks: tuple[Int32Array, ...]
    is_awaited: bool = False  # by a request
    # Set by the engine, of its monotonic clock: a load ends then with the blocks that it has.
    end_s: float | None = None


class TransferEnd(NamedTuple):
    """A transfer has ended: all its blocks hold their pages' contents, or a fetch can be placed.

    For a search and a load, `found` has a flag for each key of each pool: the store has it, and its
    block holds the contents.
    """

    dp_rank: int
    number: int
    succeeded: bool
    seconds: float = 0.0  # from its beginning
    found: tuple[BoolArray, ...] = ()


class Transfers(NamedTuple):
    """The transfers to begin now, and the fetches that end, in this order.

    Every list is executed before any step that is launched afterwards.
    """

    placed: tuple[PageTransfer, ...] = ()  # fetches that have arrived: write them to their pages
    dropped: tuple[PageTransfer, ...] = ()  # fetches that nothing will read
    copies: tuple[PageTransfer, ...] = ()  # pages -> blocks
    fetches: tuple[PageTransfer, ...] = ()  # blocks -> beside the pools, until they are placed
    searches: tuple[StoreTransfer, ...] = ()  # in the store
    loads: tuple[StoreTransfer, ...] = ()  # store -> blocks
    puts: tuple[StoreTransfer, ...] = ()  # blocks -> store
