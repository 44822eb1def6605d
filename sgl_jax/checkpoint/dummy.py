"""Random weights in the right shapes and shardings, for trying out sizes without a checkpoint."""

import zlib
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Sharding
from jax.typing import DTypeLike

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
        key = jax.random.fold_in(jax.random.key(seed), zlib.crc32("/".join(path).encode()))
        scale = 0.0 if _is_norm(path) else initializer_range
        offset = 1.0 if _is_norm(path) else 0.0
        make = _maker(declared.shape, declared.dtype, placed[path])
        params[path] = make(key, jnp.float32(scale), jnp.float32(offset))
    return unflatten(params)


def _is_norm(path: Path) -> bool:
    return len(path) > 1 and path[-2].endswith("norm")


def _maker(shape: tuple[int, ...], dtype: DTypeLike, sharding: Sharding) -> "jax.stages.Wrapped":
    @partial(jax.jit, out_shardings=sharding)
    def make(key: jax.Array, scale: jax.Array, offset: jax.Array) -> jax.Array:
        return (offset + scale * jax.random.normal(key, shape, jnp.float32)).astype(dtype)

    return make
