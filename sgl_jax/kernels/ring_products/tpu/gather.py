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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from sgl_jax.core.quantization import ActivationFormat
from sgl_jax.kernels.quantized_matmul.numbers import sums_dtype
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
    sizes = chips, columns, outputs, count, of_x.itemsize, dtype.itemsize
    cut = TokenBlocks.of(num_tokens, gather_token_bytes(*sizes), device_kind())
    width = block_width(outputs, columns, count * stored.itemsize)
    ring = Ring.of(axis, cut.tokens, of_x.itemsize)
    turns = num_buffers(count * columns * width * stored.itemsize, chips * outputs // width)
    return call(
        partial(_gather_kernel, eps=eps, finish=finish, ring=ring, cut=cut),
        GATHER_NAME,
        layer,
        by_token,
        norms,
        [own.scales for own in matrices if own.scales is not None],
        [own.values for own in matrices],
        jax.ShapeDtypeStruct((num_tokens, outputs), dtype),
        cut,
        [
            ring.places(cut.tokens, columns, of_x),
            pltpu.VMEM((cut.tokens, columns), of_x),
            *[pltpu.VMEM((cut.tokens, LANES), jnp.float32) for _ in norms],
            pltpu.VMEM((count, outputs // width, cut.tokens, width), sums_dtype(of_x)),
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
    cut: TokenBlocks,
) -> None:
    """`by_token` is x and, if it is quantized, each row's scale; else `norms` has the factors."""
    columns, own, *squares, sums, buffers, arrived, sent, received = scratch
    x, *row_scales = by_token
    gathered = _Gathered(ring, columns, sent, received, own, norms, squares)

    def corner(k: Any, n: Any) -> tuple[Any, Any]:
        return ring.at(-distance(k)) * own.shape[1], n * buffers.shape[3]

    sizes = ring.chips, sums.shape[1], pl.program_id(0), cut.number
    stream = Stream(layer[0], matrices, buffers, arrived, corner, *sizes)
    ring.signal_neighbours()
    stream.start_first()
    gathered.start(x)

    def multiply(k: Any) -> None:
        def multiply_block(n: Any, values: Any) -> None:
            def multiply_tile(rows: Any) -> None:
                for m in range(len(matrices)):
                    new = multiplied(own[rows], values[m])
                    sums[m, n, rows] = jnp.where(k == 0, new, sums[m, n, rows] + new)

            for_rows(cut.tokens, cut.tile, multiply_tile)

        gathered.take(k)
        stream.for_each(k, multiply_block)

    def finish_rows(rows: Any) -> None:
        by_row = gathered.inverse_rms(rows, eps) if norms else row_scales[0][rows]
        _finish_sums(sums, rows, by_row, scales, finish, out)

    pl.loop(0, ring.chips)(multiply)
    for_rows(cut.tokens, piece(columns.shape[2]), finish_rows)
    gathered.end()


class _Gathered(NamedTuple):
    """A block of tokens, as its columns come from the other chips."""

    ring: Ring
    columns: Any  # [chips, parts, T / parts, columns] of each message
    sent: Any
    received: Any
    own: Any  # [T, columns] of one chip, as they are multiplied
    norms: Any  # one [chips, 1, columns], its factors; none if columns are quantized
    squares: Any  # one [T, LANES] as well, summed

    def start(self, x: Any) -> None:
        """Send this chip's columns [T, columns] off, once the neighbours may receive."""
        self.columns[0] = x[...].reshape(self.columns.shape[1:])
        for squares in self.squares:
            squares[...] = jnp.zeros_like(squares)
        self.ring.wait_for_neighbours()
        self._send_on(0)

    def take(self, k: Any) -> None:
        """Bring message k's columns, times the norm's factors, to `own`."""

        @pl.when(lax.rem(k, 2) == 1)
        def _() -> None:
            self._receive(k)
            self._receive(k + 1)

        if not self.norms:
            self.own[...] = self.columns[k].reshape(self.own.shape)
            return
        part_rows = self.columns.shape[2]
        for part in range(self.ring.parts):
            for_rows(part_rows, piece(part_rows), partial(self._normalise, k, part))

    def inverse_rms(self, rows: Any, eps: float) -> jax.Array:
        """[rows, 1] when all columns have been taken."""
        size = self.norms[0].size
        mean = jnp.sum(self.squares[0][rows], axis=1, keepdims=True) / size
        return lax.rsqrt(mean + eps)

    def end(self) -> None:
        for k, part in self.ring.all_messages():
            self._message(k, part).wait_send()

    def _message(self, k: Any, part: int, source: Any = 0) -> Any:
        places = self.columns.at[source], self.columns
        return self.ring.message(k, part, *places, self.sent, self.received)

    def _send_on(self, source: Any) -> None:
        for part in range(self.ring.parts):
            self.ring.for_each_next(
                source, part, lambda k, part: self._message(k, part, source).start()
            )

    def _receive(self, k: Any) -> None:
        @pl.when(k < self.ring.chips)
        def _() -> None:
            for part in range(self.ring.parts):
                self._message(k, part).wait_recv()
            self._send_on(k)

    def _normalise(self, k: Any, part: int, rows: Any) -> None:
        wide = self.columns[k, part, rows].astype(jnp.float32)
        here = pl.ds(part * self.columns.shape[2] + rows.start, rows.size)
        self.squares[0][here] += _lane_sums(wide * wide)
        factors = self.norms[0][self.ring.at(-distance(k))]
        self.own[here] = (wide * factors).astype(self.own.dtype)


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
    """X [T, n * LANES] summed over n."""
    parts = [x[:, i : i + LANES] for i in range(0, x.shape[1], LANES)]
    return sum(parts[1:], parts[0])
