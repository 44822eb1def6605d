"""Products with quantized matrices in plain XLA."""

import jax
import jax.numpy as jnp
from jax import lax

from sgl_jax.core.layer_configs import Scheme
from sgl_jax.kernels.quantized_matmul.numbers import (
    QuantizedArrays,
    as_numbers,
    as_scales,
    dequantized,
    quantize_activations,
    stored_scales,
    sums_dtype,
)

# Numbers that a CPU converts at once, which stay in its cache; and the fewest inputs of a block,
# since each block adds to all sums.
_CPU_NUMBERS = 3 << 19
_CPU_LEAST_INPUTS = 64


def xla_quantized_matmul(
    x: jax.Array, matrices: QuantizedArrays, layer: jax.Array, scheme: Scheme
) -> jax.Array:
    """Implement `interface.QuantizedMatmul`; with per-output scales, XLA fuses the cast."""
    own = matrices.of_layer(layer)
    if scheme.activation is not None:
        return _quantized_product(x, own, scheme)
    if own.zero_points is None and len(own.scales) == 1:
        sums = _float32_product(x, as_numbers(own.values, scheme.weight, x.dtype))
        return (sums * as_scales(own.scales, jnp.float32)).astype(x.dtype)
    numbers = dequantized(own.values, own.scales, own.zero_points, scheme.weight, x.dtype)
    return _float32_product(x, numbers).astype(x.dtype)


def cpu_quantized_matmul(
    x: jax.Array, matrices: QuantizedArrays, layer: jax.Array, scheme: Scheme
) -> jax.Array:
    """Implement `interface.QuantizedMatmul`, one block of inputs at a time.

    For the whole matrix, XLA on the CPU would write its numbers to memory and read them again.
    """
    own = matrices.of_layer(layer)
    if scheme.activation is not None:
        return _quantized_product(x, own, scheme)
    inputs, groups = x.shape[1], len(own.scales)
    size = _block_inputs(own.values.shape, inputs // groups if groups > 1 else 1)
    own_groups = max(size * groups // inputs, 1)
    scales_sums = groups == 1 and own.zero_points is None  # instead of each number

    def add_block(block: jax.Array, sums: jax.Array) -> jax.Array:
        first = block * own_groups if groups > 1 else 0

        def of_block(part: jax.Array) -> jax.Array:
            return lax.dynamic_slice_in_dim(part, first, own_groups)

        values = lax.dynamic_slice_in_dim(own.values, block * size, size)
        if scales_sums:
            numbers = as_numbers(values, scheme.weight, x.dtype)
        else:
            zero_points = None if own.zero_points is None else of_block(own.zero_points)
            numbers = dequantized(values, of_block(own.scales), zero_points, scheme.weight, x.dtype)
        return sums + _float32_product(lax.dynamic_slice_in_dim(x, block * size, size, 1), numbers)

    zeros = jnp.zeros((len(x), own.values.shape[1]), jnp.float32)
    sums = lax.fori_loop(0, inputs // size, add_block, zeros)
    if scales_sums:
        sums = sums * as_scales(own.scales, jnp.float32)
    return sums.astype(x.dtype)


def _block_inputs(shape: tuple[int, ...], group: int) -> int:
    """Return the inputs, in whole groups, to convert at once: a divisor of `in` of [in, out]."""
    inputs, outputs = shape
    most = max(_CPU_NUMBERS // outputs, _CPU_LEAST_INPUTS, group)
    sizes = range(group, min(most, inputs) + 1, group)
    return max(size for size in sizes if inputs % size == 0)


def _float32_product(x: jax.Array, numbers: jax.Array) -> jax.Array:
    return jnp.matmul(x, numbers, preferred_element_type=jnp.float32)


def _quantized_product(x: jax.Array, own: QuantizedArrays, scheme: Scheme) -> jax.Array:
    assert scheme.activation == scheme.weight
    assert own.zero_points is None
    assert len(own.scales) == 1
    values, scale = quantize_activations(x, scheme.activation, own.input_scale)
    if own.input_scale is not None:
        scale = stored_scales(x, own.input_scale)
    sums = jnp.matmul(values, own.values, preferred_element_type=sums_dtype(values.dtype))
    return (sums.astype(jnp.float32) * scale * own.scales).astype(x.dtype)
