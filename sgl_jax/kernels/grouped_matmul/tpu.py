"""The grouped matmul for TPU: a Pallas kernel that reads the matrices of all layers in place.

Lines are cut into tiles regardless of group. A *visit* is a pair of a group and a tile with some of
its lines; it multiplies the whole tile with the group's matrix and keeps the group's lines. Visits
are ordered by group, and so by tile:

- a group's matrix is fetched once, during the previous visit, and never for a group without lines;
- the visits to one tile are consecutive, so its result stays in vector memory until all groups have
  written their lines.

There are fewer visits than groups and tiles together. The grid has room for the largest number;
unused visits repeat the last visit's indices, so that nothing is copied, and compute nothing.

The layer's number is prefetched with the visits and selects the matrix in [layers, groups, ...]:
XLA would copy a layer's matrices in every step to pass them to a kernel. Based on MegaBlocks
(arXiv 2211.15841).
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from sgl_jax.core.layer_configs import WeightFormat
from sgl_jax.kernels.grouped_matmul.interface import GroupMatrices
from sgl_jax.kernels.pallas_tpu import product
from sgl_jax.kernels.quantized_matmul.numbers import as_numbers, as_scales, dequantized
from sgl_jax.kernels.row_blocks import TPU_BLOCK_ROWS
from sgl_jax.kernels.tpu_chip import LANES, VMEM_LIMIT_BYTES

MIN_LINES, MAX_LINES = 64, 512  # bounds for the lines of a tile
NAME, PLAN_NAME = "grouped_matmul", "plan_visits"  # names of the kernels in compiled programs
INVARIANT_LINES = 128  # lines of a tile, if results must not depend on the batch
MAX_MATRIX_BYTES = 4 << 20  # limit for one of the two buffers
_MAX_OPERAND_BYTES = 48 << 20  # limit for both buffers of lines and of a matrix of wide inputs


class Tiles(NamedTuple):
    """The part of the result computed at once: some columns for some lines."""

    lines: int
    width: int


def choose_tiles(
    num_lines: int, num_groups: int, inputs: int, outputs: int, itemsize: int
) -> Tiles:
    """Choose tiles for lines [num_lines, inputs] and matrices [num_groups, inputs, outputs].

    Small tiles waste less where a group ends, large tiles load the matrix unit's weights less
    often: a tile has about as many lines as a group, and all columns or a multiple of the lanes.
    `itemsize` is the bytes of an element.
    """
    column_bytes = inputs * itemsize
    width = max(MAX_MATRIX_BYTES // column_bytes // LANES, 1) * LANES
    lines = MIN_LINES
    while lines < MAX_LINES and lines * num_groups < num_lines:
        lines *= 2
    return Tiles(min(lines, num_lines), min(width, outputs))


def max_visits(num_lines: int, num_groups: int, tile_lines: int) -> int:
    """Return the most pairs of a group and a tile with its lines, for any group sizes."""
    return min(num_groups, num_lines) + -(-num_lines // tile_lines) - 1


class _Visits(NamedTuple):
    """The kernel's visits, planned beforehand, in scalar memory."""

    sizes: Any  # int32 [2]: the layer, the number of visits
    group: Any  # int32 [most visits]
    tile: Any  # int32 [most visits]
    first: Any  # int32 [most visits] the group's first line
    stop: Any  # int32 [most visits] the line after the group's last line


def _plan_visits(group_sizes: jax.Array, layer: jax.Array, num_lines: int, tile: int) -> _Visits:
    """Find the visits in scalar memory: XLA would take ten operations of 2,100 cycles each."""
    most = max_visits(num_lines, len(group_sizes), tile)
    kernel = pl.pallas_call(
        partial(_list_visits, tile=tile),
        name=PLAN_NAME,
        out_shape=_Visits(*(jax.ShapeDtypeStruct((n,), jnp.int32) for n in (2, *[most] * 4))),
        in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM)] * 2,
        out_specs=_Visits(*[pl.BlockSpec(memory_space=pltpu.SMEM)] * 5),
    )
    visits: _Visits = kernel(group_sizes, layer.astype(jnp.int32)[None])
    return visits


def _list_visits(group_sizes: Any, layer: Any, *visits: Any, tile: int) -> None:
    sizes, *by_visit = visits

    def write(visit: Any, values: tuple[Any, ...]) -> None:
        for array, value in zip(by_visit, values, strict=True):
            array[visit] = value

    def visit_group(group: Any, state: tuple[Any, ...]) -> tuple[Any, ...]:
        visit, first, last = state
        stop = first + group_sizes[group]
        tiles = lax.div(first, jnp.int32(tile)), lax.div(stop + tile - 1, jnp.int32(tile))
        num_tiles = jnp.where(stop > first, tiles[1] - tiles[0], 0)

        @pl.loop(0, num_tiles)
        def _(number: jax.Array) -> None:
            write(visit + number, (group, tiles[0] + number, first, stop))

        new = (group, tiles[1] - 1, first, stop)
        last = tuple(jnp.where(num_tiles > 0, a, b) for a, b in zip(new, last, strict=True))
        return visit + num_tiles, stop, last

    zero = jnp.int32(0)
    state = (zero, zero, (zero,) * 4)
    count, _stop, last = lax.fori_loop(0, group_sizes.shape[0], visit_group, state)

    @pl.loop(count, by_visit[0].shape[0])
    def _(visit: jax.Array) -> None:
        write(visit, last)

    sizes[0], sizes[1] = layer[0], count


def _kernel(
    visits: _Visits,
    lines: Any,
    *refs: Any,
    transposed: bool,
    weight: WeightFormat | None,
    scales_outputs: bool,
) -> None:
    """Multiply lines [tile, k] with matrix [1, 1, k, width] into some rows of out [tile, width].

    `refs` are the matrix, its scales and zero points if it has them, and out. With
    `scales_outputs`, the scales are [1, 1, 1, width].
    """
    *parts, out = refs
    visit = pl.program_id(1)

    @pl.when(visit < visits.sizes[1])
    def _() -> None:
        own = [part[0, 0] for part in parts]
        matrix = own[0]
        if weight is not None and scales_outputs:
            matrix = as_numbers(own[0], weight, lines.dtype)
        elif weight is not None:
            matrix = _numbers(own, weight, lines.dtype, transposed)
        new = product(lines[...], matrix, (1, 1 if transposed else 0))
        if scales_outputs:
            new = new * as_scales(own[1], jnp.float32)
        keep = _is_of_group(visits, visit, out.shape)
        out[...] = jnp.where(keep, new, out[...].astype(jnp.float32)).astype(out.dtype)


def _numbers(
    parts: list[jax.Array], weight: WeightFormat, dtype: DTypeLike, transposed: bool
) -> jax.Array:
    """Dequantize a matrix from `parts`: its values, its scales, and its zero points if any."""
    values, scales, *rest = parts
    zero_points = rest[0] if rest else None
    if not transposed:
        return dequantized(values, scales, zero_points, weight, dtype)
    numbers = as_numbers(values, weight, dtype)
    if zero_points is not None:
        numbers = numbers - _along_inputs(zero_points.astype(dtype), values.shape)
    return numbers * _along_inputs(as_scales(scales, dtype), values.shape)


def _along_inputs(scales: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Repeat scales [groups, m] for each of their inputs, as [m, k].

    The matrix unit repeats them by an exact product with ones and zeros: the vector unit is slow at
    moving numbers along a row.
    """
    groups = scales.shape[0]
    group = lax.broadcasted_iota(jnp.int32, (groups, shape[1]), 0)
    inputs = lax.broadcasted_iota(jnp.int32, (groups, shape[1]), 1)
    is_of = lax.div(inputs, jnp.int32(shape[1] // groups)) == group
    return product(scales, is_of.astype(scales.dtype), (0, 0)).astype(scales.dtype)


def _is_of_group(visits: _Visits, visit: Any, shape: tuple[int, ...]) -> jax.Array:
    """Return bool of `shape`: the rows of the visit's tile with lines of its group."""
    line = visits.tile[visit] * shape[0] + lax.broadcasted_iota(jnp.int32, shape, 0)
    return (line >= visits.first[visit]) & (line < visits.stop[visit])


def tpu_grouped_matmul(
    lines: jax.Array,
    matrices: GroupMatrices,
    layer: jax.Array,
    group_sizes: jax.Array,
    *,
    transposed: bool,
    tiles: Tiles | None = None,
    dtype: DTypeLike | None = None,
    is_invariant: bool = False,
) -> jax.Array:
    """Implement `interface.GroupedMatmul`; `tiles` default to `choose_tiles`, and `dtype`, of the
    result, to that of the lines.

    With `is_invariant`, tiles have one size for any number of lines. A tile is multiplied whole, so
    the bits of a line's result depend on no other line.
    """
    num_lines, inputs = lines.shape
    num_groups = matrices.values.shape[1]
    outputs = matrices.values.shape[2 if transposed else 3]
    if tiles is None:
        itemsize = lines.dtype.itemsize  # a quantized matrix is converted to the lines' dtype
        tiles = choose_tiles(num_lines, num_groups, inputs, outputs, itemsize)
        if is_invariant:
            tiles = tiles._replace(lines=INVARIANT_LINES)
    tile, width = tiles

    def of_inputs_by_outputs(column: Any, visit: Any, visits: _Visits) -> Any:
        return visits.sizes[0], visits.group[visit], 0, column

    def of_outputs_by_inputs(column: Any, visit: Any, visits: _Visits) -> Any:
        return visits.sizes[0], visits.group[visit], column, 0

    parts = [part for part in matrices[:3] if part is not None]
    blocks = [pl.BlockSpec((1, 1, part.shape[2], width), of_inputs_by_outputs) for part in parts]
    if transposed:
        blocks[0] = pl.BlockSpec((1, 1, width, inputs), of_outputs_by_inputs)
    kernel = pl.pallas_call(
        partial(
            _kernel,
            transposed=transposed,
            weight=matrices.weight,
            scales_outputs=matrices.scales_outputs,
        ),
        name=NAME,
        out_shape=jax.ShapeDtypeStruct((num_lines, outputs), dtype or lines.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(pl.cdiv(outputs, width), max_visits(num_lines, num_groups, tile)),
            in_specs=[
                pl.BlockSpec((tile, inputs), lambda _, v, visits: (visits.tile[v], 0)),
                *blocks,
            ],
            out_specs=pl.BlockSpec((tile, width), lambda c, v, visits: (visits.tile[v], c)),
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT_BYTES
        ),
    )
    visits = _plan_visits(group_sizes, layer, num_lines, tile)
    result: jax.Array = kernel(visits, lines, *parts)
    return result


def multiply_rows(
    x: jax.Array, matrices: jax.Array, layer: jax.Array, *, transposed: bool, dtype: DTypeLike
) -> jax.Array:
    """Implement `row_blocks.Multiply`, as the product of one group."""
    # XLA chooses the order of a product's sums for each program, also for equal shapes.
    num_rows, itemsize = len(x), x.dtype.itemsize
    padded = jnp.pad(x, ((0, max(TPU_BLOCK_ROWS - num_rows, 0)), (0, 0)))
    inputs, outputs = matrices.shape[:0:-1] if transposed else matrices.shape[1:]
    tiles = choose_tiles(TPU_BLOCK_ROWS, 1, inputs, outputs, itemsize)
    lines = TPU_BLOCK_ROWS  # a size that depends on the matrix only, not on the number of rows
    while lines > MIN_LINES and 2 * (lines + tiles.width) * inputs * itemsize > _MAX_OPERAND_BYTES:
        lines //= 2
    result = tpu_grouped_matmul(
        *(padded, GroupMatrices(matrices[:, None]), layer, jnp.int32([len(padded)])),
        transposed=transposed,
        tiles=tiles._replace(lines=lines),
        dtype=dtype,
    )
    return result[:num_rows]
