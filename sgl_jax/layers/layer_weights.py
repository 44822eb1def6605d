"""The memory layout of equal layers' weights, and a layer's access to its weights.

A weight of all layers is one array, stacked on axis 0, and a layer slices it. Compilers for
accelerators fuse that slice into the product that reads it; a kernel, which they cannot fuse with,
gets the whole stack and the layer's number instead. On a CPU the slice would be a copy in every
step, at about the cost of the product of a few tokens. There the matrices of each layer are
separate arrays instead, and a product branches on the layer: the loop's body is still compiled
once.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from sgl_jax.kernels.row_blocks import bound_to_block
from sgl_jax.layers.mesh_axes import DATA_AXIS, concatenate_over
from sgl_jax.layers.parameter import ParamTree, Path

Result = TypeVar("Result")  # an array, or a tuple of arrays


class StackedLayers(NamedTuple):
    """A matrix of all layers in one array, and the current layer."""

    array: jax.Array  # [layers, ...]
    layer: jax.Array  # int32 []

    def slice(self) -> jax.Array:
        # Bound to a block of rows, or the slice would be copied before the loop over blocks.
        layer = bound_to_block(self.layer)
        own: jax.Array = lax.dynamic_index_in_dim(self.array, layer, keepdims=False)
        return own


class SeparateLayers(NamedTuple):
    """The arrays of all layers, and the current layer."""

    arrays: tuple[jax.Array, ...]
    layer: jax.Array  # int32 []


def separate_matrices(layers: ParamTree) -> None:
    """Replace each stacked matrix by a tuple of arrays, one per layer, in the same sharding.

    Vectors (norms, biases), which are small, stay stacked. The tree is changed in place, one weight
    at a time, so that memory never holds all weights twice.
    """
    for name in layers:
        if isinstance(layers[name], dict):
            separate_matrices(layers[name])
        elif layers[name].ndim > 2:
            layers[name] = _cut(layers[name])


def _cut(weight: jax.Array) -> tuple[jax.Array, ...]:
    one = shape_of_layer(weight).sharding
    take = jax.jit(partial(lax.dynamic_index_in_dim, keepdims=False), out_shardings=one)
    return tuple(take(weight, jnp.int32(layer)) for layer in range(weight.shape[0]))


def shape_of_layer(stacked: jax.Array | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Return the shape and sharding of one layer of a stack."""
    sharding = stacked.sharding
    assert isinstance(sharding, NamedSharding)
    one = NamedSharding(sharding.mesh, P(*sharding.spec[1:]))
    return jax.ShapeDtypeStruct(stacked.shape[1:], stacked.dtype, sharding=one)


def is_separated(path: Path, num_axes: int) -> bool:
    """Return whether `separate_matrices` cuts the parameter at `path`, with so many axes."""
    return path[0] == "layers" and num_axes > 2


def weights_of_layer(layers: Any, layer: jax.Array) -> Any:
    """Return the weights of one layer, from a tree of stacked arrays and tuples of arrays.

    Vectors are arrays; all else is `StackedLayers` or `SeparateLayers`, which `use_weight` and
    `use_stacks` unpack.
    """

    def take(weight: Any) -> Any:
        if isinstance(weight, tuple):
            return SeparateLayers(weight, layer)
        stacked = StackedLayers(weight, layer)
        return stacked if weight.ndim > 2 else stacked.slice()

    return jax.tree.map(take, layers, is_leaf=lambda weight: isinstance(weight, tuple))


def gather_over_data(layer: nnx.Module) -> None:
    """Gather, in place, each parameter of one layer that is split over 'data'.

    The specs belong to the stacked parameters, so they have one axis more than a layer's array.
    """
    for _, param in nnx.to_flat_state(nnx.state(layer)):
        axes = param.spec[1:]
        if DATA_AXIS in axes:
            value = param.get_value()
            own = value.slice() if isinstance(value, StackedLayers) else value
            param.set_value(concatenate_over(DATA_AXIS, own, axes.index(DATA_AXIS)))


def use_weight(weight: nnx.Param[Any], use: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Call `use` with the current layer's array of `weight`; a separate array is not copied."""
    return use_weights((weight,), use)


def use_weights(weights: Sequence[nnx.Param[Any] | None], use: Callable[..., Result]) -> Result:
    """Call `use` with the current layer's arrays of several weights, and None for None."""
    values = [None if weight is None else weight.get_value() for weight in weights]
    separate = [value for value in values if isinstance(value, SeparateLayers)]
    if not separate:
        return use(*map(_own, values))

    def of_layer(layer: int) -> Callable[[], Result]:
        arrays = [
            value.arrays[layer] if isinstance(value, SeparateLayers) else _own(value)
            for value in values
        ]
        return lambda: use(*arrays)

    branches = list(map(of_layer, range(len(separate[0].arrays))))
    result: Result = lax.switch(separate[0].layer, branches)
    return result


def _own(value: Any) -> jax.Array | None:
    return value.slice() if isinstance(value, StackedLayers) else value


def use_stacks(weights: Sequence[nnx.Param[Any] | None], use: Callable[..., Result]) -> Result:
    """Call `use` with stacks [layers, ...] of several weights, and the layer, int32 [].

    The stacks hold all layers, or only the current layer's array. None stays None.
    """
    stacks = [weight.get_value() for weight in weights if weight is not None]
    if all(isinstance(stack, StackedLayers) for stack in stacks):
        arrays = (None if weight is None else weight.get_value().array for weight in weights)
        return use(*arrays, stacks[0].layer)

    def use_arrays(*arrays: jax.Array | None) -> Result:
        return use(*(None if own is None else own[None] for own in arrays), jnp.int32(0))

    return use_weights(weights, use_arrays)
