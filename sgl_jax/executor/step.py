"""One step on the device, as one chip sees it: read tokens, run the model, sample, record.

A function of arrays, traced once per bucket inside `jax.shard_map`: rows and page ids are the
rank's own, and no rank reads another's. Sampling runs on every chip of a rank alike, from the
same logits, so that the token table stays equal on all of them without a collective.
"""

from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from sgl_jax.executor.layout import RankControls
from sgl_jax.kernels.ragged_paged_attention.interface import AttentionBatch
from sgl_jax.layers.sampling import (
    SampledRows,
    TokenLogprobs,
    no_logprobs,
    sample_tokens,
    token_logprobs,
    unpack_row_params,
)

# Positions whose logits are held at once when a prompt is scored.
_SCORED_BLOCK = 32


class Model(Protocol):
    """What a step needs of a model; see `sgl_jax.models.causal_lm.CausalLM`."""

    def __call__(
        self, token_ids: jax.Array, batch: AttentionBatch, kv_cache: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Hidden states [T, hidden_size] and the updated cache."""
        ...

    def logits(self, hidden: jax.Array) -> jax.Array:
        """float32[n, vocab] of hidden [n, hidden_size], equal on all tensor chips."""
        ...


class StepState(NamedTuple):
    """What a step changes in place; donated to it."""

    token_table: jax.Array  # int32[num_rows, max_context_len]
    kv_pool: jax.Array  # [layers, pages, 2 * kv_heads, page_size, head_dim]


class StepOutput(NamedTuple):
    """What a step reports for B rows and T tokens; log-probabilities are zeros if not wanted."""

    tokens: jax.Array  # int32[B], -1 where nothing was sampled
    logprobs: TokenLogprobs  # [B]
    prompt_logprobs: TokenLogprobs | None  # [T], of each token's successor


def run_step(
    model: Model,
    state: StepState,
    row_params: jax.Array,
    controls: RankControls,
    page_table: jax.Array,
    num_tokens: int,
    prompt_logprobs: bool,
) -> tuple[StepState, StepOutput]:
    """One rank's step.

    Args:
        model: merged with this chip's weights.
        state: tables and pool before the step.
        row_params: int32[num_rows, PACKED_WIDTH] sampling parameters of all rows.
        controls: this step's rows.
        page_table: int32[B, pages].
        num_tokens: T, the static number of query tokens, padding included.
        prompt_logprobs: static; whether to score each token's successor in the token table.
    """
    batch = AttentionBatch.build(
        page_table, controls.kv_starts, controls.q_lens, controls.num_decode, num_tokens
    )
    # Padding tokens read the null row.
    token_rows = jnp.where(batch.valid, controls.rows[batch.token_rows], 0)
    token_ids = state.token_table[token_rows, batch.positions]
    hidden, kv_pool = model(token_ids, batch, state.kv_pool)

    last_token = jnp.maximum(batch.q_offsets[1:] - 1, 0)
    logits = model.logits(hidden[last_token])
    where = SampledRows(controls.rows, controls.kv_starts + controls.q_lens, controls.samples)
    params = unpack_row_params(row_params[controls.rows])
    tokens = sample_tokens(logits, params, state.token_table, where)

    num_rows = controls.rows.shape[0]
    wanted: TokenLogprobs = lax.cond(
        controls.wants_logprobs,
        lambda: token_logprobs(logits, tokens),
        lambda: no_logprobs(num_rows),
    )
    token_table = state.token_table.at[
        jnp.where(where.samples, where.rows, 0), jnp.where(where.samples, where.num_tokens, 0)
    ].set(tokens, mode="drop")
    scored = None
    if prompt_logprobs:
        # From the written table: reading the old one here would keep a copy of it alive.
        successors = token_table.at[token_rows, batch.positions + 1].get(mode="clip")
        scored = _score(model, hidden, successors)
    output = StepOutput(jnp.where(where.samples, tokens, -1), wanted, scored)
    return StepState(token_table, kv_pool), output


def _score(model: Model, hidden: jax.Array, successors: jax.Array) -> TokenLogprobs:
    """Log-probabilities at all T positions, a block at a time: logits of all would not fit."""
    num_tokens = hidden.shape[0]
    padding = -num_tokens % _SCORED_BLOCK
    hidden = jnp.pad(hidden, ((0, padding), (0, 0)))
    successors = jnp.pad(successors, (0, padding))

    def score_block(block: tuple[jax.Array, jax.Array]) -> TokenLogprobs:
        states, tokens = block
        return token_logprobs(model.logits(states), tokens)

    blocks: TokenLogprobs = lax.map(
        score_block,
        (
            hidden.reshape(-1, _SCORED_BLOCK, hidden.shape[1]),
            successors.reshape(-1, _SCORED_BLOCK),
        ),
    )
    return TokenLogprobs(*(x.reshape(-1, *x.shape[2:])[:num_tokens] for x in blocks))
