"""The grouped product of XLA, for accelerators that are not TPUs."""

import jax
from jax import lax


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
