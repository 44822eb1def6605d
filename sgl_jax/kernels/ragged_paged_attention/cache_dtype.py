"""What the type of the KV cache means to those who write it and to those who read it.

A cache of 8 bits holds what it is given: whoever divides K and V by scales first, so that they use
the range that there is, also multiplies by them afterwards (`layers/kv_scales.py`).
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


def as_cached(x: jax.Array, cache_dtype: DTypeLike) -> jax.Array:
    """K or V as the cache holds it.

    In 8 bits, what is out of range becomes the greatest number there is, where a cast alone would
    make it NaN; and there are no subnormals, so that a kernel may convert by moving bits: what is
    smaller than the smallest normal number, 2^-6, becomes that or zero, whichever is nearer.
    """
    if not is_narrow(cache_dtype):
        return x.astype(cache_dtype)
    info = jnp.finfo(cache_dtype)
    greatest, smallest = float(info.max), float(info.smallest_normal)
    coarse = jnp.round(x / smallest) * smallest
    normal = jnp.where(jnp.abs(x) < smallest, coarse, x)
    return jnp.clip(normal, -greatest, greatest).astype(cache_dtype)


def product_dtype(q_dtype: DTypeLike, cache_dtype: DTypeLike) -> jnp.dtype:
    """The type in which queries meet keys and weights meet values, if not in float32.

    It is the cache's; one of 8 bits is for storage alone, and the queries' type takes its place.
    """
    return jnp.dtype(q_dtype if is_narrow(cache_dtype) else cache_dtype)


def is_narrow(cache_dtype: DTypeLike) -> bool:
    """Whether an element has 8 bits."""
    return jnp.dtype(cache_dtype).itemsize == 1
