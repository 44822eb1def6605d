"""The two axes of every mesh, and the collectives a model needs over them.

All of these work inside `jax.shard_map` only, and cost nothing over an axis of size 1.
"""

import jax
from jax import lax

DATA_AXIS = "data"  # data-parallel ranks
TENSOR_AXIS = "tensor"  # chips that share one rank's weights


def sum_over_tensor(x: jax.Array) -> jax.Array:
    """The sum of all tensor chips' x, on each of them."""
    result: jax.Array = lax.psum(x, TENSOR_AXIS)
    return result


def concatenate_over_tensor(x: jax.Array, axis: int) -> jax.Array:
    """All tensor chips' x, one after the other along `axis`."""
    result: jax.Array = lax.all_gather(x, TENSOR_AXIS, axis=axis, tiled=True)
    return result


def concatenate_over_data(x: jax.Array, axis: int) -> jax.Array:
    """All data-parallel ranks' x, one after the other along `axis`."""
    result: jax.Array = lax.all_gather(x, DATA_AXIS, axis=axis, tiled=True)
    return result
