"""The product with a quantized matrix."""

from typing import Protocol

import jax

from sgl_jax.core.quantization import Scheme
from sgl_jax.kernels.quantized_matmul.arrays import QuantizedArrays


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
