"""The product with a quantized matrix, and the only place that selects its implementation.

Every implementation has the signature of `QuantizedMatmul`.
"""

from typing import Protocol

import jax

from sgl_jax.core.quantization import Scheme
from sgl_jax.kernels.quantized_matmul.arrays import QuantizedArrays
from sgl_jax.kernels.quantized_matmul.xla import cpu_quantized_matmul, xla_quantized_matmul


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


def quantized_matmul_implementation(platform: str, *, simulate: bool = False) -> QuantizedMatmul:
    """Return a platform's implementation; "cpu" with `simulate` interprets the TPU kernels."""
    if platform == "tpu" or (platform == "cpu" and simulate):
        # Imported late: a process without Pallas does not wait for its import.
        from sgl_jax.kernels.pallas_tpu import simulated
        from sgl_jax.kernels.quantized_matmul.tpu import tpu_quantized_matmul

        return tpu_quantized_matmul if platform == "tpu" else simulated(tpu_quantized_matmul)
    return cpu_quantized_matmul if platform == "cpu" else xla_quantized_matmul
