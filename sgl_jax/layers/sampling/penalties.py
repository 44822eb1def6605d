"""Changes of logits before temperature: penalties, logit bias, the `min_new_tokens` mask.

Penalties count tokens in the token table, in blocks up to the longest row with a penalty, so they
need no state and survive a retract.
"""

import jax
import jax.numpy as jnp
from jax import lax

from sgl_jax.layers.sampling.row_params import NO_TOKEN, RowParams, SampledRows

# Positions of the token table to count at a time. The TPU's compiler takes longer for a larger
# scatter: a minute for 512 positions of 256 rows, 5 seconds for 64.
_COUNT_BLOCK = 64


def needs_adjusting(params: RowParams, num_tokens: jax.Array) -> jax.Array:
    """Return bool[n], True if this module would change a row's logits."""
    return (
        _has_penalty(params)
        | (params.bias_ids[:, 0] != NO_TOKEN)
        | _is_too_short(params, num_tokens)
    )


def adjust_logits(
    logits: jax.Array,
    params: RowParams,
    token_table: jax.Array,
    where: SampledRows,
    active: jax.Array,
) -> jax.Array:
    """Apply penalties, bias, and the mask of stop tokens to the `active` rows, bool[n].

    Other rows are unchanged. `logits` and the result are float32[n, vocab], `token_table`
    is int32[num_rows, max_context_len].
    """
    logits = _penalise(logits, params, token_table, where, active & _has_penalty(params))
    line = jnp.arange(logits.shape[0])[:, None]
    bias_ids = jnp.where(active[:, None], params.bias_ids, NO_TOKEN)
    logits = logits.at[line, bias_ids].add(params.bias_values, mode="drop")
    stop_ids = jnp.where(active[:, None], _masked_stop_ids(params, where.num_tokens), NO_TOKEN)
    return logits.at[line, stop_ids].set(-jnp.inf, mode="drop")


def largest_masked(logits: jax.Array, params: RowParams, num_tokens: jax.Array) -> jax.Array:
    """Return each row's largest logit that the mask of stop tokens removes, float32[n], or -inf.

    It is NaN if one of them is.
    """
    line, stop_ids = jnp.arange(logits.shape[0])[:, None], _masked_stop_ids(params, num_tokens)
    masked = logits.at[line, stop_ids].get(mode="fill", fill_value=-jnp.inf)
    return jnp.max(masked, axis=-1)


def _masked_stop_ids(params: RowParams, num_tokens: jax.Array) -> jax.Array:
    """Return the stop tokens of rows that may not end yet, int32[n, max_stop_ids], or NO_TOKEN."""
    return jnp.where(_is_too_short(params, num_tokens)[:, None], params.stop_ids, NO_TOKEN)


def _is_too_short(params: RowParams, num_tokens: jax.Array) -> jax.Array:
    return num_tokens - params.prompt_len < params.min_new_tokens


def _has_penalty(params: RowParams) -> jax.Array:
    return (
        (params.repetition_penalty != 1.0)
        | (params.frequency_penalty != 0.0)
        | (params.presence_penalty != 0.0)
    )


def _penalise(
    logits: jax.Array,
    params: RowParams,
    token_table: jax.Array,
    where: SampledRows,
    penalised: jax.Array,
) -> jax.Array:
    """Apply repetition (prompt and output), then frequency and presence (output only)."""
    (num_rows, vocab), width = logits.shape, token_table.shape[1]
    line, block = jnp.arange(num_rows)[:, None], min(_COUNT_BLOCK, width)
    num_tokens = jnp.where(penalised, where.num_tokens, 0)

    def count_block(i: jax.Array, counts: jax.Array) -> jax.Array:
        position = (i * block + jnp.arange(block))[None, :]
        tokens = token_table[where.rows[:, None], jnp.minimum(position, width - 1)]
        tokens = jnp.where(position < num_tokens[:, None], tokens, NO_TOKEN)
        is_output = position >= params.prompt_len[:, None]
        return counts.at[line + num_rows * is_output, tokens].add(1, mode="drop")

    # Prompts in the upper rows, outputs in the lower rows: one scatter for both.
    num_blocks = (jnp.max(num_tokens) + block - 1) // block
    counts = jnp.zeros((2 * num_rows, vocab), jnp.int32)
    counts = lax.fori_loop(0, num_blocks, count_block, counts)
    output_count = counts[num_rows:]
    seen = (counts[:num_rows] > 0) | (output_count > 0)
    repetition = params.repetition_penalty[:, None]
    damped = jnp.where(logits > 0, logits / repetition, logits * repetition)
    lowered = (
        jnp.where(seen, damped, logits)
        - params.frequency_penalty[:, None] * output_count
        - params.presence_penalty[:, None] * (output_count > 0)
    )
    return jnp.where(penalised[:, None], lowered, logits)
