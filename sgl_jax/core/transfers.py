"""Transfers of KV pages and states between the devices and the host's memory.

The scheduler plans a transfer and numbers it within its rank; the executor runs it beside the steps
and reports its end (`TransferEnd`). Pages are ids in a rank's pools on the device, blocks ids in
its pools in the host's memory; a block holds as much as a page.
"""

from typing import NamedTuple

from sgl_jax.core.step_plan import PageTransfer


class TransferEnd(NamedTuple):
    """A transfer has ended: all its blocks hold their pages' contents, or a fetch can be placed."""

    dp_rank: int
    number: int
    succeeded: bool
    seconds: float = 0.0  # from its beginning


class Transfers(NamedTuple):
    """The transfers to begin now, and the fetches that end, in this order.

    Every list is executed before any step that is launched afterwards.
    """

    placed: tuple[PageTransfer, ...] = ()  # fetches that have arrived: write them to their pages
    dropped: tuple[PageTransfer, ...] = ()  # fetches that nothing will read
    copies: tuple[PageTransfer, ...] = ()  # pages -> blocks
    fetches: tuple[PageTransfer, ...] = ()  # blocks -> beside the pools, until they are placed
