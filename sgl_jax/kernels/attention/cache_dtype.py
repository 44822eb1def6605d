"""The storage of K and V in a KV cache of each type.

A cache of 8 bits is an array of int8 that holds the bits of float8_e4m3fn: a compiler without
arrays of float8 would turn all of the cache into float16, and back, whenever a token is written.

Numbers are stored unscaled: a caller that divides K and V by scales, so that they use the type's
range, also multiplies the result by them (`layers/kv_scales.py`).
"""

from functools import reduce

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

EIGHT_BITS = jnp.dtype(jnp.int8)  # type of the array
FLOAT8 = jnp.dtype(jnp.float8_e4m3fn)  # type of its bits
GREATEST = float(jnp.finfo(FLOAT8).max)  # 448
SMALLEST = float(jnp.finfo(FLOAT8).smallest_normal)  # 2^-6
NAN = 0x7F  # the bits of NaN, always without a sign
_NAME = "fp8_e4m3"


def cache_dtype(name: str) -> jnp.dtype:
    """The dtype of the cache that `name` stands for."""
    return EIGHT_BITS if name == _NAME else jnp.dtype(name)


def cache_dtype_name(dtype: DTypeLike) -> str:
    """The name, in arguments, of a cache of `dtype`."""
    return _NAME if is_narrow(dtype) else jnp.dtype(dtype).name


def is_narrow(dtype: DTypeLike) -> bool:
    """True for a cache of 8 bits."""
    return jnp.dtype(dtype) == EIGHT_BITS


def as_cached(dtype: DTypeLike, *parts: jax.Array) -> list[jax.Array]:
    """Cast the parts of each token, K and V or a latent, to the numbers of a cache of `dtype`.

    Parts have one shape, [T, heads, numbers] or [T, numbers]. A cast to a float of 16 or 32 bits
    keeps NaN and infinities, and makes finite numbers out of its range infinite. In 8 bits, which
    have no infinity:

    - Finite numbers out of range become the greatest one, where a cast alone would make NaN.
    - Subnormal numbers become zero or the smallest normal number, whichever is nearer, so that a
      kernel may convert by moving bits.
    - NaN and infinities become `NAN`, in the same place of every part, so that a kernel finds them
      all in one part.
    """
    if not is_narrow(dtype):
        return [x.astype(dtype) for x in parts]
    is_finite = reduce(jnp.logical_and, map(jnp.isfinite, parts))
    return [jnp.where(is_finite, _in_8_bits(x), jnp.int8(NAN)) for x in parts]


def _in_8_bits(x: jax.Array) -> jax.Array:
    normal = jnp.where(jnp.abs(x) < SMALLEST, jnp.round(x / SMALLEST) * SMALLEST, x)
    numbers = jnp.clip(normal, -GREATEST, GREATEST).astype(FLOAT8)
    return lax.bitcast_convert_type(numbers, EIGHT_BITS)


def is_packed(kv_cache: jax.Array, head_dim: int) -> bool:
    """True if a slot of the cache holds a head's K and V side by side."""
    return kv_cache.shape[4] == 2 * head_dim


def new_slots(k: jax.Array, v: jax.Array, kv_cache: jax.Array) -> jax.Array:
    """k, v [T, kv_heads, head_dim] as slots of the cache: [T, 2 * kv_heads, head_dim], or packed
    [T, kv_heads, 2 * head_dim]."""
    axis = 2 if is_packed(kv_cache, k.shape[2]) else 1
    return jnp.concatenate(as_cached(kv_cache.dtype, k, v), axis=axis)


def as_float32(cached: jax.Array) -> jax.Array:
    """The numbers that a part of the cache holds."""
    if is_narrow(cached.dtype):
        cached = lax.bitcast_convert_type(cached, FLOAT8)
    return cached.astype(jnp.float32)


def product_dtype(q_dtype: DTypeLike, dtype: DTypeLike) -> jnp.dtype:
    """The type in which the TPU's kernels multiply queries with keys, and weights with values.

    It is the cache's; 8 bits are for storage alone, and the queries' type takes their place.
    """
    return jnp.dtype(q_dtype if is_narrow(dtype) else dtype)
