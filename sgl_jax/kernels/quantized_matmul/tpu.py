"""Products with quantized matrices: two Pallas kernels for TPU.

- *Activations of the matrix's format* are multiplied without conversion, at the rate of 8-bit
  numbers, and the sums scaled once.
- *Other activations* need a block's values as numbers: these are computed in vector memory once,
  and multiplied with all tokens, a tile at a time. XLA does this as well, within the product, but a
  few tokens then wait for the conversion; and it first writes out the scales of groups for each
  number, which takes ten times as long as the product. So XLA only multiplies many tokens with
  matrices with one scale for each output.

The layer's number is prefetched and selects the blocks in [layers, in, out].
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from sgl_jax.core.layer_configs import ActivationFormat, Scheme, WeightFormat
from sgl_jax.kernels.pallas_tpu import product
from sgl_jax.kernels.quantized_matmul.numbers import (
    QuantizedArrays,
    dequantized,
    quantize_activations,
    stored_scales,
    value_dtype,
)
from sgl_jax.kernels.quantized_matmul.xla import xla_quantized_matmul
from sgl_jax.kernels.tpu_chip import LANES, VMEM_LIMIT_BYTES

# The kernels' names in compiled programs.
NUMBERS_NAME, VALUES_NAME = "quantized_matmul_numbers", "quantized_matmul_values"
QUANTIZE_NAME = "quantize_activations"
MAX_CONVERTED_TOKENS = 256  # most tokens for which the kernel is faster than XLA, without groups
_SUBLANES = 16  # rows of a tile of 2-byte numbers
_BYTE_ROWS = 32  # rows of a tile of 8-bit numbers
_MAX_TOKENS = 512  # most tokens of a tile
_MAX_BLOCK = 2 << 20  # most numbers of a block
_MAX_VALUES = 8 << 20  # most bytes of a block without conversion
_MAX_SUMS = 4 << 20  # most numbers of all tokens' sums for a block's outputs


class Blocks(NamedTuple):
    """Tokens, inputs and outputs to multiply at once."""

    tokens: int
    inputs: int
    outputs: int


def choose_blocks(num_tokens: int, inputs: int, outputs: int, groups: int) -> Blocks:
    """Choose blocks for x [num_tokens, inputs] and a matrix [inputs, outputs] of `groups`.

    The scales of a block are whole tiles, or all scales.
    """
    group = inputs // groups
    per_block = groups
    if groups % _SUBLANES == 0:
        fitting = [n for n in range(_SUBLANES, groups + 1, _SUBLANES) if groups % n == 0]
        per_block = max((n for n in fitting if n * group <= 2048), default=_SUBLANES)
    most = min(_MAX_BLOCK // (per_block * group), _MAX_SUMS // num_tokens)
    return Blocks(min(num_tokens, _MAX_TOKENS), per_block * group, _width(most, outputs))


def value_blocks(num_tokens: int, inputs: int, outputs: int) -> Blocks:
    """Return blocks for products without conversion."""
    width = _width(_MAX_VALUES // inputs, outputs)
    return Blocks(min(num_tokens, _MAX_TOKENS), inputs, width)


def _width(most: int, outputs: int) -> int:
    """Return the outputs of a block: whole rows of lanes, about `most` or fewer, of equal size."""
    widest = max(most // LANES, 1) * LANES
    per_block = pl.cdiv(outputs, pl.cdiv(outputs, widest))
    return min(pl.cdiv(per_block, LANES) * LANES, outputs)


def kernel_of(scheme: Scheme, num_tokens: int, inputs: int, groups: int) -> str | None:
    """Return the name of the kernel that multiplies, or None for XLA."""
    if scheme.activation is not None:
        return VALUES_NAME
    if groups == 1:
        return NUMBERS_NAME if num_tokens <= MAX_CONVERTED_TOKENS else None
    return NUMBERS_NAME if (inputs // groups) % _SUBLANES == 0 else None


def tpu_quantized_matmul(
    x: jax.Array,
    matrices: QuantizedArrays,
    layer: jax.Array,
    scheme: Scheme,
    blocks: Blocks | None = None,
    *,
    is_invariant: bool = False,
) -> jax.Array:
    """Implement `QuantizedMatmul`; `blocks` of numbers default to `choose_blocks`.

    With `is_invariant`, it raises ValueError for products that XLA computes.
    """
    (num_tokens, inputs), groups = x.shape, matrices.scales.shape[1]
    kernel = kernel_of(scheme, num_tokens, inputs, groups)
    if kernel == VALUES_NAME:
        return _multiply_values(x, matrices, layer, scheme)
    if kernel == NUMBERS_NAME:
        return _multiply_numbers(x, matrices, layer, scheme, blocks)
    if is_invariant:
        raise ValueError(
            f"matrices of {scheme.name}, {inputs // groups} on a chip: "
            f"--enable-deterministic-inference needs groups of a multiple of {_SUBLANES} inputs"
        )
    return xla_quantized_matmul(x, matrices, layer, scheme)


def _numbers_kernel(
    layer: Any, x: Any, values: Any, scales: Any, *refs: Any, weight: WeightFormat
) -> None:
    """Multiply x [tokens, inputs] with a block into some rows of the sums [T, outputs].

    `refs` are the zero points if there are any, out, and in scratch the numbers and the sums.
    """
    *zeros, out, numbers, sums = refs
    block, tile = pl.program_id(1), pl.program_id(2)

    @pl.when(tile == 0)
    def _() -> None:
        zero_points = zeros[0][0] if zeros else None
        numbers[...] = dequantized(values[0], scales[0], zero_points, weight, numbers.dtype)

    # Several tiles have whole registers of rows; a single one has any number.
    rows: Any = slice(None)
    if x.shape[0] < sums.shape[0]:
        rows = pl.ds(pl.multiple_of(tile * x.shape[0], x.shape[0]), x.shape[0])
    new = product(x[...], numbers[...], (1, 0))
    sums[rows, :] = jnp.where(block == 0, new, sums[rows, :] + new)

    @pl.when(block == pl.num_programs(1) - 1)
    def _() -> None:
        out[...] = sums[rows, :].astype(out.dtype)


def _multiply_numbers(
    x: jax.Array,
    matrices: QuantizedArrays,
    layer: jax.Array,
    scheme: Scheme,
    blocks: Blocks | None,
) -> jax.Array:
    num_tokens, inputs = x.shape
    _, groups, outputs = matrices.scales.shape
    tokens, block_inputs, width = blocks or choose_blocks(num_tokens, inputs, outputs, groups)
    num_tiles, last = pl.cdiv(num_tokens, tokens), inputs // block_inputs - 1
    per_block = groups * block_inputs // inputs

    def of_matrix(rows: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, rows, width), lambda o, i, t, layer: (layer[0], i, o))

    def of_result(o: Any, i: Any, t: Any, _: Any) -> Any:
        # A tile of the result is written once: until the last block, it is the first tile.
        return jnp.where(i == last, t, 0), o

    parts = [part for part in matrices[:3] if part is not None]
    rows = [block_inputs, *[per_block] * (len(parts) - 1)]
    kernel = pl.pallas_call(
        partial(_numbers_kernel, weight=scheme.weight),
        name=NUMBERS_NAME,
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


def activation_rows(num_tokens: int, inputs: int) -> int:
    """Return the number of tokens to quantize at once: whole tiles of 8-bit numbers, or all."""
    return min(num_tokens, max(_MAX_VALUES // 8 // inputs // _BYTE_ROWS, 1) * _BYTE_ROWS)


def quantized_activations(
    x: jax.Array, activation: ActivationFormat, scale: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Implement `quantize_activations` in one pass: XLA reads x twice, and packs values slowly."""
    num_tokens, inputs = x.shape
    if scale is not None:
        values, _ = quantize_activations(x, activation, scale)
        return values, stored_scales(x, scale)
    tokens = activation_rows(num_tokens, inputs)

    def kernel(x: Any, values: Any, scales: Any) -> None:
        values[...], scales[...] = quantize_activations(x[...], activation, None)

    found: tuple[jax.Array, jax.Array] = pl.pallas_call(
        kernel,
        name=QUANTIZE_NAME,
        out_shape=(
            jax.ShapeDtypeStruct(x.shape, value_dtype(activation)),
            jax.ShapeDtypeStruct((num_tokens, 1), jnp.float32),
        ),
        grid=(pl.cdiv(num_tokens, tokens),),
        in_specs=[pl.BlockSpec((tokens, inputs), lambda t: (t, 0))],
        out_specs=(
            pl.BlockSpec((tokens, inputs), lambda t: (t, 0)),
            pl.BlockSpec((tokens, 1), lambda t: (t, 0)),
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",), vmem_limit_bytes=VMEM_LIMIT_BYTES
        ),
    )(x)
    return found


def _values_kernel(layer: Any, x: Any, x_scales: Any, values: Any, scales: Any, out: Any) -> None:
    """Multiply activations [tokens, inputs] with values [1, inputs, width], and scale, into out."""
    sums = product(x[...], values[0], (1, 0))
    out[...] = (sums.astype(jnp.float32) * x_scales[...] * scales[0]).astype(out.dtype)


def _multiply_values(
    x: jax.Array, matrices: QuantizedArrays, layer: jax.Array, scheme: Scheme
) -> jax.Array:
    """Multiply in the matrix's format; calls that quantize equal activations merge in a program."""
    assert scheme.activation is not None
    num_tokens, inputs = x.shape
    outputs = matrices.scales.shape[2]
    x_values, x_scales = quantized_activations(x, scheme.activation, matrices.input_scale)
    tokens, _, width = value_blocks(num_tokens, inputs, outputs)
    kernel = pl.pallas_call(
        _values_kernel,
        name=VALUES_NAME,
        out_shape=jax.ShapeDtypeStruct((num_tokens, outputs), x.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(pl.cdiv(outputs, width), pl.cdiv(num_tokens, tokens)),
            in_specs=[
                pl.BlockSpec((tokens, inputs), lambda o, t, layer: (t, 0)),
                pl.BlockSpec((tokens, 1), lambda o, t, layer: (t, 0)),
                pl.BlockSpec((1, inputs, width), lambda o, t, layer: (layer[0], 0, o)),
                pl.BlockSpec((1, 1, width), lambda o, t, layer: (layer[0], 0, o)),
            ],
            out_specs=pl.BlockSpec((tokens, width), lambda o, t, layer: (t, o)),
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT_BYTES
        ),
    )
    result: jax.Array = kernel(
        layer.astype(jnp.int32)[None], x_values, x_scales, matrices.values, matrices.scales
    )
    return result
