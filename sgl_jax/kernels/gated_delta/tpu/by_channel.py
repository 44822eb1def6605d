"""Decays by channel of a chunk of the gated delta rule, and the products that they weigh.

The decay between two tokens differs between a key's channels, so it cannot be a factor of the
product of a query and a key. A block of tokens is multiplied with the block before it, for sizes of
32, 16 and so on: the decay is then the product of two, after the key's token to the border between
the blocks, and from there on, one a factor of the key and one of the query. Neither exceeds 1, so
that no product overflows. Sums of logs are products with ones, and never differences.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from sgl_jax.kernels.gated_delta.batch import CHUNK_TOKENS
from sgl_jax.kernels.gated_delta.tpu.by_head import NO_DECAY_BELOW
from sgl_jax.kernels.gated_delta.tpu.shared import row_and_column
from sgl_jax.kernels.pallas_tpu import bfloat16_parts, product

_SIZES = [CHUNK_TOKENS >> n for n in range(1, CHUNK_TOKENS.bit_length())]  # of blocks: 32 to 1
_PARTS = 3  # of a float32 in bfloat16


def summed_tokens() -> NDArray[np.float32]:
    """Return which tokens' logs are summed, 0 or 1: [(2 + blocks' sizes) * C, parts * C].

    For each token, those since the chunk began; then those after it to the chunk's end; then, for
    each size of blocks, those since the block began, or for a first block after it to its end.
    """
    row, column = np.arange(CHUNK_TOKENS)[:, None], np.arange(CHUNK_TOKENS)
    which = [column <= row, column > row]
    for size in _SIZES:
        is_same, is_second = row // size == column // size, row // size % 2 == 1
        which.append(is_same & np.where(is_second, column <= row, column > row))
    return np.tile(np.concatenate(which), (1, _PARTS)).astype(np.float32)


class ChannelDecays(NamedTuple):
    """Decays of a head's channels [C, 128], float32."""

    since: jax.Array  # from the chunk's begin to after each token
    until: jax.Array  # after each token to the chunk's end
    of_blocks: list[jax.Array]  # for each size, to or from the border between two blocks

    @classmethod
    def of(cls, log_decay: jax.Array, which: Any) -> "ChannelDecays":
        """Compute from logs [C, 128]; `which` are `summed_tokens`, bfloat16."""
        parts = bfloat16_parts(jnp.maximum(log_decay, NO_DECAY_BELOW), _PARTS)
        logs = product(which[...], jnp.concatenate(parts, axis=0), (1, 0))
        decays = jnp.exp(logs).reshape(-1, CHUNK_TOKENS, logs.shape[1])
        since, until, *of_blocks = (decays[n] for n in range(len(decays)))
        return cls(since, until, of_blocks)


def decayed_products(
    keys: list[jax.Array],
    queries: list[jax.Array],
    decays: list[ChannelDecays],
    dtype: jnp.dtype,
) -> jax.Array:
    """Multiply two heads' keys, then queries, with their keys: float32 [2 * C, 2 * C].

    The heads are side by side. Only numbers up to the diagonals are meaningful.
    """
    row, column = row_and_column((2 * CHUNK_TOKENS, 2 * CHUNK_TOKENS))
    last = CHUNK_TOKENS - 1
    # Two tokens are in adjacent blocks of a size if this is below twice the size, and not below it.
    distance = (row & last) ^ (column & last)
    zeros = jnp.zeros(keys[0].shape, dtype)
    result = None
    for level, size in enumerate([*_SIZES, 0]):
        rows, places = [], []
        for n, (key, query) in enumerate(zip(keys, queries, strict=True)):
            if size:
                decay = decays[n].of_blocks[level]
                key, query = key * decay, query * decay
            key = key.astype(dtype)
            rows.append(jnp.concatenate([key, query.astype(dtype)], axis=0))
            places.append(jnp.concatenate([zeros, key] if n else [key, zeros], axis=1))
        found = product(jnp.concatenate(rows, axis=1), jnp.concatenate(places, axis=0), (1, 1))
        result = found if result is None else jnp.where(distance < max(2 * size, 1), found, result)
    assert result is not None
    return result
