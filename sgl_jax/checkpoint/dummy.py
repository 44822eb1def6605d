"""Random weights in the right shapes and shardings, for trying out sizes without a checkpoint."""

import zlib
from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp

from sgl_jax.layers.parameter import Declaration, Path


def dummy_params(
    declared: Mapping[Path, Declaration], initializer_range: float, seed: int
) -> dict[Path, jax.Array]:
    """Normal weights of standard deviation `initializer_range`, norms that multiply by 1.

    They depend on the seed, the parameter's name and its shape, not on the mesh: each chip makes
    its own part.
    """
    params = {}
    for path, own in declared.items():
        if own.initial != "normal":
            value = 1 if own.initial == "ones" else 0
            params[path] = jnp.full(
                own.array.shape, value, own.array.dtype, device=own.array.sharding
            )
        else:
            name = zlib.crc32("/".join(path).encode())
            key = jax.random.fold_in(jax.random.key(seed), name)
            params[path] = _normal(own.array)(key, jnp.float32(initializer_range))
    return params


def _normal(array: jax.ShapeDtypeStruct) -> jax.stages.Wrapped:
    @partial(jax.jit, out_shardings=array.sharding)
    def make(key: jax.Array, scale: jax.Array) -> jax.Array:
        values = jax.random.normal(key, array.shape, jnp.float32)
        return (scale * values).astype(array.dtype)

    return make
