"""The product with a quantized matrix."""

from typing import NamedTuple, Protocol

import jax
from jax import lax

from sgl_jax.core.layer_configs import Scheme


class QuantizedArrays(NamedTuple):
    """One chip's part of the arrays of matrices, stacked by layer."""

    values: jax.Array  # [layers, in, out]
    scales: jax.Array  # [layers, groups, out]
    zero_points: jax.Array | None  # same shape as scales
    input_scale: jax.Array | None  # float32 [1], of the current layer's activations

    def of_layer(self, layer: jax.Array) -> "QuantizedArrays":
        """Return one layer's arrays, without the first axis."""
        stacks = self._replace(input_scale=None)
        own = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, layer, keepdims=False), stacks)
        of_layer: QuantizedArrays = own._replace(input_scale=self.input_scale)
        return of_layer


class QuantizedMatmul(Protocol):
    """Multiply activations with the current layer's matrix."""

    def __call__(
        self, x: jax.Array, matrices: QuantizedArrays, layer: jax.Array, scheme: Scheme
    ) -> jax.Array:
        """Multiply with the shapes of one chip.

        Args:
            x: [T, in].
            matrices: the matrices of all layers.
            layer: int32 [], the layer's index in the matrices.
            scheme: the matrix's format.

        Returns:
            [T, out] in the dtype of x; summed in float32, or in int32 for products of int8.
        """
        ...
