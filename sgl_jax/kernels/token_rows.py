"""The rows of a step's tokens, which lie flat, row after row, with padding at the end."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class TokenRows(NamedTuple):
    """T tokens of B rows."""

    q_offsets: jax.Array  # int32 [B + 1] row i's tokens are [q_offsets[i], q_offsets[i + 1])
    num_rows: jax.Array  # int32 [] rows up to the last one that has tokens
    token_rows: jax.Array  # int32 [T] row of each token; some row in range for padding
    in_row: jax.Array  # int32 [T] number of each token in its row; arbitrary for padding
    valid: jax.Array  # bool [T] False for padding

    @classmethod
    def of(cls, q_lens: jax.Array, num_tokens: int) -> "TokenRows":
        """The first sum of `q_lens`, int32 [B], of `num_tokens` tokens."""
        bucket_rows = q_lens.shape[0]
        ends = jnp.cumsum(q_lens, dtype=jnp.int32)
        q_offsets = jnp.concatenate([jnp.zeros(1, jnp.int32), ends])
        tokens = jnp.arange(num_tokens, dtype=jnp.int32)
        rows = jnp.searchsorted(ends, tokens, side="right", method="compare_all")
        token_rows = jnp.minimum(rows.astype(jnp.int32), bucket_rows - 1)
        row_ids = jnp.arange(1, bucket_rows + 1, dtype=jnp.int32)
        return cls(
            q_offsets=q_offsets,
            num_rows=jnp.max(jnp.where(q_lens > 0, row_ids, 0)),
            token_rows=token_rows,
            in_row=tokens - q_offsets[token_rows],
            valid=tokens < ends[-1],
        )
