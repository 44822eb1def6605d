"""The tokens and pages of each row of a step, and the options of scores.

Everything here is local to one data-parallel rank: page ids index that rank's own pool. Per-token
indices are derived once per step and read by every layer.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from sgl_jax.kernels.token_rows import TokenRows

NULL_PAGE = 0


@partial(
    jax.tree_util.register_dataclass,
    data_fields=(
        *("page_table", "kv_starts", "q_lens", "num_decode", "num_rows"),
        *("q_offsets", "token_rows", "positions", "valid"),
    ),
    meta_fields=("max_decode_tokens", "max_draft_tokens"),
)
@dataclass(frozen=True)
class AttentionBatch:
    """The rows of one rank in one step; a pytree of arrays.

    Tokens lie flat, row after row, padding at the end. Rows come as `num_decode` decode rows (a
    query each, and one more for each drafted token), then prefill chunks, then padding rows
    (`q_len` 0). T and B are static buckets.
    """

    page_table: jax.Array  # int32 [B, P] page ids; entries beyond a row's last page are ignored
    kv_starts: jax.Array  # int32 [B] tokens in the cache before this step
    q_lens: jax.Array  # int32 [B]
    num_decode: jax.Array  # int32 []
    num_rows: jax.Array  # int32 [] rows up to the last one that has queries
    q_offsets: jax.Array  # int32 [B + 1] row i's tokens are [q_offsets[i], q_offsets[i + 1])
    token_rows: jax.Array  # int32 [T] row of each token; some row in range for padding
    positions: jax.Array  # int32 [T] position of each token in its request; 0 for padding
    valid: jax.Array  # bool [T] False for padding
    max_decode_tokens: int = field(metadata={"static": True})  # the decode rows' queries at most
    max_draft_tokens: int = field(metadata={"static": True})  # of one decode row at most

    @classmethod
    def build(
        cls,
        page_table: jax.Array,
        kv_starts: jax.Array,
        q_lens: jax.Array,
        num_decode: jax.Array,
        num_tokens: int,
        max_draft_tokens: int = 0,
    ) -> "AttentionBatch":
        """Derive the per-token indices.

        Static: `num_tokens` is T, at least the sum of `q_lens`; `max_draft_tokens` the most that
        any decode row has.
        """
        rows = TokenRows.of(q_lens, num_tokens)
        positions = kv_starts[rows.token_rows] + rows.in_row
        return cls(
            page_table=page_table,
            kv_starts=kv_starts,
            q_lens=q_lens,
            num_decode=num_decode,
            num_rows=rows.num_rows,
            q_offsets=rows.q_offsets,
            token_rows=rows.token_rows,
            positions=jnp.where(rows.valid, positions, 0),
            valid=rows.valid,
            max_decode_tokens=min(num_tokens, q_lens.shape[0] * (1 + max_draft_tokens)),
            max_draft_tokens=max_draft_tokens,
        )


# The score of a key that is not seen. Finite, so that scores that are all masked leave no NaN: the
# next visible key scales their sum by exp(MASKED - m) = 0, and every query sees at least itself.
MASKED = -1e30


class ScoreOptions(NamedTuple):
    """A layer's options for scores; all but `sinks` are static."""

    scale: float  # multiplies q @ k
    sliding_window: int | None = None  # a query at p sees keys at (p - sliding_window, p]
    soft_cap: float | None = None  # scores become soft_cap * tanh(score / soft_cap)
    sinks: jax.Array | None = None  # [q_heads] logits in the softmax whose value is zero
