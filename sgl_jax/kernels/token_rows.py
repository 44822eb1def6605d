"""The rows of a step's tokens. Tokens are flat, row after row, with padding at the end."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class TokenRows:
    """T tokens of the B rows of one data-parallel rank in one step; a pytree of arrays.

    Rows are `num_decode` decode rows (a query each, and one more for each drafted token), then
    prefill chunks, then padding rows (`q_len` 0). T and B are static buckets. Per-token indices are
    derived once per step and read by every layer.
    """

    kv_starts: jax.Array  # int32 [B] tokens in the cache before this step
    q_lens: jax.Array  # int32 [B]
    num_decode: jax.Array  # int32 []
    num_rows: jax.Array  # int32 [] rows up to the last row with tokens
    q_offsets: jax.Array  # int32 [B + 1] row i's tokens are [q_offsets[i], q_offsets[i + 1])
    token_rows: jax.Array  # int32 [T] row of each token; an arbitrary row in range for padding
    positions: jax.Array  # int32 [T] position of each token in its request; 0 for padding
    valid: jax.Array  # bool [T] False for padding
    max_decode_tokens: int = field(metadata={"static": True})  # most tokens of all decode rows
    max_draft_tokens: int = field(metadata={"static": True})  # most drafts of one decode row

    @classmethod
    def of(
        cls,
        kv_starts: jax.Array,
        q_lens: jax.Array,
        num_decode: jax.Array,
        num_tokens: int,
        max_draft_tokens: int,
    ) -> "TokenRows":
        """Derive the per-token indices; `num_tokens`, at least the sum of `q_lens`, is T.

        `num_tokens` and `max_draft_tokens`, the most drafts of any decode row, are static.
        """
        bucket_rows = q_lens.shape[0]
        ends = jnp.cumsum(q_lens, dtype=jnp.int32)
        q_offsets = jnp.concatenate([jnp.zeros(1, jnp.int32), ends])
        tokens = jnp.arange(num_tokens, dtype=jnp.int32)
        found = jnp.searchsorted(ends, tokens, side="right", method="compare_all")
        rows = jnp.minimum(found.astype(jnp.int32), bucket_rows - 1)
        row_ids = jnp.arange(1, bucket_rows + 1, dtype=jnp.int32)
        valid = tokens < ends[-1]
        return TokenRows(
            kv_starts=kv_starts,
            q_lens=q_lens,
            num_decode=num_decode,
            num_rows=jnp.max(jnp.where(q_lens > 0, row_ids, 0)),
            q_offsets=q_offsets,
            token_rows=rows,
            positions=jnp.where(valid, kv_starts[rows] + (tokens - q_offsets[rows]), 0),
            valid=valid,
            max_decode_tokens=min(num_tokens, bucket_rows * (1 + max_draft_tokens)),
            max_draft_tokens=max_draft_tokens,
        )
