"""The grouped product of XLA: its own, and for a CPU loops over blocks of lines.

The loops' cost follows the lines and groups in use.
"""

import jax
import jax.numpy as jnp
from jax import lax

BLOCK_LINES = 32


def blocked_grouped_matmul(
    lines: jax.Array,
    matrices: jax.Array,
    layer: jax.Array,
    group_sizes: jax.Array,
    *,
    transposed: bool,
) -> jax.Array:
    """See `interface.GroupedMatmul`.

    A block overruns the end of its group. This is harmless: groups are processed in ascending
    order, and later groups overwrite these lines.
    """
    num_lines = lines.shape[0]
    starts = jnp.cumsum(group_sizes) - group_sizes
    padded = jnp.pad(lines, ((0, BLOCK_LINES), (0, 0)))
    contracted = ((1,), (1 if transposed else 0,))

    def group(index: jax.Array, out: jax.Array) -> jax.Array:
        def block(number: jax.Array, out: jax.Array) -> jax.Array:
            start = starts[index] + number * BLOCK_LINES
            some = lax.dynamic_slice_in_dim(padded, start, BLOCK_LINES)
            product = lax.dot_general(some, matrices[layer, index], (contracted, ((), ())))
            return lax.dynamic_update_slice_in_dim(out, product, start, axis=0)

        return lax.fori_loop(0, -(-group_sizes[index] // BLOCK_LINES), block, out)

    width = matrices.shape[2 if transposed else 3]
    out = jnp.zeros((num_lines + BLOCK_LINES, width), lines.dtype)
    return lax.fori_loop(0, matrices.shape[1], group, out)[:num_lines]


def ragged_grouped_matmul(
    lines: jax.Array,
    matrices: jax.Array,
    layer: jax.Array,
    group_sizes: jax.Array,
    *,
    transposed: bool,
) -> jax.Array:
    """See `interface.GroupedMatmul`."""
    own = lax.dynamic_index_in_dim(matrices, layer, keepdims=False)
    contracted = ((1,), (2 if transposed else 1,))
    dimensions = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(contracted, ((), ())),
        lhs_ragged_dimensions=(0,),
        rhs_group_dimensions=(0,),
    )
    return lax.ragged_dot_general(lines, own, group_sizes, dimensions)
