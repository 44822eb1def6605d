"""The queries of a step that need logits."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from sgl_jax.kernels.attention.batch import AttentionBatch


class LastQueries(NamedTuple):
    """The queries of a step that need logits: some of the last queries of each row.

    A row that samples does so after its last query; a row with drafts, after each query from its
    last known token on. A row with a scored prompt needs the logits of its last queries. S queries
    of B rows are stored flat, row after row, so that only their logits are computed.
    """

    rows: jax.Array  # int32[S] index among the step's rows; in range, but arbitrary if not valid
    tokens: jax.Array  # int32[S] index among the step's query tokens
    valid: jax.Array  # bool[S]
    firsts: jax.Array  # int32[B] index of each row's first query among the S

    @classmethod
    def build(cls, batch: AttentionBatch, counts: jax.Array, most: int) -> "LastQueries":
        """Select the last counts[i] queries of each row (int32[B]), at most `most` in total."""
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
        """Return each query's index within its row: int32[S]; arbitrary where not valid."""
        queries = jnp.arange(self.rows.shape[0], dtype=jnp.int32)
        return queries - self.firsts[self.rows]

    def by_row(self, values: jax.Array, width: int) -> jax.Array:
        """Return values [S, ...] as [B, width, ...]; entries past a row's queries are arbitrary."""
        index = self.firsts[:, None] + jnp.arange(width, dtype=jnp.int32)
        return values.at[index].get(mode="clip")
