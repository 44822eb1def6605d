"""Tokens to lines and back for TPU, as products with matrices of zeros and ones; and the gates.

A gather of rows takes some 14 instructions a row, however few tokens there are; the matrix unit
multiplies a tile of lines with all of a decode step's tokens in less. Its other matrix, [lines,
tokens], is computed from the places by comparisons: tokens are in lanes, so a place is compared
with a tile's lines without moving data. Tiles without a line in use are neither computed nor
copied.

A product has a term for each token, even if its factor is zero. To keep one token's NaN or infinity
from reaching other tokens, inputs that are not finite are replaced by 0. On the way to the lines,
nothing else is needed, since the token's router weights are NaN then. On the way back, the line's
token gets a weight of NaN.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from sgl_jax.kernels.expert_dispatch.lines import UNDIVIDED_TOKENS, ExpertDispatch, Gated
from sgl_jax.kernels.expert_dispatch.xla import xla_add, xla_gather
from sgl_jax.kernels.pallas_tpu import product
from sgl_jax.kernels.tpu_chip import VMEM_LIMIT_BYTES

MAX_TOKENS = UNDIVIDED_TOKENS  # products grow with the tokens, gathers do not
TILE_LINES = 128
MAX_WIDTH = 2048  # columns processed at once
_SHARE = 1 / (2 * MAX_WIDTH)  # factor that keeps a sum of MAX_WIDTH numbers finite

# The kernels' names in compiled programs.
GATHER_NAME, GATE_NAME, ADD_NAME = (
    "gather_expert_rows",
    "gate_expert_rows",
    "add_expert_rows",
)


def tpu_gather(x: jax.Array, lines: ExpertDispatch) -> jax.Array:
    """Implement `interface.GatherLines`."""
    num_tokens, width = x.shape
    if num_tokens > MAX_TOKENS:
        return xla_gather(x, lines)
    num_lines = lines.num_lines
    tile, columns = min(TILE_LINES, num_lines), min(MAX_WIDTH, width)
    kernel = pl.pallas_call(
        _gather,
        name=GATHER_NAME,
        out_shape=jax.ShapeDtypeStruct((num_lines, width), x.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(pl.cdiv(width, columns), pl.cdiv(num_lines, tile)),
            in_specs=[
                pl.BlockSpec(lines.places.shape, lambda *_: (0, 0)),
                pl.BlockSpec((num_tokens, columns), lambda column, _, count: (0, column)),
            ],
            out_specs=pl.BlockSpec((tile, columns), partial(_used_tile, tile=tile)),
            scratch_shapes=[pltpu.VMEM((num_tokens, columns), x.dtype)],
        ),
        compiler_params=_OPTIONS,
    )
    result: jax.Array = kernel(lines.num_used[None], lines.places, x)
    return result


def tpu_gate(gated: Gated, gate: jax.Array, up: jax.Array, lines: ExpertDispatch) -> jax.Array:
    """Implement `interface.GateLines`; computes in float32."""
    num_lines, width = gate.shape
    if lines.places.shape[1] > MAX_TOKENS:
        return gated(gate, up)
    tile, columns = min(TILE_LINES, num_lines), min(MAX_WIDTH, width)
    block = pl.BlockSpec((tile, columns), partial(_used_tile, tile=tile))
    kernel = pl.pallas_call(
        partial(_gate, gated=gated),
        name=GATE_NAME,
        out_shape=jax.ShapeDtypeStruct((num_lines, width), gate.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(pl.cdiv(width, columns), pl.cdiv(num_lines, tile)),
            in_specs=[block, block],
            out_specs=block,
        ),
        compiler_params=_OPTIONS,
    )
    result: jax.Array = kernel(lines.num_used[None], gate, up)
    return result


def tpu_add(results: jax.Array, weights: jax.Array, lines: ExpertDispatch) -> jax.Array:
    """Implement `interface.AddLines`."""
    num_lines, width = results.shape
    num_tokens = weights.shape[1]
    if num_tokens > MAX_TOKENS:
        return xla_add(results, weights, lines)
    tile, columns = min(TILE_LINES, num_lines), min(MAX_WIDTH, width)
    whole = pl.BlockSpec(weights.shape, lambda *_: (0, 0))
    kernel = pl.pallas_call(
        partial(_add, width=width),
        name=ADD_NAME,
        out_shape=jax.ShapeDtypeStruct((num_tokens, width), results.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(pl.cdiv(width, columns), pl.cdiv(num_lines, tile)),
            in_specs=[
                whole,
                whole,
                pl.BlockSpec((tile, columns), partial(_used_tile, tile=tile)),
            ],
            out_specs=pl.BlockSpec((num_tokens, columns), lambda column, _, count: (0, column)),
            scratch_shapes=[pltpu.VMEM((num_tokens, columns), jnp.float32)],
        ),
        compiler_params=_OPTIONS,
    )
    result: jax.Array = kernel(lines.num_used[None], lines.places, weights, results)
    return result


_OPTIONS = pltpu.CompilerParams(
    dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT_BYTES
)


def _used_tile(column: Any, number: Any, count: Any, *, tile: int) -> Any:
    """Return the block of a tile of lines; an unused tile repeats the last used, without a copy."""
    last = jnp.maximum(lax.div(count[0] - 1, jnp.int32(tile)), 0)
    return jnp.minimum(number, last), column


def _first_line(tile: int) -> Any:
    return pl.program_id(1) * tile


def _gather(count: Any, places: Any, x: Any, out: Any, finite: Any) -> None:
    """Gather x [T, columns] by places [top_k, T] into out [tile, columns]."""
    first = _first_line(out.shape[0])

    @pl.when(first == 0)
    def _() -> None:
        values = x[...].astype(jnp.float32)
        is_finite = jnp.abs(values) <= float(jnp.finfo(x.dtype).max)
        finite[...] = jnp.where(is_finite, values, 0.0).astype(x.dtype)

    @pl.when(first < count[0])
    def _() -> None:
        line = first + lax.broadcasted_iota(jnp.int32, (out.shape[0], x.shape[0]), 0)
        chosen = jnp.zeros(line.shape, jnp.float32)
        for k in range(places.shape[0]):
            chosen = jnp.where(places[k : k + 1] == line, 1.0, chosen)
        out[...] = product(chosen.astype(x.dtype), finite[...], (1, 0)).astype(out.dtype)


def _gate(count: Any, gate: Any, up: Any, out: Any, *, gated: Gated) -> None:
    @pl.when(_first_line(out.shape[0]) < count[0])
    def _() -> None:
        values = gated(gate[...].astype(jnp.float32), up[...].astype(jnp.float32))
        out[...] = values.astype(out.dtype)


def _add(
    count: Any, places: Any, weights: Any, results: Any, out: Any, total: Any, *, width: int
) -> None:
    """Add results [tile, columns], times weights [top_k, T], at places [top_k, T] to total.

    `width` is the number of columns of all blocks.
    """
    tile, num_tokens = results.shape[0], out.shape[0]
    first = _first_line(tile)

    @pl.when(pl.program_id(1) == 0)
    def _() -> None:
        total[...] = jnp.zeros_like(total)

    @pl.when(first < count[0])
    def _() -> None:
        values = results[...].astype(jnp.float32)
        if width % values.shape[1]:  # the last block has columns outside the array
            column = lax.broadcasted_iota(jnp.int32, (1, values.shape[1]), 1)
            column += pl.program_id(0) * values.shape[1]
            values = jnp.where(column < width, values, 0.0)
        is_finite = jnp.abs(jnp.sum(values * _SHARE, axis=1, keepdims=True)) < jnp.inf
        is_used = first + lax.broadcasted_iota(jnp.int32, (tile, 1), 0) < count[0]
        rows = jnp.where(is_finite & is_used, values, 0.0).astype(results.dtype)
        line = first + lax.broadcasted_iota(jnp.int32, (tile, num_tokens), 0)
        shares = jnp.zeros((tile, num_tokens), jnp.float32)
        for k in range(places.shape[0]):  # a line is at most one of a token's lines
            shares = jnp.where(places[k : k + 1] == line, weights[k : k + 1], shares)
        shares = jnp.where(is_finite | (shares == 0), shares, jnp.nan)
        total[...] += product(shares.astype(rows.dtype), rows, (0, 0))

    @pl.when(pl.program_id(1) == pl.num_programs(1) - 1)
    def _() -> None:
        out[...] = total[...].astype(out.dtype)
