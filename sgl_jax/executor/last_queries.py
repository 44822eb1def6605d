"""The query tokens of a step whose logits are computed: some of the last ones of each row.

A row that samples draws a token after its last query; a row with drafts, after each query from its
last known token on. A row whose prompt is scored needs the logits of its last queries. These
queries lie flat, row after row, so that logits are computed for no others.

The same token would be drawn after a query without drafts: the noise depends on seed and position
alone. A draft is accepted when it equals that token. So drafts change neither
greedy nor random output (for drafts that are certain guesses this is the rejection rule of
arXiv 2211.17192, written as a draw).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from sgl_jax.kernels.attention.batch import AttentionBatch


class LastQueries(NamedTuple):
    """S queries of B rows; S is static."""

    rows: jax.Array  # int32[S] index among the step's rows; some row in range where not valid
    tokens: jax.Array  # int32[S] index among the step's query tokens
    valid: jax.Array  # bool[S]
    firsts: jax.Array  # int32[B] index of each row's first one among the S

    @classmethod
    def build(cls, batch: AttentionBatch, counts: jax.Array, most: int) -> "LastQueries":
        """The last counts[i] queries of each row (int32[B]), at most `most` in all."""
        num_rows, num_tokens = counts.shape[0], batch.positions.shape[0]
        ends = jnp.cumsum(counts, dtype=jnp.int32)
        firsts = ends - counts
        queries = jnp.arange(min(num_tokens, most), dtype=jnp.int32)
        rows = jnp.searchsorted(ends, queries, side="right", method="compare_all")
        rows = jnp.minimum(rows.astype(jnp.int32), num_rows - 1)
        valid = queries < ends[-1]
        tokens = batch.q_offsets[rows + 1] - counts[rows] + queries - firsts[rows]
        return cls(rows, jnp.where(valid, tokens, 0), valid, firsts)

    @property
    def places(self) -> jax.Array:
        """Each query's number among its row's, from 0 on: int32[S]; arbitrary where not valid."""
        queries = jnp.arange(self.rows.shape[0], dtype=jnp.int32)
        return queries - self.firsts[self.rows]

    def by_row(self, values: jax.Array, width: int) -> jax.Array:
        """Values [S, ...] as [B, width, ...]; entries past a row's queries are arbitrary."""
        index = self.firsts[:, None] + jnp.arange(width, dtype=jnp.int32)
        return values.at[index].get(mode="clip")


def count_accepted(drawn: jax.Array, drafted: jax.Array, drafts: jax.Array) -> jax.Array:
    """Leading drafts that equal the token drawn in their place: int32[B].

    Args:
        drawn: int32[B, 1 + K] tokens drawn, the first of them in the first draft's place.
        drafted: int32[B, K] the drafts.
        drafts: int32[B] how many of them each row has.
    """
    num_drafts = drafted.shape[1]
    right = (drawn[:, :num_drafts] == drafted) & (jnp.arange(num_drafts) < drafts[:, None])
    return jnp.sum(jnp.cumprod(right, axis=1, dtype=jnp.int32), axis=1, dtype=jnp.int32)
