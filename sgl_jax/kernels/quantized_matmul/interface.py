"""The product with a quantized matrix, and the one place that chooses its implementation.

Every implementation has the signature of `QuantizedMatmul`.
"""

from typing import Protocol

import jax

from sgl_jax.core.quantization import Scheme
from sgl_jax.kernels.quantized_matmul.arrays import QuantizedArrays
from sgl_jax.kernels.quantized_matmul.xla import cpu_quantized_matmul, xla_quantized_matmul


class QuantizedMatmul(Protocol):
    """Multiply activations with the running layer's matrix."""

    def __call__(
        self, x: jax.Array, matrices: QuantizedArrays, layer: jax.Array, scheme: Scheme
    ) -> jax.Array:
        """Multiply with the shapes of one chip.

        Args:
            x: [T, in].
            matrices: of all layers.
            layer: int32 [] which layer's matrix.
            scheme: of the matrix.

        Returns:
            [T, out] in the dtype of x; sums are made in float32, or in int32 for products of int8.
        """
        ...


def quantized_matmul_implementation(platform: str, *, simulate: bool = False) -> QuantizedMatmul:
    """The implementation for `platform` ("cpu", "gpu", "tpu").

    A TPU has a kernel for scales of groups; with `simulate` a CPU interprets it, slowly.
    """
    if platform == "tpu" or (platform == "cpu" and simulate):
        # Here and not above: without Pallas, its import is not waited for.
        from sgl_jax.kernels.pallas_tpu import simulated
        from sgl_jax.kernels.quantized_matmul.tpu import tpu_quantized_matmul

        return tpu_quantized_matmul if platform == "tpu" else simulated(tpu_quantized_matmul)
    return cpu_quantized_matmul if platform == "cpu" else xla_quantized_matmul
