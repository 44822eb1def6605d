"""How the weights of many equal layers lie in memory, and how the running layer gets its own.

A weight of all layers is one array, stacked on axis 0; the loop over layers slices it. Compilers
for accelerators fuse that slice into the product that reads it. On a CPU it is a copy, made anew
in every step, that costs about as much as the product of a few tokens. There the matrices of each
layer are arrays of their own instead, and a product branches on the layer: the loop's body is
still compiled once.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from sgl_jax.layers.parameter import ParamTree


class SeparateLayers(NamedTuple):
    """The arrays of all layers, and which layer is running."""

    arrays: tuple[jax.Array, ...]
    layer: jax.Array  # int32 []


def separate_matrices(layers: ParamTree) -> None:
    """Replace each stacked matrix by a tuple of arrays, one per layer, in the same sharding.

    Norms and biases, which are small, stay stacked. The tree is changed in place, one weight at a
    time, so that memory never holds all weights twice.
    """
    for name in layers:
        if isinstance(layers[name], dict):
            separate_matrices(layers[name])
        elif layers[name].ndim > 2 and not name.endswith("bias"):
            layers[name] = _cut(layers[name])


def _cut(weight: jax.Array) -> tuple[jax.Array, ...]:
    sharding = weight.sharding
    assert isinstance(sharding, NamedSharding)
    one = NamedSharding(sharding.mesh, P(*sharding.spec[1:]))
    take = jax.jit(partial(lax.dynamic_index_in_dim, keepdims=False), out_shardings=one)
    return tuple(take(weight, jnp.int32(layer)) for layer in range(weight.shape[0]))


def weights_of_layer(layers: Any, layer: jax.Array) -> Any:
    """The weights of one layer, from a tree of stacked arrays and tuples of separate ones."""

    def take(weight: Any) -> Any:
        if isinstance(weight, tuple):
            return SeparateLayers(weight, layer)
        return lax.dynamic_index_in_dim(weight, layer, keepdims=False)

    return jax.tree.map(take, layers, is_leaf=lambda weight: isinstance(weight, tuple))


def use_weight(weight: nnx.Param[Any], use: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """`use` the running layer's array of `weight`, without copying it where it lies apart."""
    value = weight.get_value()
    if isinstance(value, SeparateLayers):
        branches = [lambda array=array: use(array) for array in value.arrays]
        result: jax.Array = lax.switch(value.layer, branches)
        return result
    return use(value)


def project(x: jax.Array, weight: nnx.Param[Any]) -> jax.Array:
    """x [T, in] times weight [in, out] -> [T, out]."""
    return use_weight(weight, lambda matrix: x @ matrix)
