"""The two axes of every mesh, and the collectives a model needs over them.

All of these work inside `jax.shard_map` only. Over an axis of size 1 they are left out: XLA on the
CPU keeps a collective of one participant, and runs it.
"""

import jax
from jax import lax

DATA_AXIS = "data"  # data-parallel ranks
TENSOR_AXIS = "tensor"  # chips that share one rank's weights


def sum_over_tensor(x: jax.Array) -> jax.Array:
    """The sum of all tensor chips' x, on each of them."""
    if lax.axis_size(TENSOR_AXIS) == 1:
        return x
    result: jax.Array = lax.psum(x, TENSOR_AXIS)
    return result


def concatenate_over_tensor(x: jax.Array, axis: int) -> jax.Array:
    """All tensor chips' x, one after the other along `axis`."""
    if lax.axis_size(TENSOR_AXIS) == 1:
        return x
    result: jax.Array = lax.all_gather(x, TENSOR_AXIS, axis=axis, tiled=True)
    return result


def split_rows_over_tensor(x: jax.Array) -> jax.Array:
    """This tensor chip's share of the rows, of a matrix of which x [n, ...] are its columns.

    All tensor chips' columns come one after the other; their number divides n.
    """
    if lax.axis_size(TENSOR_AXIS) == 1:
        return x
    result: jax.Array = lax.all_to_all(x, TENSOR_AXIS, split_axis=0, concat_axis=1, tiled=True)
    return result


def concatenate_over_data(x: jax.Array, axis: int) -> jax.Array:
    """All data-parallel ranks' x, one after the other along `axis`."""
    if lax.axis_size(DATA_AXIS) == 1:
        return x
    result: jax.Array = lax.all_gather(x, DATA_AXIS, axis=axis, tiled=True)
    return result
