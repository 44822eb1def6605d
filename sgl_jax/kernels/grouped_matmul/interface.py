"""The grouped product of mixtures of experts, and the one place that chooses its implementation.

Every implementation has the signature of `GroupedMatmul`.
"""

from functools import partial
from typing import Protocol

import jax

from sgl_jax.kernels.grouped_matmul.xla import blocked_grouped_matmul, ragged_grouped_matmul

__all__ = ["GroupedMatmul", "grouped_matmul_implementation"]


class GroupedMatmul(Protocol):
    """Multiply consecutive groups of lines, each with its own matrix of the running layer."""

    def __call__(
        self,
        lines: jax.Array,
        matrices: jax.Array,
        layer: jax.Array,
        group_sizes: jax.Array,
        *,
        transposed: bool,
    ) -> jax.Array:
        """Multiply with the shapes of one chip.

        Args:
            lines: [n, k], the first group_sizes[0] of the first group, and so on.
            matrices: [layers, groups, k, m]; [layers, groups, m, k] if `transposed`.
            layer: int32 [] which layer's matrices.
            group_sizes: int32 [groups], their sum n.
            transposed: whether matrices are stored as [out, in].

        Returns:
            [n, m] in the dtype of `lines`.
        """
        ...


def grouped_matmul_implementation(platform: str, *, simulate: bool = False) -> GroupedMatmul:
    """The implementation for `platform` ("cpu", "gpu", "tpu").

    A TPU has a kernel that reads the stacked matrices where they lie; with `simulate` a CPU
    interprets it with its DMAs, slowly. Elsewhere XLA multiplies: on a GPU by its own grouped
    product, which on a CPU would multiply every line with every matrix, so that there loops over
    the groups in use take its place.
    """
    if platform == "tpu" or (platform == "cpu" and simulate):
        # Here and not above: without Pallas, its import is not waited for.
        from jax.experimental.pallas import tpu as pltpu

        from sgl_jax.kernels.grouped_matmul.tpu import tpu_grouped_matmul

        if platform == "tpu":
            return tpu_grouped_matmul
        return partial(tpu_grouped_matmul, interpret=pltpu.InterpretParams())
    return blocked_grouped_matmul if platform == "cpu" else ragged_grouped_matmul
