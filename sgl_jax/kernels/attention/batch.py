"""The rows and pages of a step, and the options of scores.

Everything here is local to one data-parallel rank: page ids index the pool of that rank.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sgl_jax.kernels.token_rows import TokenRows

NULL_PAGE = 0


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class AttentionBatch(TokenRows):
    """The rows of a step with their pages; a pytree of arrays."""

    page_table: jax.Array  # int32 [B, P] page ids; entries after a row's last page are ignored
    # int32 [B, n, 2] spans of each row, first and end, in order; unused ones begin after all
    # tokens. A query of a chunk also sees the later keys of its span, all of which the cache has
    # after this step. None: each query sees no later key.
    spans: jax.Array | None = None

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
        """Derive the per-token indices with `TokenRows.of`, and add the page table."""
        rows = TokenRows.of(kv_starts, q_lens, num_decode, num_tokens, max_draft_tokens)
        return cls(page_table=page_table, **vars(rows))


def last_seen(positions: jax.Array, spans: jax.Array | None) -> jax.Array:
    """Return the last keys that queries of a row at `positions`, int32 [...], see.

    `spans` are int32 [n, 2], those of the row in `AttentionBatch.spans`.
    """
    if spans is None:
        return positions
    firsts, ends = spans[:, 0], spans[:, 1]
    is_inside = (positions[..., None] >= firsts) & (positions[..., None] < ends)
    return jnp.maximum(positions, jnp.max(jnp.where(is_inside, ends - 1, 0), axis=-1))


# The score of a masked key. It is finite, so that a block with only masked scores gives no NaN: the
# next visible key scales their sum by exp(MASKED - m) = 0, and every query sees at least itself.
MASKED = -1e30


class ScoreOptions(NamedTuple):
    """A layer's options for scores; all but `sinks` are static."""

    scale: float  # multiplies q @ k
    sliding_window: int | None = None  # a query at p sees keys at (p - sliding_window, p]
    soft_cap: float | None = None  # scores become soft_cap * tanh(score / soft_cap)
    sinks: jax.Array | None = None  # [q_heads] extra logits in the softmax, with value zero
    # A query at p sees keys from the last multiple of sliding_window up to p, in place of a window.
    is_chunked: bool = False

    def first_seen(self, position: Any) -> Any:
        """Return the first key in the window of a query at `position`, int32 [...].

        It may be negative. Only for layers with a window.
        """
        assert self.sliding_window is not None
        if not self.is_chunked:
            return position - (self.sliding_window - 1)
        size = self.sliding_window
        if size & (size - 1) == 0:  # without a division
            return position & -size
        return position - lax.rem(position, jnp.full_like(position, size))
