"""Attention of each query to the tokens that an indexer chooses (arXiv 2512.02556).

Scores of all tokens before a query are computed from their cached keys. Then only the latents of
the chosen tokens are read. Rows that are not longer than `top_k` need no choice: a step with only
such rows is dense. Scores have a kernel for TPU (`index_scores`); the rest is the same everywhere.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from sgl_jax.kernels.attention.batch import MASKED, AttentionBatch, ScoreOptions
from sgl_jax.kernels.attention.cache_dtype import as_float32, product_dtype
from sgl_jax.kernels.attention.key_blocks import BlockTable, VisibleKeys
from sgl_jax.kernels.latent_attention.latents import (
    IndexQueries,
    LatentQueries,
    UpProjections,
    absorbed_queries,
    latent_row_size,
    values_of_latents,
)
from sgl_jax.kernels.tpu_chip import LANES

DECODE_ROWS = 8  # decode rows that are scored together
PREFILL_QUERIES = 16  # queries of a row that read its keys together
SCORED_KEYS = 1024  # of a row, read at once
ATTENDING_TOKENS = 16  # their chosen latents are gathered together


class IndexScores(Protocol):
    """Compute the scores of cached tokens for adjacent queries of some rows."""

    def __call__(
        self,
        queries: jax.Array,
        weights: jax.Array,
        page_table: jax.Array,
        kv_lens: jax.Array,
        kv_cache: jax.Array,
        layer: jax.Array,
    ) -> jax.Array:
        """Score the tokens of G rows.

        Args:
            queries: [G, n, index_heads, index_dim], n queries of each row.
            weights: float32 [G, n, index_heads].
            page_table: int32 [G, W] page ids of the rows.
            kv_lens: int32 [G], tokens of the rows; 0 for rows without queries.
            kv_cache: with the indexer's keys at the end of each row.
            layer: int32 [].

        Returns:
            float32 [G, n, W * page_size or more]; arbitrary after a row's tokens.
        """
        ...


def attend_if_chosen(
    dense: Callable[[], jax.Array],
    queries: LatentQueries,
    up: UpProjections,
    kv_cache: jax.Array,
    layer: jax.Array,
    batch: AttentionBatch,
    scale: float,
    index: IndexQueries | None,
    score: IndexScores,
) -> jax.Array:
    """Attend to chosen tokens if a row of the step has more than `top_k`, else call `dense`.

    Both return [T, heads, value_dim]. The cache has this step's tokens.
    """
    if index is None or batch.page_table.shape[1] * kv_cache.shape[3] <= index.top_k:
        return dense()

    def sparse() -> jax.Array:
        chosen = choose(index, kv_cache, layer, batch, score)
        return attend_to_chosen(queries, up, chosen, kv_cache, layer, batch, scale)

    kv_lens = jnp.where(batch.q_lens > 0, batch.kv_starts + batch.q_lens, 0)
    found: jax.Array = lax.cond(jnp.max(kv_lens) > index.top_k, sparse, dense)
    return found


def choose(
    index: IndexQueries,
    kv_cache: jax.Array,
    layer: jax.Array,
    batch: AttentionBatch,
    score: IndexScores,
) -> jax.Array:
    """Return the positions in its row of the tokens that each query attends to, int32 [T, top_k].

    They are ascending, with -1 after the last. Those of padding are -1. The chips of
    `index.shared_over` read the keys of different decode rows.
    """
    chooser = _Chooser(index, kv_cache, layer, batch, score)
    chosen = jnp.full((len(batch.valid) + PREFILL_QUERIES, index.top_k), -1, jnp.int32)
    chosen = lax.dynamic_update_slice_in_dim(chosen, chooser.of_decode_rows(), 0, axis=0)
    chosen = lax.fori_loop(batch.num_decode, batch.num_rows, chooser.add_prefill_row, chosen)
    return jnp.where(batch.valid[:, None], chosen[: len(batch.valid)], -1)


class _Chooser(NamedTuple):
    """Chooses the tokens that queries of one layer attend to; see `choose`."""

    indexed: IndexQueries
    kv_cache: jax.Array
    layer: jax.Array
    batch: AttentionBatch
    score: IndexScores

    def of_decode_rows(self) -> jax.Array:
        """Return the choice of the first `max_decode_tokens` tokens; -1 for other rows' tokens."""
        batch, axis = self.batch, self.indexed.shared_over
        most, bucket_rows = batch.max_decode_tokens, len(batch.q_lens)
        chips, chip = (lax.axis_size(axis), lax.axis_index(axis)) if axis else (1, 0)
        num_rows = min(DECODE_ROWS, -(-bucket_rows // chips))
        ahead = jnp.arange(1 + batch.max_draft_tokens, dtype=jnp.int32)

        def add_rows(i: jax.Array, chosen: jax.Array) -> jax.Array:
            rows = (i * chips + chip) * num_rows + jnp.arange(num_rows, dtype=jnp.int32)
            is_decode = rows < batch.num_decode
            rows = jnp.minimum(rows, bucket_rows - 1)
            q_lens = jnp.where(is_decode, batch.q_lens[rows], 0)
            # A row with fewer drafts repeats its last query.
            in_row = jnp.minimum(ahead, jnp.maximum(q_lens - 1, 0)[:, None])
            places = batch.q_offsets[rows][:, None] + in_row
            starts = jnp.where(is_decode, batch.kv_starts[rows], 0)
            found = self._choose_for(places, rows, starts, starts + q_lens)
            return chosen.at[jnp.where(is_decode[:, None], places, most)].set(found, mode="drop")

        chosen = jnp.full((most, self.indexed.top_k), -1, jnp.int32)
        chosen = lax.fori_loop(0, -(-batch.num_decode // (num_rows * chips)), add_rows, chosen)
        return lax.pmax(chosen, axis) if chips > 1 else chosen

    def add_prefill_row(self, row: jax.Array, chosen: jax.Array) -> jax.Array:
        """Write the choice of a row's tokens to `chosen` [T + PREFILL_QUERIES, top_k]."""
        batch = self.batch
        start, q_len, offset = batch.kv_starts[row], batch.q_lens[row], batch.q_offsets[row]

        def add_block(i: jax.Array, chosen: jax.Array) -> jax.Array:
            first = i * PREFILL_QUERIES
            places = offset + first + jnp.arange(PREFILL_QUERIES, dtype=jnp.int32)
            rows = row[None], (start + first)[None], (start + q_len)[None]
            found = self._choose_for(places[None], *rows)[0]
            # Results past the row's end are overwritten by the next row, or are of padding.
            return lax.dynamic_update_slice_in_dim(chosen, found, offset + first, axis=0)

        return lax.fori_loop(0, -(-q_len // PREFILL_QUERIES), add_block, chosen)

    def _choose_for(
        self, places: jax.Array, rows: jax.Array, q_starts: jax.Array, kv_lens: jax.Array
    ) -> jax.Array:
        """Return [G, n, top_k] for queries at `places` [G, n] of G rows, first at `q_starts`."""
        queries, weights = self.indexed.queries[places], self.indexed.weights[places]
        pages = self.batch.page_table[rows]
        scores = self.score(queries, weights, pages, kv_lens, self.kv_cache, self.layer)
        sizes = scores.shape[2], q_starts, kv_lens, scores.shape[1]
        keys = VisibleKeys.of(jnp.zeros_like(rows), *sizes, ScoreOptions(1.0))
        return positions_of_greatest(jnp.where(keys.seen, scores, -jnp.inf), self.indexed.top_k)


def xla_index_scores(
    queries: jax.Array,
    weights: jax.Array,
    page_table: jax.Array,
    kv_lens: jax.Array,
    kv_cache: jax.Array,
    layer: jax.Array,
) -> jax.Array:
    """Implement `IndexScores`. A TPU's compiler copies the cache for it: there is a kernel."""
    num_rows, num_queries, _, size = queries.shape
    table = BlockTable.of(page_table, kv_cache.shape[3], SCORED_KEYS)
    block_keys = table.pages_per_block * kv_cache.shape[3]
    first = kv_cache.shape[4] - latent_row_size(size, 0)
    rows = jnp.arange(num_rows, dtype=jnp.int32)

    def key_block(i: jax.Array, scores: jax.Array) -> jax.Array:
        pages = table.pages(rows, jnp.broadcast_to(i, rows.shape))
        keys = kv_cache.at[layer, pages, 0, :, first : first + size].get(mode="promise_in_bounds")
        keys = as_float32(keys).reshape(num_rows, -1, size)
        products = jnp.einsum("gnhd,gkd->gnhk", queries.astype(jnp.float32), keys)
        found = jnp.einsum("gnhk,gnh->gnk", jax.nn.relu(products), weights)
        return lax.dynamic_update_slice_in_dim(scores, found, i * block_keys, axis=2)

    num_blocks = -(-jnp.max(kv_lens) // block_keys)
    scores = jnp.zeros((num_rows, num_queries, table.ids.shape[1] * block_keys))
    return lax.fori_loop(0, num_blocks, key_block, scores)


def positions_of_greatest(scores: jax.Array, k: int) -> jax.Array:
    """Return the positions of the k greatest of scores [..., n], int32 [..., k], ascending.

    The first of equal scores count, and NaN is the greatest. -inf is never chosen: -1 fills the
    places after the last. This is a bisection of the bits of the k-th score, instead of a sort.
    """
    scores = jnp.where(jnp.isnan(scores), jnp.inf, jnp.where(scores == 0, 0.0, scores))
    bits = lax.bitcast_convert_type(scores, jnp.uint32)
    top = jnp.uint32(1 << 31)
    ordered = jnp.where(bits >= top, ~bits, bits | top)  # as the scores

    def next_bit(i: jax.Array, least: jax.Array) -> jax.Array:
        raised = least | (top >> i.astype(jnp.uint32))
        are_enough = jnp.sum(ordered >= raised[..., None], axis=-1, dtype=jnp.int32) >= k
        return jnp.where(are_enough, raised, least)

    least = lax.fori_loop(0, 32, next_bit, jnp.zeros(scores.shape[:-1], jnp.uint32))[..., None]
    above = ordered > least
    num_equal = k - jnp.sum(above, axis=-1, keepdims=True, dtype=jnp.int32)
    equal = ordered == least
    _, before, _ = _ranks(equal)
    is_chosen = (above | (equal & (before < num_equal))) & (scores > -jnp.inf)
    return _positions(is_chosen, k)


def _ranks(mask: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return, of mask [..., n]: counts up to each place of its block of LANES, int32 [..., blocks,
    LANES]; counts before each place, int32 [..., n]; counts up to each block's end."""
    n = mask.shape[-1]
    blocks = jnp.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, -n % LANES)])
    blocks = blocks.reshape(*mask.shape[:-1], -1, LANES)
    # A product: a TPU is slow at sums along lanes.
    is_up_to = jnp.triu(jnp.ones((LANES, LANES), jnp.bfloat16))
    counts = jnp.matmul(
        blocks.astype(jnp.bfloat16), is_up_to, preferred_element_type=jnp.float32
    ).astype(jnp.int32)
    ends = jnp.cumsum(counts[..., -1], axis=-1, dtype=jnp.int32)
    before = counts - blocks + (ends - counts[..., -1])[..., None]
    return counts, before.reshape(*mask.shape[:-1], -1)[..., :n], ends


def _positions(mask: jax.Array, k: int) -> jax.Array:
    """Return the places of up to k True in mask [..., n], int32 [..., k], ascending, then -1."""
    counts, _, ends = _ranks(mask)
    numbers = jnp.arange(k, dtype=jnp.int32)
    block = jnp.sum(ends[..., None, :] <= numbers[:, None], axis=-1, dtype=jnp.int32)
    block = jnp.minimum(block, ends.shape[-1] - 1)
    first = jnp.take_along_axis(ends - counts[..., -1], block, axis=-1)
    in_block = jnp.take_along_axis(counts, block[..., None], axis=-2)
    lane = jnp.sum(in_block <= (numbers - first)[..., None], axis=-1, dtype=jnp.int32)
    return jnp.where(numbers < ends[..., -1:], block * LANES + lane, -1)


def attend_to_chosen(
    queries: LatentQueries,
    up: UpProjections,
    chosen: jax.Array,
    kv_cache: jax.Array,
    layer: jax.Array,
    batch: AttentionBatch,
    scale: float,
) -> jax.Array:
    """Attend to the latents of `chosen` tokens, int32 [T, k], and read no others.

    Returns [T, heads, value_dim]; zeros for padding.
    """
    size = latent_row_size(up.rank, queries.rope.shape[2])
    q = absorbed_queries(queries, up, size)
    spare = -len(q) % ATTENDING_TOKENS
    q, rows, chosen = (
        jnp.pad(x, ((0, spare), *((0, 0) for _ in x.shape[1:])))
        for x in (q, batch.token_rows, chosen)
    )
    dtype = product_dtype(q.dtype, kv_cache.dtype)

    def block(i: jax.Array, out: jax.Array) -> jax.Array:
        first = i * ATTENDING_TOKENS
        own_q, own_rows, places = (
            lax.dynamic_slice_in_dim(x, first, ATTENDING_TOKENS) for x in (q, rows, chosen)
        )
        # The first chosen token is read in place of none.
        read = jnp.maximum(jnp.where(places < 0, places[:, :1], places), 0)
        page_size = kv_cache.shape[3]
        pages = batch.page_table.at[own_rows[:, None], read // page_size]
        slots = pages.get(mode="promise_in_bounds"), 0, read % page_size, slice(0, size)
        cached = kv_cache.at[layer, *slots].get(mode="promise_in_bounds")
        latents = as_float32(cached).astype(dtype)
        scores = jnp.einsum(
            "thd,tkd->thk", own_q.astype(dtype), latents, preferred_element_type=jnp.float32
        )
        scores = jnp.where((places >= 0)[:, None], scores * scale, MASKED)
        shares = jax.nn.softmax(scores, axis=-1).astype(dtype)
        found = jnp.einsum(
            "thk,tkd->thd", shares, latents[..., : up.rank], preferred_element_type=jnp.float32
        )
        return lax.dynamic_update_slice_in_dim(out, found.astype(out.dtype), first, axis=0)

    num_blocks = -(-batch.q_offsets[-1] // ATTENDING_TOKENS)
    out = jnp.zeros((*q.shape[:2], up.rank), q.dtype)
    out = lax.fori_loop(0, num_blocks, block, out)[: len(batch.valid)]
    return values_of_latents(jnp.where(batch.valid[:, None, None], out, 0), up)
