"""The grouped product that mixtures of experts make, and the choice of who computes it."""

import jax
from jax import lax

from sgl_jax.kernels.grouped_matmul.blocked import blocked_grouped_matmul


def grouped_matmul(lines: jax.Array, matrices: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """Multiply consecutive groups of lines, each with its own matrix.

    Accelerators have a kernel behind `jax.lax.ragged_dot`; on a CPU that multiplies every line
    with every matrix, so loops over the groups in use take its place.

    Args:
        lines: [n, k], the first group_sizes[0] of the first group, and so on.
        matrices: [groups, k, m].
        group_sizes: int32 [groups], their sum n.

    Returns:
        [n, m] in the dtype of `lines`.
    """
    result: jax.Array = lax.platform_dependent(
        lines, matrices, group_sizes, cpu=blocked_grouped_matmul, default=lax.ragged_dot
    )
    return result
