"""The storage of K and V in a KV cache of each dtype.

An 8-bit cache is an int8 array that holds the bits of float8_e4m3fn: a compiler without float8
arrays would convert the whole cache to float16 and back whenever a token is written.
Numbers are stored unscaled: a caller that divides K and V by scales, to use the dtype's range, also
multiplies the result by them (`layers.attention.KVScales`).
"""

from functools import reduce

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

EIGHT_BITS = jnp.dtype(jnp.int8)  # dtype of the array
FLOAT8 = jnp.dtype(jnp.float8_e4m3fn)  # dtype of the bits
GREATEST = float(jnp.finfo(FLOAT8).max)  # 448
SMALLEST = float(jnp.finfo(FLOAT8).smallest_normal)  # 2^-6
NAN = 0x7F  # the bits of NaN, always without the sign bit
_NAME = "fp8_e4m3"


def cache_dtype(name: str) -> jnp.dtype:
    return EIGHT_BITS if name == _NAME else jnp.dtype(name)


def cache_dtype_name(dtype: DTypeLike) -> str:
    """Return the command-line name of a cache of `dtype`."""
    return _NAME if is_narrow(dtype) else jnp.dtype(dtype).name


def is_narrow(dtype: DTypeLike) -> bool:
    return jnp.dtype(dtype) == EIGHT_BITS


def as_cached(dtype: DTypeLike, *parts: jax.Array) -> list[jax.Array]:
    """Cast the parts of each token, K and V or a latent, to the numbers of a cache of `dtype`.

    Parts have one shape, [T, heads, numbers] or [T, numbers]. A cast to a 16-bit or 32-bit float
    keeps NaN and infinities, and turns finite numbers out of its range into infinities. An 8-bit
    cache has no infinity:

    - Finite numbers out of range become the greatest number, where a plain cast would give NaN.
    - Subnormal numbers become zero or the smallest normal number, whichever is nearer, so that a
      kernel may convert by moving bits.
    - NaN and infinities become `NAN`, at the same index of every part, so that a kernel finds all
      of them in one part.
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
    """Return True if a slot of the cache holds a head's K and V side by side."""
    return kv_cache.shape[4] == 2 * head_dim


def new_slots(k: jax.Array, v: jax.Array, kv_cache: jax.Array) -> jax.Array:
    """Join k, v [T, kv_heads, head_dim] to slots [T, 2 * kv_heads, head_dim].

    Slots of a packed cache are [T, kv_heads, 2 * head_dim].
    """
    axis = 2 if is_packed(kv_cache, k.shape[2]) else 1
    return jnp.concatenate(as_cached(kv_cache.dtype, k, v), axis=axis)


def as_float32(cached: jax.Array) -> jax.Array:
    if is_narrow(cached.dtype):
        cached = lax.bitcast_convert_type(cached, FLOAT8)
    return cached.astype(jnp.float32)


def product_dtype(q_dtype: DTypeLike, dtype: DTypeLike) -> jnp.dtype:
    """Return the dtype of the matrix products of the TPU kernels: Q times K, and weights times V.

    It is the cache's dtype, or the queries' dtype for an 8-bit cache: 8 bits are only for storage.
    """
    return jnp.dtype(q_dtype if is_narrow(dtype) else dtype)
