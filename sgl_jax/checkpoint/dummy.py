"""Random weights in the right shapes and shardings, for trying out sizes without a checkpoint."""

import zlib
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from sgl_jax.checkpoint.paths import Path, flatten, unflatten
from sgl_jax.layers.parameter import ParamTree


def dummy_params(
    shapes: ParamTree, shardings: ParamTree, initializer_range: float, seed: int
) -> ParamTree:
    """Normal weights of standard deviation `initializer_range`, norms at 1.

    They depend on the seed, the parameter's name and its shape, not on the mesh: each chip makes
    its own part.
    """
    placed = flatten(shardings)
    params = {}
    for path, declared in flatten(shapes).items():
        if _is_norm(path):
            params[path] = _ones(declared, placed[path])
        else:
            name = zlib.crc32("/".join(path).encode())
            key = jax.random.fold_in(jax.random.key(seed), name)
            params[path] = _normal(declared, placed[path])(key, jnp.float32(initializer_range))
    return unflatten(params)


def _is_norm(path: Path) -> bool:
    return len(path) > 1 and path[-2].endswith("norm")


def _ones(declared: jax.ShapeDtypeStruct, sharding: Sharding) -> jax.Array:
    whole = np.ones(declared.shape, declared.dtype)
    return jax.make_array_from_callback(declared.shape, sharding, lambda index: whole[index])


def _normal(declared: jax.ShapeDtypeStruct, sharding: Sharding) -> jax.stages.Wrapped:
    @partial(jax.jit, out_shardings=sharding)
    def make(key: jax.Array, scale: jax.Array) -> jax.Array:
        values = jax.random.normal(key, declared.shape, jnp.float32)
        return (scale * values).astype(declared.dtype)

    return make
