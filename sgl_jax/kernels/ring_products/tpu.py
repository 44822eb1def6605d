"""Products that exchange hidden states over a ring: two Pallas kernels for TPU.

Each chip sends to both neighbours. Chip c's columns travel to the right over one half of the ring
and to the left over the other, so that the farthest chip is chips / 2 hops away, and each hop runs
beside the product with the columns that came before it (arXiv 2105.05720 does so on GPUs, a tile
at a time). Every message of a call has a place of its own in the receiver's vector memory, so that
no place is written twice, and a barrier at the start ensures that both neighbours are in the call.

The blocks of the matrices stream from memory meanwhile, each once.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from sgl_jax.kernels.pallas_tpu import product
from sgl_jax.kernels.ring_products.matrices import Finish, RingMatrix
from sgl_jax.kernels.ring_products.ring import Ring, Stream, distance
from sgl_jax.kernels.tpu_chip import LANES, VMEM_LIMIT_BYTES

# The kernels' names in compiled programs.
GATHER_NAME, SCATTER_NAME = "ring_gather_multiply", "ring_multiply_scatter"
_COLLECTIVE_IDS = {GATHER_NAME: 8, SCATTER_NAME: 9}
_MAX_BLOCK = 1 << 20  # numbers of a block
_BUFFER_BYTES = 12 << 20  # of blocks on their way
_MAX_BUFFERS = 8


def _numbers(values: Any, dtype: Any) -> jax.Array:
    return values if values.dtype == dtype else values.astype(dtype)


# -- gather, then multiply ------------------------------------------------------------------------


def tpu_gather_multiply(
    x: jax.Array,
    norm: jax.Array,
    eps: float,
    matrices: tuple[RingMatrix, ...],
    layer: jax.Array,
    finish: Finish,
    axis: str,
) -> jax.Array:
    """See `interface.GatherMultiply`."""
    num_tokens, columns = x.shape
    ring, count = Ring.of(axis, num_tokens), len(matrices)
    outputs, dtype = matrices[0].values.shape[2], matrices[0].values.dtype
    width = block_width(outputs, columns)
    turns = _turns(count * columns * width * dtype.itemsize, ring.chips * outputs // width)
    scales = [own.scales for own in matrices if own.scales is not None]
    return _call(
        partial(_gather_kernel, eps=eps, finish=finish, ring=ring),
        GATHER_NAME,
        layer,
        (x, norm.reshape(ring.chips, 1, columns)),
        scales,
        [own.values for own in matrices],
        jax.ShapeDtypeStruct((num_tokens, outputs), x.dtype),
        [
            ring.places(num_tokens, columns, x.dtype),
            pltpu.VMEM((num_tokens, columns), x.dtype),
            pltpu.VMEM((num_tokens, LANES), jnp.float32),
            pltpu.VMEM((count, outputs // width, num_tokens, width), jnp.float32),
            pltpu.VMEM((turns, count, columns, width), dtype),
            pltpu.SemaphoreType.DMA((turns,)),
            *ring.semaphores(),
        ],
    )


def _gather_kernel(
    layer: Any,
    x: Any,
    norm: Any,
    scales: Any,
    matrices: Any,
    out: Any,
    *scratch: Any,
    eps: float,
    finish: Finish,
    ring: Ring,
) -> None:
    """Columns [chips, parts, T / parts, columns] as they come; normed [T, columns], one chip's
    times the norm's factors; squares [T, LANES], summed; sums [matrices, blocks, T, width]."""
    columns, normed, squares, sums, buffers, arrived, sent, received = scratch
    _, num_blocks, _, width = sums.shape

    def corner(block: Any) -> tuple[Any, Any]:
        source = ring.at(-distance(lax.div(block, num_blocks)))
        return source * x.shape[1], lax.rem(block, num_blocks) * width

    def message(k: Any, part: int, source: Any = 0) -> Any:
        return ring.message(k, part, columns.at[source], columns, sent, received)

    def send_on(source: Any) -> None:
        ring.for_each_next(source, lambda k, part: message(k, part, source).start())

    def receive(k: Any) -> None:
        @pl.when(k < ring.chips)
        def _() -> None:
            for part in range(ring.parts):
                message(k, part).wait_recv()
            send_on(k)

    stream = Stream(layer[0], matrices, buffers, arrived, corner, ring.chips * num_blocks)
    ring.signal_neighbours()
    stream.start_first()
    columns[0] = x[...].reshape(columns.shape[1:])
    squares[...] = jnp.zeros_like(squares)
    ring.wait_for_neighbours()
    send_on(0)

    def multiply(k: Any) -> None:
        @pl.when(lax.rem(k, 2) == 1)
        def _() -> None:
            receive(k)
            receive(k + 1)

        wide = columns[k].reshape(x.shape).astype(jnp.float32)
        squares[...] += _lane_sums(wide * wide)
        normed[...] = (wide * norm[ring.at(-distance(k))]).astype(normed.dtype)

        @pl.loop(0, num_blocks)
        def _(n: Any) -> None:
            block = k * num_blocks + n
            values = stream.wait(block)
            for m in range(len(matrices)):
                new = product(normed[...], _numbers(values[m], normed.dtype), (1, 0))
                sums[m, n] = jnp.where(k == 0, new, sums[m, n] + new)
            stream.replace(block)

    pl.loop(0, ring.chips)(multiply)
    mean = jnp.sum(squares[...], axis=1, keepdims=True) / norm.size
    _finish_sums(sums, lax.rsqrt(mean + eps), scales, finish, out)
    for k, part in ring.all_messages():
        message(k, part).wait_send()


def _finish_sums(sums: Any, rows: jax.Array, scales: Any, finish: Finish, out: Any) -> None:
    """Sums [matrices, blocks, T, width], times `rows` [T, 1], finished into out."""
    count, num_blocks, _, width = sums.shape
    for n in range(num_blocks):
        span = slice(n * width, (n + 1) * width)
        results = [sums[m, n] * rows for m in range(count)]
        if scales:
            results = [
                result * own[0, :, span] for result, own in zip(results, scales, strict=True)
            ]
        out[:, span] = finish(*results).astype(out.dtype)


def _lane_sums(x: jax.Array) -> jax.Array:
    """x [T, n * LANES] summed over n."""
    parts = [x[:, i : i + LANES] for i in range(0, x.shape[1], LANES)]
    return sum(parts[1:], parts[0])


# -- multiply, then scatter -----------------------------------------------------------------------


def tpu_multiply_scatter(
    x: jax.Array, matrix: RingMatrix, layer: jax.Array, residual: jax.Array, axis: str
) -> jax.Array:
    """See `interface.MultiplyScatter`."""
    num_tokens, inputs = x.shape
    ring, columns = Ring.of(axis, num_tokens), residual.shape[1]
    rows = block_width(inputs, columns)
    dtype = matrix.values.dtype
    turns = _turns(rows * columns * dtype.itemsize, ring.chips * inputs // rows)
    scales = []
    if matrix.scales is not None:
        scales = [matrix.scales.reshape(-1, ring.chips, 1, columns)]
    return _call(
        partial(_scatter_kernel, ring=ring),
        SCATTER_NAME,
        layer,
        (x, residual),
        scales,
        [matrix.values],
        jax.ShapeDtypeStruct(residual.shape, x.dtype),
        [
            ring.places(num_tokens, columns, x.dtype),
            ring.places(num_tokens, columns, x.dtype),
            pltpu.VMEM((ring.parts, num_tokens // ring.parts, columns), jnp.float32),
            pltpu.VMEM((turns, 1, rows, columns), dtype),
            pltpu.SemaphoreType.DMA((turns,)),
            *ring.semaphores(),
        ],
    )


def _scatter_kernel(
    layer: Any,
    x: Any,
    residual: Any,
    scales: Any,
    matrices: Any,
    out: Any,
    *scratch: Any,
    ring: Ring,
) -> None:
    """The sums [parts, T / parts, columns] of the farthest chips first; outgoing and incoming are
    [chips, ...] of these."""
    outgoing, incoming, sums, buffers, arrived, sent, received = scratch
    _, _, rows, columns = buffers.shape
    num_blocks = x.shape[1] // rows

    def corner(block: Any) -> tuple[Any, Any]:
        k = ring.chips - 1 - lax.div(block, num_blocks)
        return lax.rem(block, num_blocks) * rows, ring.at(distance(k)) * columns

    def message(k: Any, part: int) -> Any:
        return ring.message(k, part, outgoing.at[k], incoming, sent, received)

    def add_received(k: Any, part: int) -> None:
        message(k, part).wait_recv()
        sums[part] += incoming[k, part].astype(jnp.float32)

    stream = Stream(layer[0], matrices, buffers, arrived, corner, ring.chips * num_blocks)
    ring.signal_neighbours()
    stream.start_first()

    def multiply(turn: Any) -> None:
        k = ring.chips - 1 - turn

        @pl.loop(0, num_blocks)
        def _(n: Any) -> None:
            block = turn * num_blocks + n
            values = _numbers(stream.wait(block)[0], x.dtype)
            inputs = x[:, pl.ds(pl.multiple_of(n * rows, rows), rows)]
            new = product(inputs, values, (1, 0)).reshape(sums.shape)
            sums[...] = jnp.where(n == 0, new, sums[...] + new)
            stream.replace(block)

        if scales:
            sums[...] *= scales[0][0, ring.at(distance(k))]
        pl.when(turn == 0)(ring.wait_for_neighbours)
        # A message for another chip goes on with this chip's part; the nearest ones end here.
        ring.for_each_next(k, add_received)

        @pl.when(k > 0)
        def _() -> None:
            outgoing[k] = sums[...].astype(outgoing.dtype)
            for part in range(ring.parts):
                message(k, part).start()

    pl.loop(0, ring.chips)(multiply)
    total = sums[...].reshape(out.shape) + residual[...].astype(jnp.float32)
    out[...] = total.astype(out.dtype)
    for k, part in ring.all_messages():
        message(k, part).wait_send()


# -- both -----------------------------------------------------------------------------------------


def block_width(size: int, columns: int) -> int:
    """The part of `size` outputs or inputs that makes a block with `columns` hidden states."""
    sizes = range(LANES, max(_MAX_BLOCK // columns, LANES) + 1, LANES)
    return max(own for own in sizes if size % own == 0)


def _turns(block_bytes: int, num_blocks: int) -> int:
    return min(max(_BUFFER_BYTES // block_bytes, 2), _MAX_BUFFERS, num_blocks)


def _call(
    kernel: Any,
    name: str,
    layer: jax.Array,
    in_vmem: tuple[jax.Array, ...],
    scales: list[jax.Array],
    matrices: list[jax.Array],
    result: jax.ShapeDtypeStruct,
    scratch: list[Any],
) -> jax.Array:
    """Run kernel(layer, *in_vmem, scales, matrices, out, *scratch); scales are the layer's own."""

    def of_layer(stack: jax.Array) -> pl.BlockSpec:
        shape = (1, *stack.shape[1:])
        return pl.BlockSpec(shape, lambda _, layer: (layer[0], *[0] * (stack.ndim - 1)))

    vmem, hbm = (pl.BlockSpec(memory_space=space) for space in (pltpu.VMEM, pl.ANY))
    run = pl.pallas_call(
        kernel,
        name=name,
        out_shape=result,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(1,),
            in_specs=[
                *[vmem for _ in in_vmem],
                [of_layer(stack) for stack in scales],
                [hbm for _ in matrices],
            ],
            out_specs=vmem,
            scratch_shapes=scratch,
        ),
        compiler_params=pltpu.CompilerParams(
            collective_id=_COLLECTIVE_IDS[name],
            vmem_limit_bytes=VMEM_LIMIT_BYTES,
            has_side_effects=True,
        ),
    )
    out: jax.Array = run(layer.astype(jnp.int32)[None], *in_vmem, scales, matrices)
    return out
