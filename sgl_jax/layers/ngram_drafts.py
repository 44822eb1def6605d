"""Drafts from n-gram lookup: the tokens that followed an earlier occurrence of the last tokens.

This is also called prompt lookup (Saxena, 2023). It needs no draft model: the drafts come from the
request's tokens. A wrong draft costs time but changes no output: the step verifies each draft
(`executor/step.py`).
"""

import jax
import jax.numpy as jnp
from jax import lax

# Longest suffix to look for. The longest match wins, or the latest of equal length.
_MAX_NGRAM = 4
_BLOCK = 512  # positions of the token table to search at a time


def propose_drafts(
    token_table: jax.Array, rows: jax.Array, lens: jax.Array, searched: jax.Array, num_drafts: int
) -> jax.Array:
    """Guess the tokens at positions lens[i], lens[i] + 1, ... of each row: int32[n, num_drafts].

    Args:
        token_table: int32[num_rows, max_context_len].
        rows: int32[n], row indices in the token table.
        lens: int32[n] tokens of each row, at least 1.
        searched: bool[n] rows to search for; the rest cost nothing and get arbitrary tokens.
        num_drafts: static.
    """
    match = _latest_longest_match(token_table, rows, jnp.where(searched, lens, 0))
    # A row without a match guesses that its last token repeats.
    match = jnp.where(match < 0, lens - 2, match)
    # If there are too few tokens after the match, they repeat with this period.
    period = jnp.maximum(lens - 1 - match, 1)
    ahead = jnp.arange(num_drafts, dtype=jnp.int32)
    source = match[:, None] + 1 + ahead % period[:, None]
    drafts: jax.Array = token_table.at[rows[:, None], source].get(mode="clip")
    return drafts


def _latest_longest_match(token_table: jax.Array, rows: jax.Array, lens: jax.Array) -> jax.Array:
    """Find the best earlier match of each row's end: the position of its last token, or -1."""
    width = token_table.shape[1]
    back = jnp.arange(_MAX_NGRAM, dtype=jnp.int32)
    suffix = token_table.at[rows[:, None], lens[:, None] - 1 - back].get(mode="clip")

    def search_block(i: jax.Array, best: jax.Array) -> jax.Array:
        position = (i * _BLOCK + jnp.arange(_BLOCK, dtype=jnp.int32))[None, :]
        matched = jnp.zeros((rows.shape[0], _BLOCK), jnp.int32)
        unbroken = position < lens[:, None] - 1
        for n in range(_MAX_NGRAM):
            at = position - n
            tokens = token_table.at[rows[:, None], at].get(mode="clip")
            unbroken &= (at >= 0) & (tokens == suffix[:, n : n + 1])
            matched += unbroken
        score = jnp.where(matched > 0, matched * width + position, -1)
        return jnp.maximum(best, jnp.max(score, axis=1))

    num_blocks = -(-jnp.max(lens) // _BLOCK)
    best = lax.fori_loop(0, num_blocks, search_block, jnp.full(rows.shape, -1, jnp.int32))
    return jnp.where(best < 0, -1, best % width)
