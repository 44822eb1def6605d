"""The arrays of quantized matrices, as products take them."""

from typing import NamedTuple

import jax
from jax import lax


class QuantizedArrays(NamedTuple):
    """The arrays of matrices, stacked by layer; one chip's part."""

    values: jax.Array  # [layers, in, out]
    scales: jax.Array  # [layers, groups, out]
    zero_points: jax.Array | None  # as scales
    input_scale: jax.Array | None  # float32 [layers, 1] of activations

    def of_layer(self, layer: jax.Array) -> "QuantizedArrays":
        """One layer's, without the first axis."""
        own: QuantizedArrays = jax.tree.map(
            lambda array: lax.dynamic_index_in_dim(array, layer, keepdims=False), self
        )
        return own
