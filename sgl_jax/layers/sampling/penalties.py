"""What changes logits before temperature: penalties, logit bias, the `min_new_tokens` mask.

Penalties count tokens in the token table, in blocks up to the longest row that has any, so they
need no state of their own and survive a retract.
"""

import jax
import jax.numpy as jnp
from jax import lax

from sgl_jax.layers.sampling.row_params import NO_TOKEN, RowParams

_COUNT_BLOCK = 512  # positions of the token table counted at a time


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
    """Whether each token occurs in each prompt, bool[n, vocab], and how often in each output."""
    line = jnp.arange(shape[0])[:, None]
    width = token_table.shape[1]
    block = min(_COUNT_BLOCK, width)

    def count_block(i: jax.Array, counts: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
        in_prompt, output_count = counts
        position = (i * block + jnp.arange(block))[None, :]
        tokens = token_table[rows[:, None], jnp.minimum(position, width - 1)]
        known = position < num_tokens[:, None]
        prompt = position < prompt_len[:, None]
        prompt_tokens = jnp.where(known & prompt, tokens, NO_TOKEN)
        output_tokens = jnp.where(known & ~prompt, tokens, NO_TOKEN)
        return (
            in_prompt.at[line, prompt_tokens].set(True, mode="drop"),
            output_count.at[line, output_tokens].add(1, mode="drop"),
        )

    empty = (jnp.zeros(shape, bool), jnp.zeros(shape, jnp.int32))
    num_blocks = (jnp.max(num_tokens) + block - 1) // block
    in_prompt, output_count = lax.fori_loop(0, num_blocks, count_block, empty)
    return in_prompt, output_count
