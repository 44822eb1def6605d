"""Products with quantized matrices as XLA makes them."""

import jax
import jax.numpy as jnp
from jax import lax

from sgl_jax.core.quantization import Scheme
from sgl_jax.kernels.quantized_matmul.arrays import QuantizedArrays
from sgl_jax.kernels.quantized_matmul.numbers import (
    as_numbers,
    as_scales,
    dequantized,
    quantize_activations,
)

# Inputs that a CPU converts at once: their numbers stay in its cache until they are multiplied.
_CPU_BLOCK_INPUTS = 128


def xla_quantized_matmul(
    x: jax.Array, matrices: QuantizedArrays, layer: jax.Array, scheme: Scheme
) -> jax.Array:
    """See `interface.QuantizedMatmul`; with a scale for each output XLA converts in the product."""
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
    """See `interface.QuantizedMatmul`.

    A block of inputs at a time, since XLA on the CPU would write the whole matrix's numbers to
    memory and read them again.
    """
    own = matrices.of_layer(layer)
    if scheme.activation is not None:
        return _quantized_product(x, own, scheme)
    inputs, groups = x.shape[1], len(own.scales)
    size = inputs // groups if groups > 1 else _CPU_BLOCK_INPUTS
    if inputs % size:
        return xla_quantized_matmul(x, matrices, layer, scheme)

    def add_block(block: jax.Array, sums: jax.Array) -> jax.Array:
        values = lax.dynamic_slice_in_dim(own.values, block * size, size)
        numbers = as_numbers(values, scheme.weight, x.dtype)
        if own.zero_points is not None:
            group = block if groups > 1 else 0
            numbers = numbers - own.zero_points[group].astype(x.dtype)
        product = _float32_product(lax.dynamic_slice_in_dim(x, block * size, size, 1), numbers)
        if groups > 1:
            product = product * as_scales(own.scales[block], jnp.float32)
        return sums + product

    zeros = jnp.zeros((len(x), own.values.shape[1]), jnp.float32)
    sums = lax.fori_loop(0, inputs // size, add_block, zeros)
    if groups == 1:
        sums = sums * as_scales(own.scales, jnp.float32)
    return sums.astype(x.dtype)


def _float32_product(x: jax.Array, numbers: jax.Array) -> jax.Array:
    return jnp.matmul(x, numbers, preferred_element_type=jnp.float32)


def _quantized_product(x: jax.Array, own: QuantizedArrays, scheme: Scheme) -> jax.Array:
    """The product in the format of both, then scaled."""
    assert scheme.activation == scheme.weight
    assert own.zero_points is None
    assert len(own.scales) == 1
    values, scale = quantize_activations(x, scheme.activation, own.input_scale)
    sums_dtype = jnp.int32 if scheme.activation == "int8" else jnp.float32
    sums = jnp.matmul(values, own.values, preferred_element_type=sums_dtype)
    return (sums.astype(jnp.float32) * scale * own.scales).astype(x.dtype)
