"""The two axes of every mesh, and the collectives a model needs over them.

All of these work inside `jax.shard_map` only. Over an axis of size 1 they are left out: XLA on the
CPU keeps a collective of one participant, and runs it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

DATA_AXIS = "data"  # data-parallel ranks
TENSOR_AXIS = "tensor"  # chips that share one rank's weights
MESH_AXES = (DATA_AXIS, TENSOR_AXIS)

# The axes that one dimension of an array is split over.
MeshAxes = str | tuple[str, ...] | None


def _exchanged(x: jax.Array, axis: str, exchange: Callable[[jax.Array], Any]) -> jax.Array:
    result: jax.Array = x if lax.axis_size(axis) == 1 else exchange(x)
    return result


def sum_over_tensor(x: jax.Array) -> jax.Array:
    """The sum of all tensor chips' x, on each of them."""
    return _exchanged(x, TENSOR_AXIS, lambda x: lax.psum(x, TENSOR_AXIS))


def scatter_sum(x: jax.Array) -> jax.Array:
    """This tensor chip's columns of the sum of all tensor chips' x [n, width].

    Columns are in the order of the chips, whose number divides the width.
    """
    exchange = partial(lax.psum_scatter, axis_name=TENSOR_AXIS, scatter_dimension=1, tiled=True)
    return _exchanged(x, TENSOR_AXIS, exchange)


def concatenate_over(mesh_axis: str, x: jax.Array, axis: int = 0) -> jax.Array:
    """The x of all chips along `mesh_axis`, one after the other along `axis`."""
    gather = partial(lax.all_gather, axis_name=mesh_axis, axis=axis, tiled=True)
    return _exchanged(x, mesh_axis, gather)


def own_rank_sum(x: jax.Array) -> jax.Array:
    """This rank's share of the rows of the sum of all ranks' x [ranks * n, ...]: [n, ...]."""
    return _exchanged(x, DATA_AXIS, lambda x: lax.psum_scatter(x, DATA_AXIS, tiled=True))


def split_rows_over_tensor(x: jax.Array) -> jax.Array:
    """This tensor chip's share of the rows of a matrix whose columns x [n, ...] it has.

    All tensor chips' columns come one after the other; their number divides n.
    """
    exchange = partial(
        lax.all_to_all, axis_name=TENSOR_AXIS, split_axis=0, concat_axis=1, tiled=True
    )
    return _exchanged(x, TENSOR_AXIS, exchange)


def pad_to_shares(x: jax.Array) -> jax.Array:
    """x [n, ...] with so many lines of zeros behind it that the tensor chips divide it."""
    padding = -x.shape[0] % lax.axis_size(TENSOR_AXIS)
    return jnp.pad(x, ((0, padding), *[(0, 0)] * (x.ndim - 1))) if padding else x


def own_share(x: jax.Array) -> jax.Array:
    """This tensor chip's share of x [n, ...], which is equal on all of them: ceil(n / chips) lines.

    Shares are in the order of the chips, with zeros past line n.
    """
    chips = lax.axis_size(TENSOR_AXIS)
    if chips == 1:
        return x
    size = -(-x.shape[0] // chips)
    start = lax.axis_index(TENSOR_AXIS) * size
    share: jax.Array = lax.dynamic_slice_in_dim(pad_to_shares(x), start, size)
    return share


def join_shares(share: jax.Array, num_lines: int) -> jax.Array:
    """All-gather the tensor chips' shares (`own_share`) into [num_lines, ...]."""
    return concatenate_over(TENSOR_AXIS, share)[:num_lines]


def any_over_data(flag: jax.Array) -> jax.Array:
    """True if flag, bool[], is set on any data-parallel rank."""
    return _exchanged(flag, DATA_AXIS, lambda x: lax.psum(x.astype(jnp.int32), DATA_AXIS) > 0)
