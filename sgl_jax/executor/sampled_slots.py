"""Which query tokens of a step are followed by a drawn token, and what a row gains by them.

A row that samples draws a token after its last query, and if that is a draft, after each query
from its last known token on. These *slots* lie flat, row after row, so that logits are computed
for no others; `gained` then keeps each row's tokens up to the first that refutes its draft.

The token drawn at a slot is what would be drawn there without drafts: the noise depends on seed
and position alone. A draft is accepted when it equals that token. So drafts change neither greedy
nor random output (for drafts that are certain guesses this is the rejection rule of
arXiv 2211.17192, written as a draw).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from sgl_jax.kernels.ragged_paged_attention.interface import AttentionBatch


class SampledSlots(NamedTuple):
    """S slots of B rows; S is static."""

    rows: jax.Array  # int32[S] index among the step's rows; some row in range where not valid
    tokens: jax.Array  # int32[S] index among the step's query tokens
    valid: jax.Array  # bool[S]
    firsts: jax.Array  # int32[B] each row's first slot

    @classmethod
    def build(
        cls, batch: AttentionBatch, samples: jax.Array, drafts: jax.Array, max_drafts: int
    ) -> "SampledSlots":
        """Slots of rows that sample (bool[B]) with `drafts` int32[B] drafts each."""
        num_rows, num_tokens = samples.shape[0], batch.positions.shape[0]
        counts = jnp.where(samples, 1 + drafts, 0)
        ends = jnp.cumsum(counts, dtype=jnp.int32)
        firsts = ends - counts
        slots = jnp.arange(min(num_tokens, num_rows * (1 + max_drafts)), dtype=jnp.int32)
        rows = jnp.searchsorted(ends, slots, side="right", method="compare_all")
        rows = jnp.minimum(rows.astype(jnp.int32), num_rows - 1)
        valid = slots < ends[-1]
        tokens = batch.q_offsets[rows + 1] - counts[rows] + slots - firsts[rows]
        return cls(rows, jnp.where(valid, tokens, 0), valid, firsts)

    def by_row(self, values: jax.Array, width: int) -> jax.Array:
        """Slots' values [S, ...] as [B, width, ...]; what lies past a row's slots means nothing."""
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
