"""Changes of logits before temperature: penalties, logit bias, the `min_new_tokens` mask.

Penalties count tokens in the token table, in blocks up to the longest row that has any, so they
need no state of their own and survive a retract.
"""

import jax
import jax.numpy as jnp
from jax import lax

from sgl_jax.layers.sampling.row_params import NO_TOKEN, RowParams

# Positions of the token table counted at a time. The TPU's compiler takes longer over a scatter the
# more it writes: a minute for 512 positions of 256 rows, 5 seconds for 64.
_COUNT_BLOCK = 64


def needs_adjusting(params: RowParams, num_tokens: jax.Array) -> jax.Array:
    """Rows whose logits this module would change: bool[n]."""
    return (
        _has_penalty(params)
        | (params.bias_ids[:, 0] != NO_TOKEN)
        | (num_tokens - params.prompt_len < params.min_new_tokens)
    )


def adjust_logits(
    logits: jax.Array,
    params: RowParams,
    token_table: jax.Array,
    rows: jax.Array,
    num_tokens: jax.Array,
    active: jax.Array,
) -> jax.Array:
    """Penalties, then bias, then the mask of stop tokens, on the `active` rows: float32[n, vocab].

    Args:
        logits: float32[n, vocab].
        params: sampling parameters of the n rows.
        token_table: int32[num_rows, max_context_len].
        rows: int32[n] each row's line in the token table.
        num_tokens: int32[n] tokens of each row so far, prompt and output.
        active: bool[n]; the others come back as they were.
    """
    penalised = active & _has_penalty(params)
    logits = _penalise(logits, params, token_table, rows, num_tokens, penalised)
    line = jnp.arange(logits.shape[0])[:, None]
    bias_ids = jnp.where(active[:, None], params.bias_ids, NO_TOKEN)
    logits = logits.at[line, bias_ids].add(params.bias_values, mode="drop")
    too_short = active & (num_tokens - params.prompt_len < params.min_new_tokens)
    stop_ids = jnp.where(too_short[:, None], params.stop_ids, NO_TOKEN)
    return logits.at[line, stop_ids].set(-jnp.inf, mode="drop")


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
    rows: jax.Array,
    num_tokens: jax.Array,
    penalised: jax.Array,
) -> jax.Array:
    """Repetition (prompt and output), then frequency and presence (output only)."""
    in_prompt, output_count = _count_tokens(
        logits.shape, token_table, rows, params.prompt_len, jnp.where(penalised, num_tokens, 0)
    )
    seen = in_prompt | (output_count > 0)
    repetition = params.repetition_penalty[:, None]
    damped = jnp.where(logits > 0, logits / repetition, logits * repetition)
    lowered = (
        jnp.where(seen, damped, logits)
        - params.frequency_penalty[:, None] * output_count
        - params.presence_penalty[:, None] * (output_count > 0)
    )
    return jnp.where(penalised[:, None], lowered, logits)


def _count_tokens(
    shape: tuple[int, ...],
    token_table: jax.Array,
    rows: jax.Array,
    prompt_len: jax.Array,
    num_tokens: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Occurrence of each token in each prompt, bool[n, vocab], and its count in each output."""
    num_rows, vocab = shape
    line = jnp.arange(num_rows)[:, None]
    width = token_table.shape[1]
    block = min(_COUNT_BLOCK, width)

    def count_block(i: jax.Array, counts: jax.Array) -> jax.Array:
        position = (i * block + jnp.arange(block))[None, :]
        tokens = token_table[rows[:, None], jnp.minimum(position, width - 1)]
        tokens = jnp.where(position < num_tokens[:, None], tokens, NO_TOKEN)
        is_output = position >= prompt_len[:, None]
        return counts.at[line + num_rows * is_output, tokens].add(1, mode="drop")

    # Prompts above, outputs below: one scatter for both.
    num_blocks = (jnp.max(num_tokens) + block - 1) // block
    nothing = jnp.zeros((2 * num_rows, vocab), jnp.int32)
    counts = lax.fori_loop(0, num_blocks, count_block, nothing)
    return counts[:num_rows] > 0, counts[num_rows:]
