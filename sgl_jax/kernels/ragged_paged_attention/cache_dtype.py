"""What the type of the KV cache means to those who write it and to those who read it.

A cache of 8 bits holds what it is given: whoever divides K and V by scales first, so that they use
the range that there is, also multiplies by them afterwards (`layers/kv_scales.py`).
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


def as_cached(x: jax.Array, cache_dtype: DTypeLike) -> jax.Array:
    """K or V as the cache holds it; in 8 bits, what is out of range becomes the greatest there is.

    A cast alone would make it NaN.
    """
    if not is_narrow(cache_dtype):
        return x.astype(cache_dtype)
    limit = float(jnp.finfo(cache_dtype).max)
    return jnp.clip(x, -limit, limit).astype(cache_dtype)


def product_dtype(q_dtype: DTypeLike, cache_dtype: DTypeLike) -> jnp.dtype:
    """The type in which queries meet keys and weights meet values, if not in float32.

    It is the cache's; one of 8 bits is for storage alone, and the queries' type takes its place.
    """
    return jnp.dtype(q_dtype if is_narrow(cache_dtype) else cache_dtype)


def is_narrow(cache_dtype: DTypeLike) -> bool:
    """Whether an element has 8 bits."""
    return jnp.dtype(cache_dtype).itemsize == 1
