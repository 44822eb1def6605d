"""Gather hidden states over a ring and multiply them: a Pallas kernel for TPU.

Each chip sends to both neighbours. Chip c's columns travel to the right over one half of the ring
and to the left over the other, so that the farthest chip is chips / 2 hops away, and each hop runs
beside the product with the columns that came before it (arXiv 2105.05720 does so on GPUs, a tile
at a time). Every message of a block of tokens has a place of its own in the receiver's vector
memory, so that no place is written twice, and a barrier before each block ensures that both
neighbours have left the one before.

The blocks of the matrices stream from memory meanwhile, each once for a block of tokens.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from sgl_jax.core.quantization import ActivationFormat
from sgl_jax.kernels.ring_products.blocks import (
    TokenBlocks,
    block_width,
    gather_token_bytes,
    num_buffers,
    piece,
)
from sgl_jax.kernels.ring_products.matrices import Finish, RingMatrix
from sgl_jax.kernels.ring_products.normalised_values import normalised_values
from sgl_jax.kernels.ring_products.tpu.call import (
    GATHER_NAME,
    call,
    for_rows,
    multiplied,
    sums_dtype,
)
from sgl_jax.kernels.ring_products.tpu.ring import Ring, Stream, distance
from sgl_jax.kernels.ring_products.tpu.values import quantize_normalised_rows
from sgl_jax.kernels.tpu_chip import LANES, device_kind


def tpu_gather_multiply(
    x: jax.Array,
    norm: jax.Array,
    eps: float,
    matrices: tuple[RingMatrix, ...],
    layer: jax.Array,
    finish: Finish,
    axis: str,
    activation: ActivationFormat | None = None,
) -> jax.Array:
    """See `interface.GatherMultiply`."""
    dtype, (num_tokens, columns) = x.dtype, x.shape
    chips, count = lax.axis_size(axis), len(matrices)
    outputs, stored = matrices[0].values.shape[2], matrices[0].values.dtype
    by_token, norms = [x], [norm.reshape(chips, 1, columns)]
    if activation is not None:
        found = normalised_values(x, norm, eps, axis, activation, quantize_normalised_rows)
        by_token, norms = list(found), []
    of_x = by_token[0].dtype
    sizes = chips, columns, count * outputs, of_x.itemsize, dtype.itemsize
    blocks = TokenBlocks.of(num_tokens, gather_token_bytes(*sizes), device_kind())
    width, ring = block_width(outputs, columns), Ring.of(axis, blocks.tokens, of_x.itemsize)
    turns = num_buffers(count * columns * width * stored.itemsize, chips * outputs // width)
    return call(
        partial(_gather_kernel, eps=eps, finish=finish, ring=ring, blocks=blocks),
        GATHER_NAME,
        layer,
        by_token,
        norms,
        [own.scales for own in matrices if own.scales is not None],
        [own.values for own in matrices],
        jax.ShapeDtypeStruct((num_tokens, outputs), dtype),
        blocks,
        [
            ring.places(blocks.tokens, columns, of_x),
            pltpu.VMEM((blocks.tokens, columns), of_x),
            pltpu.VMEM((blocks.tokens, LANES), jnp.float32),
            pltpu.VMEM((count, outputs // width, blocks.tokens, width), sums_dtype(of_x)),
            pltpu.VMEM((turns, count, columns, width), stored),
            pltpu.SemaphoreType.DMA((turns,)),
            *ring.semaphores(),
        ],
    )


def _gather_kernel(
    layer: Any,
    by_token: Any,
    norms: Any,
    scales: Any,
    matrices: Any,
    out: Any,
    *scratch: Any,
    eps: float,
    finish: Finish,
    ring: Ring,
    blocks: TokenBlocks,
) -> None:
    """Columns [chips, parts, T / parts, columns] as they come; own [T, columns], one chip's as
    they are multiplied; squares [T, LANES], summed; sums [matrices, blocks, T, width].

    `by_token` is x and, if it is quantized, each row's scale; else `norms` has the factors.
    """
    columns, own, squares, sums, buffers, arrived, sent, received = scratch
    num_blocks, part_rows, (x, *row_scales) = sums.shape[1], columns.shape[2], by_token
    each = ring.chips * num_blocks  # blocks of the matrices for a block of tokens
    first = pl.program_id(0) * each

    def corner(block: Any) -> tuple[Any, Any]:
        source = ring.at(-distance(lax.div(lax.rem(block, each), num_blocks)))
        return source * x.shape[1], lax.rem(block, num_blocks) * buffers.shape[3]

    def message(k: Any, part: int, source: Any = 0) -> Any:
        return ring.message(k, part, columns.at[source], columns, sent, received)

    def send_on(source: Any) -> None:
        for part in range(ring.parts):
            ring.for_each_next(source, part, lambda k, part: message(k, part, source).start())

    def receive(k: Any) -> None:
        @pl.when(k < ring.chips)
        def _() -> None:
            for part in range(ring.parts):
                message(k, part).wait_recv()
            send_on(k)

    def take(k: Any) -> None:
        if not norms:
            own[...] = columns[k].reshape(own.shape)
            return
        for part in range(ring.parts):

            def normalise(rows: Any, part: int = part) -> None:
                wide = columns[k, part, rows].astype(jnp.float32)
                here = pl.ds(part * part_rows + rows.start, rows.size)
                squares[here] += _lane_sums(wide * wide)
                own[here] = (wide * norms[0][ring.at(-distance(k))]).astype(own.dtype)

            for_rows(part_rows, piece(part_rows), normalise)

    stream = Stream(layer[0], matrices, buffers, arrived, corner, blocks.blocks * each)
    ring.signal_neighbours()
    pl.when(first == 0)(stream.start_first)
    columns[0] = x[...].reshape(columns.shape[1:])
    squares[...] = jnp.zeros_like(squares)
    ring.wait_for_neighbours()
    send_on(0)

    def multiply(k: Any) -> None:
        @pl.when(lax.rem(k, 2) == 1)
        def _() -> None:
            receive(k)
            receive(k + 1)

        take(k)

        @pl.loop(0, num_blocks)
        def _(n: Any) -> None:
            block = first + k * num_blocks + n
            values = stream.wait(block)

            def multiply_tile(rows: Any) -> None:
                for m in range(len(matrices)):
                    new = multiplied(own[rows], values[m])
                    sums[m, n, rows] = jnp.where(k == 0, new, sums[m, n, rows] + new)

            for_rows(blocks.tokens, blocks.tile, multiply_tile)
            stream.replace(block)

    def finish_rows(rows: Any) -> None:
        if norms:
            mean = jnp.sum(squares[rows], axis=1, keepdims=True) / norms[0].size
            by_row = lax.rsqrt(mean + eps)
        else:
            by_row = row_scales[0][rows]
        _finish_sums(sums, rows, by_row, scales, finish, out)

    pl.loop(0, ring.chips)(multiply)
    for_rows(blocks.tokens, piece(part_rows), finish_rows)
    for k, part in ring.all_messages():
        message(k, part).wait_send()


def _finish_sums(
    sums: Any, rows: Any, by_row: jax.Array, scales: Any, finish: Finish, out: Any
) -> None:
    """Rows of sums [matrices, blocks, T, width], times `by_row` [rows, 1], finished into out."""
    count, num_blocks, _, width = sums.shape
    for n in range(num_blocks):
        span = slice(n * width, (n + 1) * width)
        results = [sums[m, n, rows].astype(jnp.float32) * by_row for m in range(count)]
        if scales:
            results = [
                result * own[0, :, span] for result, own in zip(results, scales, strict=True)
            ]
        out[rows, span] = finish(*results).astype(out.dtype)


def _lane_sums(x: jax.Array) -> jax.Array:
    """x [T, n * LANES] summed over n."""
    parts = [x[:, i : i + LANES] for i in range(0, x.shape[1], LANES)]
    return sum(parts[1:], parts[0])
