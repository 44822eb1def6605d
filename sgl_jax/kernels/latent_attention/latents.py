"""The queries and matrices of latent attention, and the layout of its cache."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from sgl_jax.kernels.attention.cache_dtype import as_cached
from sgl_jax.kernels.row_blocks import row_wise
from sgl_jax.kernels.tpu_chip import LANES


class LatentQueries(NamedTuple):
    """The queries of one chip's heads: the part without a position, and the rotated part."""

    nope: jax.Array  # [T, heads, nope_dim]
    rope: jax.Array  # [T, heads, rope_dim]


class UpProjections(NamedTuple):
    """The matrices from a latent to the keys and values of each of one chip's heads."""

    keys: jax.Array  # [heads, nope_dim, rank]: a key is keys[head] @ latent
    values: jax.Array  # [heads, rank, value_dim]: a value is latent @ values[head]

    @property
    def rank(self) -> int:
        return self.values.shape[1]


class IndexQueries(NamedTuple):
    """What chooses the tokens that queries attend to (`layers.indexer`), the same on all chips.

    A token's score is the sum over heads of weight * relu(query * key).
    """

    queries: jax.Array  # [T, index_heads, index_dim]
    weights: jax.Array  # float32 [T, index_heads]
    keys: jax.Array  # [T, index_dim] of the same tokens
    top_k: int  # static; tokens that a query attends to, if so many are before it
    shared_over: str | None = None  # static; the mesh axis of chips that share the choice
    is_reused: bool = False  # static; whether later layers attend to the tokens chosen here


class ReusedChoice(NamedTuple):
    """The tokens that an earlier layer's indexer chose for each query of the step."""

    chosen: jax.Array  # int32 [T, top_k], as `chosen.choose` returns them; not read in a dense step
    shared_over: str | None = None  # static; as of the layer that chose

    @property
    def top_k(self) -> int:
        return self.chosen.shape[1]


def latent_row_size(rank: int, rope_dim: int, key_dim: int = 0) -> int:
    """Return the size of a token's row in the cache, the same on every platform.

    A row is the latent, the rotated part of the key, and zeros up to whole rows of a TPU's memory.
    With an indexer its key of `key_dim` follows, also with zeros.
    """
    return sum(-(-size // LANES) * LANES for size in (rank + rope_dim, key_dim))


def cached_rows(
    latents: jax.Array,
    index: IndexQueries | ReusedChoice | None,
    row_size: int,
    dtype: DTypeLike,
) -> jax.Array:
    """Convert latents [T, rank + rope_dim] to rows [T, row_size] of a cache of `dtype`."""
    parts = [latents, index.keys] if isinstance(index, IndexQueries) else [latents]
    padded = [jnp.pad(part, ((0, 0), (0, -part.shape[1] % LANES))) for part in parts]
    rows = jnp.concatenate(padded, axis=1)
    # A layer that reuses a choice has no keys in rows of the same size.
    assert rows.shape[1] == row_size or isinstance(index, ReusedChoice)
    rows = jnp.pad(rows, ((0, 0), (0, row_size - rows.shape[1])))
    return as_cached(dtype, rows)[0]


def absorbed_queries(queries: LatentQueries, up: UpProjections, row_size: int) -> jax.Array:
    """Return [T, heads, row_size] queries to multiply with the cache's rows instead of keys."""
    absorbed = row_wise(lambda nope: jnp.einsum("thn,hnr->thr", nope, up.keys), queries.nope)
    parts = absorbed, queries.rope
    spare = row_size - sum(part.shape[2] for part in parts)
    return jnp.pad(jnp.concatenate(parts, axis=2), ((0, 0), (0, 0), (0, spare)))


def values_of_latents(latents: jax.Array, up: UpProjections) -> jax.Array:
    """Compute [T, heads, value_dim] from weighted sums of cache rows [T, heads, rank or more]."""
    own = latents[:, :, : up.rank]
    values: jax.Array = row_wise(lambda rows: jnp.einsum("thr,hrv->thv", rows, up.values), own)
    return values
