"""Multiply hidden states and scatter the sums over a ring: a Pallas kernel for TPU.

The sums for the farthest chips come first, and travel while those for nearer ones are made
(`gather` has more on the ring).
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from sgl_jax.core.quantization import ActivationFormat
from sgl_jax.kernels.quantized_matmul.numbers import sums_dtype
from sgl_jax.kernels.quantized_matmul.tpu import quantized_activations
from sgl_jax.kernels.ring_products.blocks import (
    TokenBlocks,
    block_width,
    num_buffers,
    piece,
    scatter_token_bytes,
)
from sgl_jax.kernels.ring_products.matrices import RingMatrix
from sgl_jax.kernels.ring_products.tpu.call import (
    SCATTER_NAME,
    call,
    for_rows,
    multiplied,
)
from sgl_jax.kernels.ring_products.tpu.ring import Ring, Stream, distance
from sgl_jax.kernels.tpu_chip import device_kind


def tpu_multiply_scatter(
    x: jax.Array,
    matrix: RingMatrix,
    layer: jax.Array,
    residual: jax.Array,
    axis: str,
    activation: ActivationFormat | None = None,
) -> jax.Array:
    """See `interface.MultiplyScatter`."""
    (num_tokens, inputs), columns = x.shape, residual.shape[1]
    chips, stored, dtype = lax.axis_size(axis), matrix.values.dtype, residual.dtype
    row_scales = []
    if activation is not None:
        x, by_row = quantized_activations(x, activation, None)
        row_scales = [by_row]
    scales = []
    if matrix.scales is not None:
        scales = [matrix.scales.reshape(-1, chips, 1, columns)]
    sizes = chips, columns, inputs, x.dtype.itemsize, dtype.itemsize
    cut = TokenBlocks.of(num_tokens, scatter_token_bytes(*sizes), device_kind())
    rows = block_width(inputs, columns, stored.itemsize)
    ring = Ring.of(axis, cut.tokens, dtype.itemsize)
    turns = num_buffers(rows * columns * stored.itemsize, chips * inputs // rows)
    return call(
        partial(_scatter_kernel, ring=ring, cut=cut),
        SCATTER_NAME,
        layer,
        [x, residual, *row_scales],
        [],
        scales,
        [matrix.values],
        jax.ShapeDtypeStruct(residual.shape, dtype),
        cut,
        [
            ring.places(cut.tokens, columns, dtype),
            ring.places(cut.tokens, columns, dtype, more=1),
            pltpu.VMEM((cut.tokens, columns), sums_dtype(x.dtype)),
            pltpu.VMEM((turns, 1, rows, columns), stored),
            pltpu.SemaphoreType.DMA((turns,)),
            *ring.semaphores(),
        ],
    )


def _scatter_kernel(
    layer: Any,
    by_token: Any,
    _: Any,
    scales: Any,
    matrices: Any,
    out: Any,
    *scratch: Any,
    ring: Ring,
    cut: TokenBlocks,
) -> None:
    """`by_token` is x, the residual and, if x is quantized, each row's scale."""
    outgoing, incoming, sums, buffers, arrived, sent, received = scratch
    x, residual, *row_scales = by_token
    scattered = _Scattered(ring, outgoing, incoming, sent, received, sums, row_scales, scales)
    num_rows = buffers.shape[2]

    def corner(turn: Any, n: Any) -> tuple[Any, Any]:
        return n * num_rows, ring.at(distance(ring.chips - 1 - turn)) * sums.shape[1]

    sizes = ring.chips, x.shape[1] // num_rows, pl.program_id(0), cut.number
    stream = Stream(layer[0], matrices, buffers, arrived, corner, *sizes)
    ring.signal_neighbours()
    stream.start_first()
    incoming[ring.chips] = jnp.zeros(incoming.shape[1:], incoming.dtype)

    def multiply(turn: Any) -> None:
        k = ring.chips - 1 - turn

        def multiply_block(n: Any, values: Any) -> None:
            inputs = pl.ds(pl.multiple_of(n * num_rows, num_rows), num_rows)

            def multiply_tile(rows: Any) -> None:
                new = multiplied(x[rows, inputs], values[0])
                sums[rows] = jnp.where(n == 0, new, sums[rows] + new)

            for_rows(cut.tokens, cut.tile, multiply_tile)

        stream.for_each(turn, multiply_block)
        pl.when(turn == 0)(ring.wait_for_neighbours)
        for part in range(ring.parts):
            pl.when(k > 0)(partial(scattered.send, k, part))
            pl.when(k == 0)(partial(scattered.finish, part, residual, out))

    pl.loop(0, ring.chips)(multiply)
    scattered.end()


class _Scattered(NamedTuple):
    """The sums of a block of tokens, on their way to the chips whose columns they are."""

    ring: Ring
    outgoing: Any  # [chips, parts, T / parts, columns] of each message
    incoming: Any  # the same, and a place of zeros
    sent: Any
    received: Any
    sums: Any  # [T, columns] of this chip's inputs
    row_scales: Any  # one [T, 1] if x is quantized
    scales: Any  # one [1, chips, 1, columns] of a matrix in 8 bits

    def send(self, k: Any, part: int) -> None:
        """Send the sums for the chip of message k, with the ones that came for it."""
        self.ring.for_each_next(k, part, self._receive)
        before, part_rows = self.ring.place_before(k, part), self.outgoing.shape[2]

        def add(rows: Any) -> None:
            here = pl.ds(part * part_rows + rows.start, rows.size)
            total = self._total(k, here, self.incoming[before, part, rows])
            self.outgoing[k, part, rows] = total.astype(self.outgoing.dtype)

        for_rows(part_rows, piece(part_rows), add)
        self._message(k, part).start()

    def finish(self, part: int, residual: Any, out: Any) -> None:
        """This chip's own columns, when the nearest chips' messages have come."""
        places = [place for is_next, place in self.ring.nexts(0, part) if is_next]
        for place in places:
            self._receive(place, part)
        part_rows = self.outgoing.shape[2]

        def add(rows: Any) -> None:
            here = pl.ds(part * part_rows + rows.start, rows.size)
            received = [self.incoming[place, part, rows] for place in places]
            out[here] = self._total(0, here, residual[here], *received).astype(out.dtype)

        for_rows(part_rows, piece(part_rows), add)

    def end(self) -> None:
        for k, part in self.ring.all_messages():
            self._message(k, part).wait_send()

    def _message(self, k: Any, part: int) -> Any:
        places = self.outgoing.at[k], self.incoming
        return self.ring.message(k, part, *places, self.sent, self.received)

    def _receive(self, k: Any, part: int) -> None:
        self._message(k, part).wait_recv()

    def _total(self, k: Any, rows: Any, *others: jax.Array) -> jax.Array:
        """Some rows of the sums for the chip of message k, and others, in float32."""
        total = self.sums[rows].astype(jnp.float32)
        if self.row_scales:
            total *= self.row_scales[0][rows]
        if self.scales:
            total *= self.scales[0][0, self.ring.at(distance(k))]
        for other in others:
            total += other.astype(jnp.float32)
        return total
