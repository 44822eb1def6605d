"""The two axes of every mesh, a model's collectives over them, and an exchange between hosts.

The collectives work only inside `jax.shard_map`. Over an axis of size 1 they are omitted: XLA on
the CPU keeps a collective of one participant, and runs it.
"""

from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils

from sgl_jax.kernels.row_blocks import row_blocks

DATA_AXIS = "data"  # data-parallel ranks
TENSOR_AXIS = "tensor"  # chips that share one rank's weights
MESH_AXES = (DATA_AXIS, TENSOR_AXIS)

# The axes that split one dimension of an array.
MeshAxes = str | tuple[str, ...] | None


def _exchanged(x: jax.Array, axis: str, exchange: Callable[[jax.Array], Any]) -> jax.Array:
    result: jax.Array = x if lax.axis_size(axis) == 1 else exchange(x)
    return result


def sum_over_tensor(x: jax.Array) -> jax.Array:
    """Sum x over all tensor chips, on each of them; in their order if rows are invariant."""
    # An all-reduce begins at a chip that depends on a number's place in the array. The sum of two
    # chips has the same bits in any order.
    if row_blocks() is not None and lax.axis_size(TENSOR_AXIS) > 2:
        return _ordered_sum(x)
    return _exchanged(x, TENSOR_AXIS, lambda x: lax.psum(x, TENSOR_AXIS))


def _ordered_sum(x: jax.Array) -> jax.Array:
    """Sum x [n, ..., columns] over the tensor chips in their order, in float32 and rounded once.

    Each chip sums its share of the columns, so that as many bytes move as in an all-reduce.
    """
    columns, chips = x.shape[-1], lax.axis_size(TENSOR_AXIS)
    padded = jnp.pad(x, (*[(0, 0)] * (x.ndim - 1), (0, -columns % chips)))
    parts = lax.all_to_all(padded[None], TENSOR_AXIS, x.ndim, 0, tiled=True)
    total = reduce(jnp.add, parts.astype(jnp.float32)).astype(x.dtype)
    return concatenate_over(TENSOR_AXIS, total, axis=x.ndim - 1)[..., :columns]


def concatenate_over(mesh_axis: str, x: jax.Array, axis: int = 0) -> jax.Array:
    """Concatenate the x of all chips along `mesh_axis`, on dimension `axis`."""
    gather = partial(lax.all_gather, axis_name=mesh_axis, axis=axis, tiled=True)
    return _exchanged(x, mesh_axis, gather)


def own_rank_sum(x: jax.Array) -> jax.Array:
    """Return this rank's rows [n, ...] of the sum of all ranks' x [ranks * n, ...]."""
    return _exchanged(x, DATA_AXIS, lambda x: lax.psum_scatter(x, DATA_AXIS, tiled=True))


def split_rows_over_tensor(x: jax.Array) -> jax.Array:
    """Exchange this tensor chip's columns x [n, ...] of a matrix for its share of the rows.

    The matrix has all tensor chips' columns in order; their number divides n.
    """
    exchange = partial(
        lax.all_to_all, axis_name=TENSOR_AXIS, split_axis=0, concat_axis=1, tiled=True
    )
    return _exchanged(x, TENSOR_AXIS, exchange)


def pad_to_shares(x: jax.Array) -> jax.Array:
    """Pad x [n, ...] with lines of zeros to a multiple of the tensor chips."""
    padding = -x.shape[0] % lax.axis_size(TENSOR_AXIS)
    return jnp.pad(x, ((0, padding), *[(0, 0)] * (x.ndim - 1))) if padding else x


def own_share(x: jax.Array) -> jax.Array:
    """Return this tensor chip's ceil(n / chips) lines of x [n, ...], which is equal on all chips.

    Shares are in the order of the chips, with zeros past line n.
    """
    chips = lax.axis_size(TENSOR_AXIS)
    if chips == 1:
        return x
    size = -(-x.shape[0] // chips)
    start = lax.axis_index(TENSOR_AXIS) * size
    share: jax.Array = lax.dynamic_slice_in_dim(pad_to_shares(x), start, size)
    return share


def scatter_sum(x: jax.Array) -> jax.Array:
    """Reduce-scatter the tensor chips' x [n, ...]: each gets its share (`own_share`) of the sum."""

    def exchange(x: jax.Array) -> Any:
        # An axis of the chips: without it the TPU's compiler pads most shares, then moves their
        # rows between neighbours (libtpu 0.0.42).
        shares = pad_to_shares(x).reshape(lax.axis_size(TENSOR_AXIS), -1, *x.shape[1:])
        return lax.psum_scatter(shares, TENSOR_AXIS)

    return _exchanged(x, TENSOR_AXIS, exchange)


def join_shares(share: jax.Array, num_lines: int) -> jax.Array:
    """All-gather the tensor chips' shares (`own_share`) into [num_lines, ...]."""
    return concatenate_over(TENSOR_AXIS, share)[:num_lines]


def any_over_data(flag: jax.Array) -> jax.Array:
    """Return True if flag, bool[], is set on any data-parallel rank."""
    return _exchanged(flag, DATA_AXIS, lambda x: lax.psum(x.astype(jnp.int32), DATA_AXIS) > 0)


def of_each_host(value: int) -> list[int]:
    """Return each host's `value`, in rank order, for decisions that all hosts must take alike. All
    hosts must call this in the same order, outside of compiled programs."""
    if jax.process_count() == 1:
        return [value]
    gathered: list[int] = multihost_utils.process_allgather(np.array(value, np.int32)).tolist()
    return gathered
