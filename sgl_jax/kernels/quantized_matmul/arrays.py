"""The arrays of quantized matrices, as products take them."""

from typing import NamedTuple

import jax
from jax import lax


class QuantizedArrays(NamedTuple):
    """The arrays of matrices, stacked by layer; one chip's part."""

    values: jax.Array  # [layers, in, out]
    scales: jax.Array  # [layers, groups, out]
    zero_points: jax.Array | None  # as scales
    input_scale: jax.Array | None  # float32 [1], of the running layer's activations

    def of_layer(self, layer: jax.Array) -> "QuantizedArrays":
        """One layer's, without the first axis."""

        def take(array: jax.Array) -> jax.Array:
            own: jax.Array = lax.dynamic_index_in_dim(array, layer, keepdims=False)
            return own

        zero_points = None if self.zero_points is None else take(self.zero_points)
        return self._replace(
            values=take(self.values), scales=take(self.scales), zero_points=zero_points
        )
