"""The arrays of latent attention beside its cache."""

from typing import NamedTuple

import jax

from sgl_jax.kernels.tpu_chip import LANES


class LatentQueries(NamedTuple):
    """The queries of one chip's heads: the part without a position, and the rotated part."""

    nope: jax.Array  # [T, heads, nope_dim]
    rope: jax.Array  # [T, heads, rope_dim]


class UpProjections(NamedTuple):
    """The matrices from a latent to each of one chip's heads' keys and values."""

    keys: jax.Array  # [heads, nope_dim, rank]: a key is keys[head] @ latent
    values: jax.Array  # [heads, rank, value_dim]: a value is latent @ values[head]


def latent_row_size(rank: int, rope_dim: int) -> int:
    """Numbers of a token's row in the cache: latent, rotated part of the key, then zeros up to
    whole rows of a TPU's memory. The same on every platform."""
    return -(-(rank + rope_dim) // LANES) * LANES
