"""The equations of a chunk's value heads, two of them side by side in a row of lanes."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from sgl_jax.kernels.gated_delta.batch import CHUNK_TOKENS
from sgl_jax.kernels.gated_delta.tpu.by_channel import ChannelDecays, decayed_products
from sgl_jax.kernels.gated_delta.tpu.by_head import ChunkByHead
from sgl_jax.kernels.gated_delta.tpu.inverse import SIDE_BY_SIDE
from sgl_jax.kernels.gated_delta.tpu.shared import row_and_column
from sgl_jax.kernels.pallas_tpu import product
from sgl_jax.kernels.tpu_chip import LANES, SUBLANES

NEVER = -1e30  # log of a decay; its exp is zero


class Pair(NamedTuple):
    """The equations of two value heads side by side, float32."""

    heads: tuple[Any, Any]  # their indices
    system: jax.Array  # [C, 2 * C]; only the parts below the diagonals are used
    weights: jax.Array  # [C + 128, 2 * C] of each token for each query, and for the states
    # [2 * C, 128] of each head: its keys, then its queries, for products with the old state; with
    # their decays if these are by channel.
    rows: list[jax.Array]
    decays: list[jax.Array]  # of each head's state over the chunk, [1, 128], by channel [128, 1]


class Vectors(NamedTuple):
    """The vectors of some key heads, float32 [C, 128]."""

    keys: list[jax.Array]
    queries: list[jax.Array]


# Builds the equations of two value heads from the numbers of their vectors. A change is computed as
# if beta were 1, and beta is a factor of its weights: one number for each column, which costs less
# than one for each row.
MakePair = Callable[[tuple[Any, Any], list[int]], Pair]


def head_pairs(by_head: ChunkByHead, vectors: Vectors, dtype: jnp.dtype) -> MakePair:
    """Return a function for value heads that decay as a whole."""
    rows = [
        jnp.concatenate(own, axis=0).astype(dtype)
        for own in zip(vectors.keys, vectors.queries, strict=True)
    ]
    # Each head's rows times its keys, twice.
    similar = [
        product(own, jnp.concatenate([own[:CHUNK_TOKENS]] * SIDE_BY_SIDE, axis=0), (1, 1))
        for own in rows
    ]
    return partial(_head_pair, by_head, vectors.keys, rows, similar)


def _head_pair(
    by_head: ChunkByHead,
    keys: list[jax.Array],
    rows: list[jax.Array],
    similar: list[jax.Array],
    heads: tuple[Any, Any],
    numbers: list[int],
) -> Pair:
    decays, beta = by_head.decays, of_rows(by_head.beta_rows, heads)
    coarse_row, fine_row = (of_rows(x, heads) for x in (decays.coarse_rows, decays.fine_rows))
    coarse, fine = (_beside(*(x[head] for head in heads)) for x in (decays.coarse, decays.fine))
    between = (coarse - coarse_row) + (fine - fine_row)
    end = slice(CHUNK_TOKENS - 1, CHUNK_TOKENS)
    until = jnp.exp((coarse[end] - coarse_row) + (fine[end] - fine_row))
    # A later token has no weight: its exponent is masked.
    decay = jnp.exp(jnp.where(seen(), between, NEVER)) * beta
    left, right = (similar[n] for n in numbers)
    both = left if left is right else _beside(left, right)
    turned = jnp.concatenate([keys[n] for n in numbers], axis=0).T
    weights = jnp.concatenate([both[CHUNK_TOKENS:] * decay, turned * (until * beta)], axis=0)
    over = [decays.since(head, end) for head in heads]
    return Pair(heads, both[:CHUNK_TOKENS] * decay, weights, [rows[n] for n in numbers], over)


def channel_pairs(by_head: ChunkByHead, which: Any, vectors: Vectors, dtype: jnp.dtype) -> MakePair:
    """Return a function for value heads whose channels decay; `which` are `summed_tokens`."""
    return partial(_channel_pair, by_head, which, vectors, dtype)


def _channel_pair(
    by_head: ChunkByHead,
    which: Any,
    vectors: Vectors,
    dtype: jnp.dtype,
    heads: tuple[Any, Any],
    numbers: list[int],
) -> Pair:
    beta = of_rows(by_head.beta_rows, heads)
    keys, queries = ([x[n] for n in numbers] for x in vectors)
    decays = [ChannelDecays.of(by_head.decays[head], which) for head in heads]
    both = decayed_products(keys, queries, decays, dtype)
    turned = jnp.concatenate([key * own.until for key, own in zip(keys, decays, strict=True)]).T
    of_queries = jnp.where(seen(), both[CHUNK_TOKENS:], 0)
    weights = jnp.concatenate([of_queries * beta, turned * beta], axis=0)
    rows = [
        jnp.concatenate([key * own.since, query * own.since], axis=0).astype(dtype)
        for key, query, own in zip(keys, queries, decays, strict=True)
    ]
    over = [own.since[CHUNK_TOKENS - SUBLANES :].T[:, SUBLANES - 1 :] for own in decays]
    return Pair(heads, both[:CHUNK_TOKENS] * beta, weights, rows, over)


def _beside(left: jax.Array, right: jax.Array) -> jax.Array:
    """Return the left half of one array's lanes and the right half of the other's."""
    return jnp.where(row_and_column(left.shape)[1] < CHUNK_TOKENS, left, right)


def of_rows(array: Any, heads: tuple[Any, Any]) -> jax.Array:
    return _beside(*(array[pl.ds(head, 1)] for head in heads))


def seen() -> jax.Array:
    """Return whether a row's token sees a column's, of two heads side by side: [C, 2 * C]."""
    row, column = row_and_column((CHUNK_TOKENS, LANES))
    return _is_seen(row, column & (CHUNK_TOKENS - 1))


def _is_seen(row: jax.Array, column: jax.Array) -> jax.Array:
    return column <= row
