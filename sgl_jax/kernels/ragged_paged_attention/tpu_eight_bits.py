"""How the TPU's kernels read keys and values of an 8-bit cache.

Chips that know no float8 convert it in more instructions than the rest of decode's loop has. But
its sign, 4 bits of exponent and 3 of mantissa are in their places in a bfloat16 once they are moved
there; only the exponent's bias differs, so every number comes out 2^-120 times too small, which the
products make good. That is exact for all but subnormals, which the cache does not hold
(`cache_dtype.as_cached`). NaN comes out as a number.

Four elements lie in a word, in the order of keys, and two of a bfloat16. The even keys of a block
are taken first, then the odd ones: in which order keys are met is all the same to attention.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from sgl_jax.kernels.ragged_paged_attention.cache_dtype import FLOAT8, is_narrow
from sgl_jax.kernels.tpu_chip import converts_float8

# What keys and values lack, in two halves: what they meet is multiplied by one beforehand, lest
# small products are lost, and the products by the other.
HALF_BIAS = 2.0**60

_SIGNS = -0x7FFF8000  # bits 31 and 15
_NUMBERS = 0x07F007F0


def should_move_bits(cache_dtype: jnp.dtype, dtype: jnp.dtype) -> bool:
    """Whether `even_then_odd` is the way to read a cache for products of `dtype`."""
    return is_narrow(cache_dtype) and dtype == jnp.bfloat16 and not converts_float8()


def even_then_odd(cached: jax.Array) -> jax.Array:
    """A part [keys, lanes] of an 8-bit cache in bfloat16, times 2^-120: even keys, then odd."""
    words = pltpu.bitcast(cached, jnp.int32)
    even = ((words << 8) & _SIGNS) | ((words << 4) & _NUMBERS)
    odd = (words & _SIGNS) | ((words >> 4) & _NUMBERS)
    return jnp.concatenate([pltpu.bitcast(half, jnp.bfloat16) for half in (even, odd)], axis=0)


def positions(tile: tuple[int, int]) -> jax.Array:
    """int32 [rows, keys]: which key each column is, in the order of `even_then_odd`."""
    column, half = lax.broadcasted_iota(jnp.int32, tile, 1), tile[1] // 2
    return 2 * column - jnp.where(column < half, 0, tile[1] - 1)


def converted(cached: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """A part [keys, lanes] of a cache of any type in `dtype`, as the chip or its compiler does."""
    return (pltpu.bitcast(cached, FLOAT8) if is_narrow(cached.dtype) else cached).astype(dtype)
