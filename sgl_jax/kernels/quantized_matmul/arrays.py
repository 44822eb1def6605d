"""The arrays of quantized matrices, the inputs of their products."""

from typing import NamedTuple

import jax
from jax import lax


class QuantizedArrays(NamedTuple):
    """One chip's part of the arrays of matrices, stacked by layer."""

    values: jax.Array  # [layers, in, out]
    scales: jax.Array  # [layers, groups, out]
    zero_points: jax.Array | None  # same shape as scales
    input_scale: jax.Array | None  # float32 [1], of the current layer's activations

    def of_layer(self, layer: jax.Array) -> "QuantizedArrays":
        """Return one layer's arrays, without the first axis."""

        def take(array: jax.Array) -> jax.Array:
            own: jax.Array = lax.dynamic_index_in_dim(array, layer, keepdims=False)
            return own

        zero_points = None if self.zero_points is None else take(self.zero_points)
        return self._replace(
            values=take(self.values), scales=take(self.scales), zero_points=zero_points
        )
