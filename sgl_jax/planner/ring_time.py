"""The time of products over a ring (`kernels.ring_products`), and of the exchanges beside them.

A kernel alone takes the longer of its bytes over the bandwidth and its instructions. Its exchange
is played through hop by hop, on chips that all start at once: the part that is longer than the
kernel alone is exposed. A hop takes as long as in collectives (`step_time`), over one link. A
kernel does so for each of its blocks of tokens.
"""

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

from sgl_jax.kernels.ring_products.blocks import (
    TokenBlocks,
    gather_token_bytes,
    is_split,
    scatter_token_bytes,
)
from sgl_jax.planner.kernel_time import HEADS_CYCLES
from sgl_jax.planner.quantized_time import PRODUCT_BUNDLES
from sgl_jax.planner.ring_products import RingProduct
from sgl_jax.planner.topology import ICI_HOP_S, Chip

_MI = 2**20


class TileBundles(NamedTuple):
    """Instructions for 2**20 numbers of a matrix."""

    tile: int  # of each tile of tokens
    token: float  # of each token


class RingBundles(NamedTuple):
    """Instructions of the kernels."""

    product: TileBundles
    values: Mapping[str, TileBundles]  # of activations in 8 bits, by their format
    chip: int  # for each chip of the ring
    activations: int  # for 2**20 of the hidden states
    sums: int  # for 2**20 sums, once all chips' are in


def _values(int8: tuple[int, float], fp8: tuple[int, float]) -> Mapping[str, TileBundles]:
    return {"int8": TileBundles(*int8), "fp8": TileBundles(*fp8)}


# `python -m benchmarks.kernels.ring_cost` counts them: the more of both products, and of 128 to
# 1,024 tokens.
RING_BUNDLES: Mapping[str, RingBundles] = MappingProxyType(
    {
        "TPU v5 lite": RingBundles(
            TileBundles(500, 12.4), _values((130, 7.9), (100, 14.2)), 130, 1700, 4500
        ),
        "TPU v6 lite": RingBundles(
            TileBundles(330, 4.45), _values((280, 2.1), (210, 4.5)), 130, 1600, 2030
        ),
        "TPU v5": RingBundles(
            TileBundles(500, 12.4), _values((130, 7.9), (110, 14.2)), 150, 1700, 4500
        ),
        "TPU7x": RingBundles(
            TileBundles(470, 2.0), _values((330, 2.75), (245, 1.2)), 105, 1600, 2030
        ),
    }
)


class RingTime(NamedTuple):
    """Seconds of all layers on one device in a step."""

    products_s: float = 0.0  # the kernels without exchanges
    hbm_s: float = 0.0  # the bytes of their matrices, as often as they are read
    weights_s: float = 0.0  # the same, read once
    transfers_s: float = 0.0
    exposed_s: float = 0.0

    def plus(self, other: "RingTime", times: int) -> "RingTime":
        return RingTime(*(mine + times * own for mine, own in zip(self, other, strict=True)))

    @property
    def bound(self) -> str:
        """The main wait of the kernels: "HBM" or "MXU"."""
        return "HBM" if self.hbm_s > self.products_s / 2 else "MXU"


def ring_time(
    products: tuple[RingProduct, ...], num_tokens: int, tp_size: int, itemsize: int, chip: Chip
) -> RingTime:
    """The time of a step of `num_tokens`, padding included, of activations of `itemsize`."""
    total = RingTime()
    for own in products:
        cut = _token_blocks(own, num_tokens, tp_size, itemsize, chip)
        one = _one_block(own, cut, tp_size, itemsize, chip)
        total = total.plus(one, own.num_layers * cut.number)
        total = total.plus(_once(own, num_tokens, tp_size, chip), own.num_layers)
    return total


def _token_blocks(
    own: RingProduct, num_tokens: int, tp_size: int, itemsize: int, chip: Chip
) -> TokenBlocks:
    itemsizes = _multiplied_itemsize(own, itemsize), itemsize
    if own.gathers:
        columns, outputs = own.inputs // tp_size, own.outputs // own.matrices
        token_bytes = gather_token_bytes(tp_size, columns, outputs, own.matrices, *itemsizes)
    else:
        columns = own.outputs // tp_size
        token_bytes = scatter_token_bytes(tp_size, columns, own.inputs, *itemsizes)
    return TokenBlocks.of(num_tokens, token_bytes, chip.device_kind)


def _multiplied_itemsize(own: RingProduct, itemsize: int) -> int:
    return itemsize if own.activation is None else 1


def _one_block(
    own: RingProduct, cut: TokenBlocks, tp_size: int, itemsize: int, chip: Chip
) -> RingTime:
    """One layer's product of one block of tokens."""
    count, num_tokens = RING_BUNDLES[chip.device_kind], cut.tokens
    hidden = own.inputs if own.gathers else own.outputs
    numbers = own.inputs * own.outputs / _MI
    product = count.product if own.activation is None else count.values[own.activation]
    cycles = numbers * (cut.tiles * product.tile + num_tokens * product.token)
    flops = 2.0 * num_tokens * own.inputs * own.outputs
    cycles = max(cycles, chip.matrix_seconds(flops, own.activation) * chip.clock_hz)
    normalised = 0 if own.gathers and own.activation else num_tokens * hidden / _MI
    cycles += tp_size * count.chip + normalised * count.activations
    hbm = own.num_bytes / chip.hbm_bytes_per_s
    shorter, longer = sorted((hbm, cycles / chip.clock_hz))
    # The first block's way in and the last one's product overlap with nothing. Later blocks of
    # tokens find their first ones there.
    multiplied = longer + shorter / max(numbers, 1) / cut.number
    sums = num_tokens * own.outputs / _MI * count.sums if own.gathers else 0
    sent = _multiplied_itemsize(own, itemsize) if own.gathers else itemsize
    hop = num_tokens * hidden // tp_size * sent / chip.ici_link_bytes_per_s
    in_halves = is_split(tp_size, num_tokens, sent)
    hops = [ICI_HOP_S + hop] * (tp_size - 1) + [ICI_HOP_S + hop / (1 + in_halves)]
    play = _gathered_s if own.gathers else partial(_scattered_s, in_halves=in_halves)
    whole, alone = play(multiplied / tp_size, hops), multiplied + sums / chip.clock_hz
    exposed = max(0.0, whole - multiplied)
    return RingTime(alone, hbm, hbm / cut.number, play(0.0, hops), exposed)


def _once(own: RingProduct, num_tokens: int, tp_size: int, chip: Chip) -> RingTime:
    """The start of a kernel, and of one that quantizes its inputs."""
    cycles: float = HEADS_CYCLES[chip.device_kind].call
    if own.activation is not None:
        inputs = own.inputs // tp_size if own.gathers else own.inputs
        of_values = PRODUCT_BUNDLES[chip.device_kind].activations
        cycles = 2 * cycles + num_tokens * inputs / 2**10 * of_values
    return RingTime(cycles / chip.clock_hz)


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


def _scattered_s(product_s: float, hops: list[float], *, in_halves: bool) -> float:
    """Seconds until this chip's sums are complete, each chip's part of them made in `product_s`."""
    chips, now = len(hops), 0.0
    arrivals = [0.0] * (chips + 2)
    for k in range(chips - 1, 0, -1):
        now = max(now + product_s, ICI_HOP_S, arrivals[k + 2])
        if in_halves and k == chips - 2:  # half of the message to the chip opposite
            now = max(now, arrivals[chips - 1])
        arrivals[k] = now + hops[k]
    return max(now + product_s, *arrivals[1:3])
