"""Multiply hidden states and scatter the sums over a ring: a Pallas kernel for TPU.

The sums for the farthest chips come first, and travel while those for nearer ones are made
(`gather` has more on the ring).
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from sgl_jax.core.quantization import ActivationFormat
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
    sums_dtype,
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
    blocks = TokenBlocks.of(num_tokens, scatter_token_bytes(*sizes), device_kind())
    rows, ring = block_width(inputs, columns), Ring.of(axis, blocks.tokens, dtype.itemsize)
    turns = num_buffers(rows * columns * stored.itemsize, chips * inputs // rows)
    return call(
        partial(_scatter_kernel, ring=ring, blocks=blocks),
        SCATTER_NAME,
        layer,
        [x, residual, *row_scales],
        [],
        scales,
        [matrix.values],
        jax.ShapeDtypeStruct(residual.shape, dtype),
        blocks,
        [
            ring.places(blocks.tokens, columns, dtype),
            ring.places(blocks.tokens, columns, dtype, more=1),
            pltpu.VMEM((blocks.tokens, columns), sums_dtype(x.dtype)),
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
    blocks: TokenBlocks,
) -> None:
    """The farthest chips' columns first: sums [T, columns] of this chip; outgoing
    [chips, parts, T / parts, columns] with the incoming ones, which have a place of zeros more.

    `by_token` is x, the residual and, if x is quantized, each row's scale.
    """
    outgoing, incoming, sums, buffers, arrived, sent, received = scratch
    (x, residual, *row_scales), num_rows = by_token, buffers.shape[2]
    num_blocks, columns, part_rows = x.shape[1] // num_rows, sums.shape[1], outgoing.shape[2]
    each = ring.chips * num_blocks  # blocks of the matrix for a block of tokens
    first = pl.program_id(0) * each

    def corner(block: Any) -> tuple[Any, Any]:
        k = ring.chips - 1 - lax.div(lax.rem(block, each), num_blocks)
        return lax.rem(block, num_blocks) * num_rows, ring.at(distance(k)) * columns

    def message(k: Any, part: int) -> Any:
        return ring.message(k, part, outgoing.at[k], incoming, sent, received)

    def receive(k: Any, part: int) -> None:
        message(k, part).wait_recv()

    def add_up(k: Any, rows: Any, *others: jax.Array) -> jax.Array:
        """This chip's sums for the chip of message k, and others, some rows each."""
        total = sums[rows].astype(jnp.float32)
        if row_scales:
            total *= row_scales[0][rows]
        if scales:
            total *= scales[0][0, ring.at(distance(k))]
        for other in others:
            total += other.astype(jnp.float32)
        return total.astype(out.dtype)

    def send_on(k: Any, part: int) -> None:
        """The message for another chip goes on with this chip's sums."""
        ring.for_each_next(k, part, receive)
        before: Any = ring.chips
        for is_next, place in ring.nexts(k, part):
            before = jnp.where(is_next, place, before)

        def add(rows: Any) -> None:
            here = pl.ds(part * part_rows + rows.start, rows.size)
            outgoing[k, part, rows] = add_up(k, here, incoming[before, part, rows])

        for_rows(part_rows, piece(part_rows), add)
        message(k, part).start()

    def finish(part: int) -> None:
        """The nearest chips' messages end here."""
        places = [place for is_next, place in ring.nexts(0, part) if is_next]
        for place in places:
            receive(place, part)

        def add(rows: Any) -> None:
            here = pl.ds(part * part_rows + rows.start, rows.size)
            out[here] = add_up(0, here, residual[here], *(incoming[k, part, rows] for k in places))

        for_rows(part_rows, piece(part_rows), add)

    stream = Stream(layer[0], matrices, buffers, arrived, corner, blocks.blocks * each)
    ring.signal_neighbours()
    pl.when(first == 0)(stream.start_first)
    incoming[ring.chips] = jnp.zeros(incoming.shape[1:], incoming.dtype)

    def multiply(turn: Any) -> None:
        k = ring.chips - 1 - turn

        @pl.loop(0, num_blocks)
        def _(n: Any) -> None:
            block = first + turn * num_blocks + n
            values = stream.wait(block)
            inputs = pl.ds(pl.multiple_of(n * num_rows, num_rows), num_rows)

            def multiply_tile(rows: Any) -> None:
                new = multiplied(x[rows, inputs], values[0])
                sums[rows] = jnp.where(n == 0, new, sums[rows] + new)

            for_rows(blocks.tokens, blocks.tile, multiply_tile)
            stream.replace(block)

        pl.when(turn == 0)(ring.wait_for_neighbours)
        for part in range(ring.parts):
            pl.when(k > 0)(partial(send_on, k, part))
            pl.when(k == 0)(partial(finish, part))

    pl.loop(0, ring.chips)(multiply)
    for k, part in ring.all_messages():
        message(k, part).wait_send()
