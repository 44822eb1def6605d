"""The time of products over a ring (`kernels.ring_products`), and of the exchanges beside them.

A kernel alone takes the longer of its bytes over the bandwidth and its instructions. Its exchange
is played through hop by hop, on chips that all start at once: the part that is longer than the
kernel alone is exposed. A hop takes as long as in collectives (`step_time`), over one link.
"""

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

from sgl_jax.kernels.ring_products.ring import SPLIT_TOKENS
from sgl_jax.planner.kernel_time import HEADS_CYCLES
from sgl_jax.planner.ring_products import RingProduct
from sgl_jax.planner.topology import ICI_HOP_S, Chip

_MI = 2**20


class RingBundles(NamedTuple):
    """Instructions of the kernels."""

    numbers: int  # for 2**20 numbers of a matrix, independent of the tokens
    token: float  # and for each token
    chip: int  # for each chip of the ring
    activations: int  # for 2**20 of the hidden states
    sums: int  # for 2**20 sums, once all chips' are in


# From schedules of 8 to 512 tokens, 1,024 columns and 1,280 to 7,168 outputs or inputs on a chip;
# the more of bfloat16 and int8.
RING_BUNDLES: Mapping[str, RingBundles] = MappingProxyType(
    {
        "TPU v5 lite": RingBundles(650, 11.9, 130, 4400, 5400),
        "TPU v6 lite": RingBundles(490, 4.45, 120, 2900, 2700),
        "TPU v5": RingBundles(650, 11.9, 150, 4300, 5400),
        "TPU7x": RingBundles(500, 2.85, 95, 2500, 2300),
    }
)


class RingTime(NamedTuple):
    """Seconds of all layers on one device in a step."""

    products_s: float = 0.0  # the kernels without exchanges
    hbm_s: float = 0.0  # the bytes of their matrices
    transfers_s: float = 0.0
    exposed_s: float = 0.0

    def plus(self, other: "RingTime", times: int) -> "RingTime":
        return RingTime(*(mine + times * own for mine, own in zip(self, other, strict=True)))


def ring_time(
    products: tuple[RingProduct, ...], num_tokens: int, tp_size: int, itemsize: int, chip: Chip
) -> RingTime:
    """The time of a step of `num_tokens`, padding included, of activations of `itemsize`."""
    total = RingTime()
    for own in products:
        total = total.plus(_one_layer(own, num_tokens, tp_size, itemsize, chip), own.num_layers)
    return total


def _one_layer(
    own: RingProduct, num_tokens: int, tp_size: int, itemsize: int, chip: Chip
) -> RingTime:
    count = RING_BUNDLES[chip.device_kind]
    hidden = own.inputs if own.gathers else own.outputs
    blocks = own.inputs * own.outputs / _MI
    cycles = blocks * (count.numbers + num_tokens * count.token)
    cycles += tp_size * count.chip + num_tokens * hidden / _MI * count.activations
    hbm = own.num_bytes / chip.hbm_bytes_per_s
    shorter, longer = sorted((hbm, cycles / chip.clock_hz))
    # The first block's way in and the last one's product overlap with nothing.
    multiplied = longer + shorter / max(blocks, 1)
    sums = num_tokens * own.outputs / _MI * count.sums if own.gathers else 0
    once = (HEADS_CYCLES[chip.device_kind].call + sums) / chip.clock_hz
    hop = num_tokens * hidden // tp_size * itemsize / chip.ici_link_bytes_per_s
    is_split = tp_size % 2 == 0 and num_tokens % SPLIT_TOKENS == 0
    hops = [ICI_HOP_S + hop] * (tp_size - 1) + [ICI_HOP_S + hop / (1 + is_split)]
    play = _gathered_s if own.gathers else partial(_scattered_s, is_split=is_split)
    whole = play(multiplied / tp_size, hops)
    return RingTime(multiplied + once, hbm, play(0.0, hops), max(0.0, whole - multiplied))


def _gathered_s(product_s: float, hops: list[float]) -> float:
    """Seconds until products with all chips' columns are made, each of `product_s`.

    `hops` are the seconds of a hop of each message, of which 0 stays.
    """
    chips, now = len(hops), product_s
    arrivals = [0.0, *(ICI_HOP_S + hop for hop in hops[1:3])]  # after the barrier
    for k in range(1, chips, 2):
        pair = range(k, min(k + 2, chips))
        now = max(now, *(arrivals[own] for own in pair))
        arrivals += [now + hops[own + 2] for own in pair if own + 2 < chips]
        now += len(pair) * product_s
    return now


def _scattered_s(product_s: float, hops: list[float], *, is_split: bool) -> float:
    """Seconds until this chip's sums are complete, each chip's part of them made in `product_s`."""
    chips, now = len(hops), 0.0
    arrivals = [0.0] * (chips + 2)
    for k in range(chips - 1, 0, -1):
        now = max(now + product_s, ICI_HOP_S, arrivals[k + 2])
        if is_split and k == chips - 2:  # half of the message to the chip opposite
            now = max(now, arrivals[chips - 1])
        arrivals[k] = now + hops[k]
    return max(now + product_s, *arrivals[1:3])
