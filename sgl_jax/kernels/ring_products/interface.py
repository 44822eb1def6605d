"""Products with hidden states that are split over a rank's chips, and the choice of implementation.

Each chip has its own columns of the hidden state, [T, hidden / chips], in the order of the chips.
A product into a layer gathers them, and a product out of it scatters its sums. Both work inside
`jax.shard_map` only.
"""

from typing import NamedTuple, Protocol

import jax

from sgl_jax.core.quantization import ActivationFormat
from sgl_jax.kernels.ring_products.matrices import Finish, RingMatrix
from sgl_jax.kernels.ring_products.xla import xla_gather_multiply, xla_multiply_scatter
from sgl_jax.kernels.tpu_chip import LANES


class GatherMultiply(Protocol):
    """Normalise the hidden states of all chips and multiply them with matrices."""

    def __call__(
        self,
        x: jax.Array,
        norm: jax.Array,
        eps: float,
        matrices: tuple[RingMatrix, ...],
        layer: jax.Array,
        finish: Finish,
        axis: str,
        activation: ActivationFormat | None = None,
    ) -> jax.Array:
        """finish(*(n(x) @ matrix for each matrix)), where n(x) = x / rms(x) * norm.

        Args:
            x: [T, hidden / chips], this chip's columns.
            norm: float32 [hidden], the factors of all columns.
            eps: added to the mean of squares.
            matrices: [hidden, out], of equal shapes; the running layer's are used.
            layer: int32 [].
            finish: see `Finish`.
            axis: the mesh axis of the chips.
            activation: the format that n(x) is quantized to, a scale for each token.

        Returns:
            [T, out] in the dtype of x. Sums are made in float32, or in int32 for products of int8.
        """
        ...


class MultiplyScatter(Protocol):
    """Multiply, add up over the chips, and leave each chip its columns of the sum."""

    def __call__(
        self,
        x: jax.Array,
        matrix: RingMatrix,
        layer: jax.Array,
        residual: jax.Array,
        axis: str,
        activation: ActivationFormat | None = None,
    ) -> jax.Array:
        """This chip's columns of residual + the sum of all chips' x @ matrix.

        Args:
            x: [T, in], this chip's inputs.
            matrix: [in, hidden]; the running layer's is used.
            layer: int32 [].
            residual: [T, hidden / chips], this chip's columns.
            axis: the mesh axis of the chips.
            activation: the format that x is quantized to, a scale for each of this chip's tokens.

        Returns:
            [T, hidden / chips] in the dtype of x. A chip's sums are made in float32, or in int32
            for products of int8, and rounded to that dtype on their way to the next chip.
        """
        ...


class RingProducts(NamedTuple):
    """Both products of one platform."""

    gather_multiply: GatherMultiply
    multiply_scatter: MultiplyScatter
    multiple: int = 1  # that divides a chip's part of each width


XLA_RING_PRODUCTS = RingProducts(xla_gather_multiply, xla_multiply_scatter)


def ring_products_implementation(platform: str, *, simulate: bool = False) -> RingProducts:
    """The implementation for `platform` ("cpu", "gpu", "tpu"): kernels on a TPU, which a CPU
    interprets with `simulate`; XLA elsewhere."""
    if platform == "tpu" or (platform == "cpu" and simulate):
        # Here and not above: without Pallas, its import is not waited for.
        from sgl_jax.kernels.pallas_tpu import simulated
        from sgl_jax.kernels.ring_products.tpu.gather import tpu_gather_multiply
        from sgl_jax.kernels.ring_products.tpu.scatter import tpu_multiply_scatter

        if platform == "tpu":
            return RingProducts(tpu_gather_multiply, tpu_multiply_scatter, LANES)
        both = simulated(tpu_gather_multiply), simulated(tpu_multiply_scatter)
        return RingProducts(*both, LANES)
    return XLA_RING_PRODUCTS
