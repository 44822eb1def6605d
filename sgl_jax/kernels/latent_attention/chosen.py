"""Attention of each query to the tokens that an indexer chooses (arXiv 2512.02556).

Scores of all tokens before a query are computed from their cached keys. Then only the latents of
the chosen tokens are read. Rows that are not longer than `top_k` need no choice: a step with only
such rows is dense. Scores and the choice have kernels for TPU (`index_scores`, `choice`); the rest
is the same everywhere. The chips of a rank share the rows of decode: each chooses for some of them,
and attends with all heads, whose queries and results the chips exchange.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from sgl_jax.kernels.attention.batch import AttentionBatch, ScoreOptions
from sgl_jax.kernels.attention.key_blocks import VisibleKeys
from sgl_jax.kernels.latent_attention.latents import (
    IndexQueries,
    LatentQueries,
    ReusedChoice,
    UpProjections,
    absorbed_queries,
    latent_row_size,
    values_of_latents,
)

DECODE_ROWS = 8  # decode rows that are scored together
PREFILL_QUERIES = 16  # queries of a row that read its keys together
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


class AttendGathered(Protocol):
    """Attend to latents that were gathered for each query."""

    def __call__(
        self, q: jax.Array, latents: jax.Array, num_chosen: jax.Array, rank: int, scale: float
    ) -> jax.Array:
        """Return weighted sums of latents, [n, heads, rank].

        Args:
            q: absorbed queries [n, heads, size].
            latents: rows of the cache [n, k, row_size], with the latent in front.
            num_chosen: int32 [n], how many of the k a query attends to; if 0, the result is finite.
            rank: size of a latent.
            scale: factor for the products.
        """
        ...


class ChoiceKernels(NamedTuple):
    """Implementations of the operations of an indexer."""

    score: IndexScores
    # The positions of the k greatest of scores, see `chosen_xla`.
    find_greatest: Callable[[jax.Array, int], jax.Array]
    attend: AttendGathered


def attend_if_chosen(
    dense: Callable[[], jax.Array],
    queries: LatentQueries,
    up: UpProjections,
    kv_cache: jax.Array,
    layer: jax.Array,
    batch: AttentionBatch,
    scale: float,
    index: IndexQueries | ReusedChoice | None,
    kernels: ChoiceKernels,
) -> tuple[jax.Array, jax.Array | None]:
    """Attend to chosen tokens if a row of the step has more than `top_k`, else call `dense`.

    Both attend with [T, heads, value_dim] as the result. The cache has this step's tokens. The
    choice is also returned if later layers reuse it and a step may need it: zeros of a dense step.
    """
    if index is None or batch.page_table.shape[1] * kv_cache.shape[3] <= index.top_k:
        return dense(), None
    is_reused = isinstance(index, IndexQueries) and index.is_reused

    def sparse() -> tuple[jax.Array, jax.Array | None]:
        if isinstance(index, IndexQueries):
            chosen = choose(index, kv_cache, layer, batch, kernels)
        else:
            chosen = index.chosen
        shared = kv_cache, layer, batch, scale, kernels, index.shared_over
        found = attend_to_chosen(queries, up, chosen, *shared)
        return found, chosen if is_reused else None

    def attend_to_all() -> tuple[jax.Array, jax.Array | None]:
        none = jnp.zeros((len(batch.valid), index.top_k), jnp.int32)
        return dense(), none if is_reused else None

    kv_lens = jnp.where(batch.q_lens > 0, batch.kv_starts + batch.q_lens, 0)
    # Ranks may differ: only the chips of one exchange values, and these have the same rows.
    found: tuple[jax.Array, jax.Array | None]
    found = lax.cond(jnp.max(kv_lens) > index.top_k, sparse, attend_to_all)
    return found


def choose(
    index: IndexQueries,
    kv_cache: jax.Array,
    layer: jax.Array,
    batch: AttentionBatch,
    kernels: ChoiceKernels,
) -> jax.Array:
    """Return the positions in its row of the tokens that each query attends to, int32 [T, top_k].

    They are ascending, with -1 after the last. Those of padding are -1, as are those of decode rows
    of the other chips of `index.shared_over`, see `_SharedRows`.
    """
    chooser = Chooser(index, kv_cache, layer, batch, kernels)
    chosen = jnp.full((len(batch.valid) + PREFILL_QUERIES, index.top_k), -1, jnp.int32)
    chosen = lax.dynamic_update_slice_in_dim(chosen, chooser.of_decode_rows(), 0, axis=0)
    chosen = lax.fori_loop(batch.num_decode, batch.num_rows, chooser.add_prefill_row, chosen)
    return jnp.where(batch.valid[:, None], chosen[: len(batch.valid)], -1)


class _SharedRows(NamedTuple):
    """The decode rows of each chip of a rank: every n-th, so that all have equally many."""

    batch: AttentionBatch
    chips: int
    chip: jax.Array | int

    @classmethod
    def of(cls, batch: AttentionBatch, axis: str | None) -> "_SharedRows":
        if axis is None:
            return cls(batch, 1, 0)
        return cls(batch, lax.axis_size(axis), lax.axis_index(axis))

    @property
    def most(self) -> int:
        """Return the number of rows of a chip that a step has room for."""
        return -(-len(self.batch.q_lens) // self.chips)

    @property
    def num_own(self) -> jax.Array:
        return -(-(self.batch.num_decode - self.chip) // self.chips)

    def places(self, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the tokens of rows [...], int32 [..., 1 + drafts], and which rows decode.

        A row with fewer drafts repeats its last token.
        """
        batch = self.batch
        is_decode = rows < batch.num_decode
        own = jnp.where(is_decode, rows, 0)
        ahead = jnp.arange(1 + batch.max_draft_tokens, dtype=jnp.int32)
        last = jnp.maximum(batch.q_lens[own] - 1, 0)[..., None]
        return batch.q_offsets[own][..., None] + jnp.minimum(ahead, last), is_decode


class Chooser(NamedTuple):
    """Chooses the tokens that queries of one layer attend to; see `choose`."""

    indexed: IndexQueries
    kv_cache: jax.Array
    layer: jax.Array
    batch: AttentionBatch
    kernels: ChoiceKernels

    def of_decode_rows(self) -> jax.Array:
        """Return the choice of the first `max_decode_tokens` tokens; -1 for other rows' tokens."""
        batch = self.batch
        shared = _SharedRows.of(batch, self.indexed.shared_over)
        most, num_rows = batch.max_decode_tokens, min(DECODE_ROWS, shared.most)

        def add_rows(i: jax.Array, chosen: jax.Array) -> jax.Array:
            rows = (i * num_rows + jnp.arange(num_rows, dtype=jnp.int32)) * shared.chips
            rows += shared.chip
            places, is_decode = shared.places(rows)
            rows = jnp.where(is_decode, rows, 0)
            starts = jnp.where(is_decode, batch.kv_starts[rows], 0)
            lens = starts + jnp.where(is_decode, batch.q_lens[rows], 0)
            found = self._choose_for(places, rows, starts, lens)
            return chosen.at[jnp.where(is_decode[:, None], places, most)].set(found, mode="drop")

        chosen = jnp.full((most, self.indexed.top_k), -1, jnp.int32)
        return lax.fori_loop(0, -(-shared.num_own // num_rows), add_rows, chosen)

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
        scores = self.kernels.score(queries, weights, pages, kv_lens, self.kv_cache, self.layer)
        sizes = scores.shape[2], q_starts, kv_lens, scores.shape[1]
        keys = VisibleKeys.of(jnp.zeros_like(rows), *sizes, ScoreOptions(1.0))
        # Flat: one query of each row would fill an eighth of a TPU's registers.
        flat = -1, scores.shape[2]
        scores = jnp.where(keys.seen.reshape(flat), scores.reshape(flat), -jnp.inf)
        found = self.kernels.find_greatest(scores, self.indexed.top_k)
        return found.reshape(*places.shape, -1)


def attend_to_chosen(
    queries: LatentQueries,
    up: UpProjections,
    chosen: jax.Array,
    kv_cache: jax.Array,
    layer: jax.Array,
    batch: AttentionBatch,
    scale: float,
    kernels: ChoiceKernels,
    shared_over: str | None,
) -> jax.Array:
    """Attend to the latents of `chosen` tokens, int32 [T, k], and read no others.

    The chips of `shared_over` attend with some of the heads each, but in decode for some of the
    rows, as in `choose`. Returns [T, heads, value_dim]; zeros for padding.
    """
    size = latent_row_size(up.rank, queries.rope.shape[2])
    q = absorbed_queries(queries, up, size)
    attend = ChosenLatents(up.rank, kv_cache, layer, batch, scale, kernels)
    shared, first = _SharedRows.of(batch, shared_over), jnp.int32(0)
    decoded, places = jnp.zeros((0, q.shape[1], up.rank), q.dtype), jnp.zeros(0, jnp.int32)
    if shared_over is not None and shared.chips > 1:
        # By chip: those of its rows, also past the last of them.
        rows = jnp.arange(shared.most * shared.chips, dtype=jnp.int32)
        rows = rows.reshape(-1, shared.chips).T.reshape(-1)
        places, is_decode = shared.places(rows)
        sent = q[places.reshape(-1)]
        own_q = lax.all_to_all(sent, shared_over, split_axis=0, concat_axis=1, tiled=True)
        own_rows = jnp.arange(shared.most, dtype=jnp.int32) * shared.chips + shared.chip
        own, is_own = shared.places(own_rows)
        width = own.shape[1]
        # The chips have room for more rows than the step, if it has not equally many for each.
        rows = jnp.repeat(jnp.where(is_own, own_rows, 0), width)
        of_tokens = rows, chosen[own.reshape(-1)]
        found = attend(own_q, *of_tokens, jnp.int32(0), shared.num_own * width)
        decoded = lax.all_to_all(found, shared_over, split_axis=1, concat_axis=0, tiled=True)
        places = jnp.where(is_decode[:, None], places, len(q)).reshape(-1)
        first = batch.q_offsets[batch.num_decode]
    out = attend(q, batch.token_rows, chosen, first, batch.q_offsets[-1])
    out = out.at[places].set(decoded, mode="drop")
    return values_of_latents(jnp.where(batch.valid[:, None, None], out, 0), up)


class ChosenLatents(NamedTuple):
    """The latents of one layer, of which queries attend to chosen ones."""

    rank: int
    kv_cache: jax.Array
    layer: jax.Array
    batch: AttentionBatch
    scale: float
    kernels: ChoiceKernels

    def __call__(
        self, q: jax.Array, rows: jax.Array, chosen: jax.Array, first: jax.Array, end: jax.Array
    ) -> jax.Array:
        """Return weighted sums of latents [n, heads, rank] for the queries from `first` to `end`.

        Args:
            q: absorbed queries [n, heads, size], of `rows` [n].
            chosen: int32 [n, k].
            first: int32 [], the first query that is computed; the results before are 0.
            end: int32 [], the query after the last.
        """
        num_queries = len(q)
        each = min(ATTENDING_TOKENS, num_queries)
        q, rows, chosen = (
            jnp.pad(x, ((0, each), *((0, 0) for _ in x.shape[1:]))) for x in (q, rows, chosen)
        )

        def block(i: jax.Array, out: jax.Array) -> jax.Array:
            start = first + i * each
            own_q, own_rows, places = (
                lax.dynamic_slice_in_dim(x, start, each) for x in (q, rows, chosen)
            )
            num_chosen = jnp.sum(places >= 0, axis=1, dtype=jnp.int32)
            latents = self._latents(own_rows, places)
            found = self.kernels.attend(own_q, latents, num_chosen, self.rank, self.scale)
            return lax.dynamic_update_slice_in_dim(out, found.astype(out.dtype), start, axis=0)

        out = jnp.zeros((*q.shape[:2], self.rank), q.dtype)
        return lax.fori_loop(0, -(-(end - first) // each), block, out)[:num_queries]

    def _latents(self, rows: jax.Array, places: jax.Array) -> jax.Array:
        """Return the cached rows [n, k, row_size] of tokens `places` [n, k] of rows [n]."""
        _, num_pages, _, page_size, row_size = self.kv_cache.shape
        # The first chosen token is read in place of none.
        read = jnp.maximum(jnp.where(places < 0, places[:, :1], places), 0)
        pages = self.batch.page_table.at[rows[:, None], read // page_size]
        slots = pages.get(mode="promise_in_bounds") * page_size + read % page_size
        # With one index and whole rows, a TPU's compiler gathers by DMAs, many at once. With
        # several indices it would gather one row after another, in a loop.
        tokens = self.kv_cache.reshape(-1, row_size)
        slots += self.layer * (num_pages * page_size)
        found: jax.Array = tokens.at[slots].get(mode="promise_in_bounds")
        return found
