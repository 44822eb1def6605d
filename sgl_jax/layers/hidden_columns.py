"""Linear layers with each chip of a rank holding columns of the hidden states.

A chip has [T, hidden / chips] between a layer's products. Each product exchanges hidden states
while it runs (`kernels.ring_products`), and norms are computed within the product after them.
"""

from collections.abc import Sequence

import jax
from flax import nnx

from sgl_jax.core.quantization import ActivationFormat
from sgl_jax.kernels.ring_products.interface import RingProducts
from sgl_jax.kernels.ring_products.matrices import Finish, RingMatrix
from sgl_jax.layers.layer_weights import use_stacks
from sgl_jax.layers.linear import Linear
from sgl_jax.layers.mesh_axes import TENSOR_AXIS
from sgl_jax.layers.norm import RMSNorm
from sgl_jax.layers.quantized_matrix import QuantizedMatrix


def are_supported(linears: Sequence[Linear], num_chips: int, multiple: int) -> bool:
    """True for matrices of one format that `_is_supported`: they are multiplied at once."""
    formats = {
        own.weight.scheme if isinstance(own.weight, QuantizedMatrix) else None for own in linears
    }
    return len(formats) == 1 and all(_is_supported(own, num_chips, multiple) for own in linears)


def _is_supported(linear: Linear, num_chips: int, multiple: int) -> bool:
    """True for floats, and for 8-bit weights with a scale for each output alone, whose part on one
    of `num_chips` has widths that `multiple` divides.

    Activations may be quantized with a scale for each token: one that is stored with each matrix
    would need hidden states once for each.
    """
    own, shape = linear.weight, arrays_of(linear)[0].get_value().shape[-2:]
    if isinstance(own, QuantizedMatrix):
        scheme = own.scheme
        has_more = scheme.has_zero_points or scheme.has_input_order or scheme.has_input_scale
        if scheme.weight not in ("int8", "fp8") or scheme.group_size or has_more:
            return False
    return all(size % (num_chips * multiple) == 0 for size in shape)


def gather_multiply(
    ring: RingProducts, x: jax.Array, norm: RMSNorm, linears: Sequence[Linear], finish: Finish
) -> jax.Array:
    """See `GatherMultiply`; `norm` normalises the hidden states, x is this chip's columns."""
    each, activation = len(arrays_of(linears[0])), activation_of(linears[0])

    def multiply(*arrays: jax.Array) -> jax.Array:
        *rest, layer = arrays
        matrices = tuple(RingMatrix(*rest[i : i + each]) for i in range(0, len(rest), each))
        return ring.gather_multiply(
            x, norm.factors, norm.eps, matrices, layer, finish, TENSOR_AXIS, activation
        )

    return use_stacks([array for own in linears for array in arrays_of(own)], multiply)


def multiply_scatter(
    ring: RingProducts, x: jax.Array, linear: Linear, residual: jax.Array
) -> jax.Array:
    """See `MultiplyScatter`."""

    def multiply(*arrays: jax.Array) -> jax.Array:
        *rest, layer = arrays
        matrix = RingMatrix(*rest)
        return ring.multiply_scatter(x, matrix, layer, residual, TENSOR_AXIS, activation_of(linear))

    return use_stacks(arrays_of(linear), multiply)


def activation_of(linear: Linear) -> ActivationFormat | None:
    """The format that a matrix's inputs are quantized to."""
    own = linear.weight
    return own.scheme.activation if isinstance(own, QuantizedMatrix) else None


def arrays_of(linear: Linear) -> list[nnx.Param[jax.Array]]:
    """The values of a supported matrix, and the scales of 8-bit ones."""
    own = linear.weight
    return [own.values, own.scales] if isinstance(own, QuantizedMatrix) else [own]
