"""The product with a matrix whose groups of inputs have scales: a Pallas kernel for TPU.

XLA converts values within a product, but writes the scales of groups out for each number first,
which takes ten times as long as the product. Here a block of values becomes numbers in vector
memory once, and is multiplied with all tokens, a tile at a time. The sums stay in vector memory
until the last block of inputs.

The layer's number is prefetched and chooses where in [layers, in, out] the blocks lie.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from sgl_jax.core.quantization import Scheme, WeightFormat
from sgl_jax.kernels.pallas_tpu import product
from sgl_jax.kernels.quantized_matmul.interface import QuantizedArrays, xla_quantized_matmul
from sgl_jax.kernels.quantized_matmul.numbers import dequantized
from sgl_jax.kernels.tpu_chip import LANES, VMEM_LIMIT_BYTES

NAME = "quantized_matmul"  # of the kernel, in compiled programs
_SUBLANES = 16  # rows of a tile of two bytes a number
_MAX_TOKENS = 512  # of a tile
_MAX_BLOCK = 2 << 20  # numbers of a block
_MAX_SUMS = 4 << 20  # numbers of all tokens' sums for a block's outputs


class Blocks(NamedTuple):
    """Tokens, inputs and outputs that are multiplied at once."""

    tokens: int
    inputs: int
    outputs: int


def choose_blocks(num_tokens: int, inputs: int, outputs: int, groups: int) -> Blocks:
    """Blocks for x [num_tokens, inputs] and a matrix [inputs, outputs] of `groups`.

    The scales of a block are whole tiles, or all there are.
    """
    group = inputs // groups
    per_block = groups
    if groups % _SUBLANES == 0:
        fitting = [n for n in range(_SUBLANES, groups + 1, _SUBLANES) if groups % n == 0]
        per_block = max((n for n in fitting if n * group <= 2048), default=_SUBLANES)
    most = min(_MAX_BLOCK // (per_block * group), _MAX_SUMS // num_tokens)
    width = max(most // LANES, 1) * LANES
    return Blocks(min(num_tokens, _MAX_TOKENS), per_block * group, min(width, outputs))


def _kernel(
    layer: Any,
    x: Any,
    values: Any,
    scales: Any,
    *refs: Any,
    weight: WeightFormat,
) -> None:
    """x [tokens, inputs] times a block into some rows of the sums [T, outputs].

    `refs` are the zero points if there are any, out, and in scratch the numbers and the sums.
    """
    *zeros, out, numbers, sums = refs
    block, tile = pl.program_id(1), pl.program_id(2)

    @pl.when(tile == 0)
    def _() -> None:
        zero_points = zeros[0][0] if zeros else None
        numbers[...] = dequantized(values[0], scales[0], zero_points, weight, numbers.dtype)

    rows = pl.ds(pl.multiple_of(tile * x.shape[0], x.shape[0]), x.shape[0])
    new = product(x[...], numbers[...], (1, 0))
    sums[rows, :] = jnp.where(block == 0, new, sums[rows, :] + new)

    @pl.when(block == pl.num_programs(1) - 1)
    def _() -> None:
        out[...] = sums[rows, :].astype(out.dtype)


def tpu_quantized_matmul(
    x: jax.Array,
    matrices: QuantizedArrays,
    layer: jax.Array,
    scheme: Scheme,
    blocks: Blocks | None = None,
) -> jax.Array:
    """See `interface.QuantizedMatmul`; `blocks` default to `choose_blocks`.

    XLA multiplies where a scale is for all inputs of an output, and where groups are not whole
    tiles.
    """
    num_tokens, inputs = x.shape
    _, groups, outputs = matrices.scales.shape
    if groups == 1 or (inputs // groups) % _SUBLANES:
        return xla_quantized_matmul(x, matrices, layer, scheme)
    tokens, block_inputs, width = blocks or choose_blocks(num_tokens, inputs, outputs, groups)
    num_tiles, last = pl.cdiv(num_tokens, tokens), inputs // block_inputs - 1
    per_block = groups * block_inputs // inputs

    def of_matrix(rows: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, rows, width), lambda o, i, t, layer: (layer[0], i, o))

    def of_result(o: Any, i: Any, t: Any, _: Any) -> Any:
        # A tile of the result is visited once: until the last block it is the first one.
        return jnp.where(i == last, t, 0), o

    parts = [part for part in matrices[:3] if part is not None]
    rows = [block_inputs, *[per_block] * (len(parts) - 1)]
    kernel = pl.pallas_call(
        partial(_kernel, weight=scheme.weight),
        name=NAME,
        out_shape=jax.ShapeDtypeStruct((num_tokens, outputs), x.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(pl.cdiv(outputs, width), last + 1, num_tiles),
            in_specs=[
                pl.BlockSpec((tokens, block_inputs), lambda o, i, t, layer: (t, i)),
                *map(of_matrix, rows),
            ],
            out_specs=pl.BlockSpec((tokens, width), of_result),
            scratch_shapes=[
                pltpu.VMEM((block_inputs, width), x.dtype),
                pltpu.VMEM((num_tiles * tokens, width), jnp.float32),
            ],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=VMEM_LIMIT_BYTES,
        ),
    )
    result: jax.Array = kernel(layer.astype(jnp.int32)[None], x, *parts)
    return result
