"""One step on the device, as one chip sees it: read tokens, draft, run the model, sample, record.

A function of arrays, traced once per bucket inside `jax.shard_map`: rows and page ids are the
rank's own, and no rank reads another's. Every chip of a rank gets the drawn tokens, so that the
token table stays equal on all of them.

It has two halves, one program for most steps. Steps with grammars run them as two programs: the
first runs while the host finds the allowed tokens, which depend on the token before.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sgl_jax.core.engine_sizes import EngineSizes
from sgl_jax.core.step_plan import NO_DRAFT
from sgl_jax.executor.last_queries import LastQueries, count_accepted
from sgl_jax.executor.layout import RankControls
from sgl_jax.executor.state_slots import RowStates, StepRows, build_state_batch, keep_states
from sgl_jax.kernels.attention.batch import AttentionBatch
from sgl_jax.layers.ngram_drafts import propose_drafts
from sgl_jax.layers.sampling.draw import draw_tokens, score_tokens
from sgl_jax.layers.sampling.logprobs import TokenLogprobs, no_logprobs
from sgl_jax.layers.sampling.row_params import SampledRows, unpack_row_params
from sgl_jax.layers.sampling.split_logits import SplitLogits
from sgl_jax.models.decoder import CausalLM

# Positions whose logits are held at once when prompts are scored.
_SCORED_BLOCK = 32


class StepState(NamedTuple):
    """The arrays that a step changes in place; donated to it."""

    token_table: jax.Array  # int32[num_rows, max_context_len]
    row_lens: jax.Array  # int32[num_rows] tokens of each row, valid once it has been admitted
    kv_pools: tuple[jax.Array, ...]  # [layers, pages, *page_shape] each, see `device_pool`
    states: RowStates | None = None  # of models with recurrent layers


class StepOutput(NamedTuple):
    """A step's results for B rows; log-probabilities are zeros if not requested."""

    tokens: jax.Array  # int32[B, 1 + max_draft_tokens], -1 after a row's last new token
    logprobs: TokenLogprobs  # [B, 1 + max_draft_tokens]
    # [S] of the scored queries' successors, row after row: S is max_prompt_logprob_tokens, or all
    # of the step's queries if these are fewer.
    prompt_logprobs: TokenLogprobs


class Computed(NamedTuple):
    """The results of a step's first half, for its second."""

    logits: jax.Array  # float32[queries that may draw, columns of this chip]
    hidden: jax.Array  # [T, hidden_size] after all layers
    queries: "Queries"


class RankStep(NamedTuple):
    """The inputs of one rank's step, for both halves."""

    controls: RankControls  # this step's rows
    page_tables: Sequence[jax.Array]  # int32[B, pages], one for each cache group
    num_tokens: int  # T, the static number of query tokens, padding included
    sizes: EngineSizes  # how many tokens are drafted and scored, and where states are


def run_step(
    model: CausalLM, state: StepState, row_params: jax.Array, given: RankStep
) -> tuple[StepState, StepOutput]:
    """One rank's step.

    Args:
        model: merged with this chip's weights.
        state: tables and pool before the step.
        row_params: int32[num_rows, PACKED_WIDTH] sampling parameters of all rows.
        given: as for both halves.
    """
    state, computed = compute_step(model, state, given)
    return draw_step(model, state, computed, row_params, given)


def compute_step(model: CausalLM, state: StepState, given: RankStep) -> tuple[StepState, Computed]:
    """The first half: drafts, the model, and the logits of the queries that may draw.

    It changes the state's KV, drafts and layers' states.
    """
    controls = given.controls
    token_table, queries = _place_queries(state, controls, given.sizes.max_draft_tokens)
    batch, token_rows = _build_batch(queries, given)
    batches = tuple(replace(batch, page_table=table) for table in given.page_tables)
    state_batch = layer_states = None
    if state.states is not None and controls.states is not None:
        rows = _step_rows(queries, controls)
        state_batch = build_state_batch(
            state.states, controls.states, rows, given.num_tokens, given.sizes
        )
        layer_states = state.states.layers
    hidden, kv_pools, layer_states = model(
        token_table[token_rows, batch.positions],
        *(batches, state.kv_pools, state_batch, layer_states),
    )
    sampled = _sampled(batch, queries, given)
    logits = model.logits(hidden[sampled.tokens])
    states = None
    if state.states is not None and layer_states is not None:
        states = state.states._replace(layers=layer_states)
    state = state._replace(token_table=token_table, kv_pools=kv_pools, states=states)
    return state, Computed(logits.columns, hidden, queries)


def draw_step(
    model: CausalLM,
    state: StepState,
    computed: Computed,
    row_params: jax.Array,
    given: RankStep,
    masks: jax.Array | None = None,
) -> tuple[StepState, StepOutput]:
    """The second half: tokens are drawn and recorded, and log-probabilities reported.

    `masks` int32[B, 1 + max_draft_tokens, ceil(vocab_size / 32)] are the tokens that each row may
    draw next, and after each of its drafts; None: any.
    """
    controls, sizes = given.controls, given.sizes
    max_drafts = sizes.max_draft_tokens
    queries = computed.queries
    batch, token_rows = _build_batch(queries, given)
    sampled = _sampled(batch, queries, given)
    where = SampledRows(
        controls.rows[sampled.rows], batch.positions[sampled.tokens] + 1, sampled.valid
    )
    logits = SplitLogits(computed.logits, sizes.vocab_size)
    drawn, logprobs = draw_tokens(
        logits,
        row_params,
        state.token_table,
        where,
        controls.returns_logprobs,
        None if masks is None else masks[sampled.rows, sampled.places],
    )
    new_tokens = sampled.by_row(drawn, 1 + max_drafts)
    counts = controls.samples.astype(jnp.int32)
    if queries.guesses is not None:
        counts *= 1 + count_accepted(new_tokens, queries.guesses, queries.drafts)
    token_table = _write_tokens(
        state.token_table, controls.rows, queries.new_starts, new_tokens, counts
    )
    row_lens = state.row_lens.at[jnp.where(controls.samples, controls.rows, 0)].set(
        queries.new_starts + counts
    )
    scored = LastQueries.build(batch, controls.num_scored, sizes.max_prompt_logprob_tokens)
    # From the written table: reading the old one here would keep a copy of it alive.
    successors = token_table.at[token_rows[scored.tokens], batch.positions[scored.tokens] + 1].get(
        mode="clip"
    )
    prompt_logprobs = _score_if_any(
        model, controls, computed.hidden, scored, successors, row_params
    )
    is_new = jnp.arange(1 + max_drafts) < counts[:, None]
    by_row = TokenLogprobs(*(sampled.by_row(values, 1 + max_drafts) for values in logprobs))
    output = StepOutput(jnp.where(is_new, new_tokens, -1), by_row, prompt_logprobs)
    states = state.states
    if states is not None and controls.states is not None:
        rows = _step_rows(queries, controls)
        state_batch = build_state_batch(states, controls.states, rows, given.num_tokens, sizes)
        num_kept = controls.q_lens - queries.drafts + counts - 1  # of rows that decode
        states = keep_states(states, controls.states, rows, state_batch, num_kept)
    return state._replace(token_table=token_table, row_lens=row_lens, states=states), output


class Queries(NamedTuple):
    """The positions of B rows' queries, and their drafts."""

    kv_starts: jax.Array  # int32[B] position of each row's first query
    drafts: jax.Array  # int32[B] how many of its queries are drafts: the last ones
    new_starts: jax.Array  # int32[B] where its first new token goes, and its first draft lies
    guesses: jax.Array | None  # int32[B, max_drafts]; None where nothing is drafted


def _build_batch(queries: Queries, given: RankStep) -> tuple[AttentionBatch, jax.Array]:
    """Attention's batch with the first group's pages, and the row of each query token: padding
    tokens read the null row."""
    controls = given.controls
    batch = AttentionBatch.build(
        given.page_tables[0],
        queries.kv_starts,
        controls.q_lens,
        controls.num_decode,
        given.num_tokens,
        given.sizes.max_draft_tokens,
    )
    return batch, jnp.where(batch.valid, controls.rows[batch.token_rows], 0)


def _sampled(batch: AttentionBatch, queries: Queries, given: RankStep) -> LastQueries:
    """The queries after which a token is drawn."""
    controls = given.controls
    num_drawn = jnp.where(controls.samples, 1 + queries.drafts, 0)
    most = controls.rows.shape[0] * (1 + given.sizes.max_draft_tokens)
    return LastQueries.build(batch, num_drawn, most)


def _step_rows(queries: Queries, controls: RankControls) -> StepRows:
    return StepRows(controls.rows, queries.kv_starts, controls.q_lens, controls.num_decode)


def _place_queries(
    state: StepState, controls: RankControls, max_drafts: int
) -> tuple[jax.Array, Queries]:
    """Look up relayed lengths and draft; the token table with the drafts in it."""
    rows = controls.rows
    is_decode = jnp.arange(rows.shape[0]) < controls.num_decode
    drafts = jnp.where(is_decode, controls.q_lens - 1, 0)
    kv_starts = jnp.where(controls.relayed, state.row_lens[rows] - 1, controls.kv_starts)
    new_starts = kv_starts + controls.q_lens - drafts
    token_table = state.token_table
    guesses = None
    if max_drafts:
        is_guessed = controls.drafts == NO_DRAFT
        searched = (drafts > 0) & is_guessed[:, 0]
        guesses = propose_drafts(token_table, rows, new_starts, searched, max_drafts)
        guesses = jnp.where(is_guessed, guesses, controls.drafts)
        token_table = _write_tokens(token_table, rows, new_starts, guesses, drafts)
    return token_table, Queries(kv_starts, drafts, new_starts, guesses)


def _write_tokens(
    token_table: jax.Array,
    rows: jax.Array,
    positions: jax.Array,
    tokens: jax.Array,
    counts: jax.Array,
) -> jax.Array:
    """Put the first counts[i] of tokens[i] into the table from positions[i] on.

    The rest goes to the null row, which no result is read from.
    """
    ahead = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    is_kept = ahead < counts[:, None]
    return token_table.at[
        jnp.where(is_kept, rows[:, None], 0), jnp.where(is_kept, positions[:, None] + ahead, 0)
    ].set(tokens, mode="drop")


def _score_if_any(
    model: CausalLM,
    controls: RankControls,
    hidden: jax.Array,
    scored: LastQueries,
    successors: jax.Array,
    row_params: jax.Array,
) -> TokenLogprobs:
    """Log-probabilities of the `successors` of `scored` queries; zeros if no rank scores any."""

    def score() -> TokenLogprobs:
        ids = unpack_row_params(row_params[controls.rows[scored.rows]]).logprob_ids
        return _score(model, hidden[scored.tokens], successors, ids)

    # All ranks take the same branch, though one alone may score: logits are exchanged in it.
    result: TokenLogprobs = lax.cond(
        controls.any_scored, score, lambda: no_logprobs(successors.shape[0])
    )
    return result


def _score(
    model: CausalLM, hidden: jax.Array, successors: jax.Array, ids: jax.Array
) -> TokenLogprobs:
    """Log-probabilities of `successors` int32[S] and `ids` int32[S, n] after `hidden`.

    A block at a time: the logits of all would take too much memory.
    """
    num_tokens = hidden.shape[0]
    block_size = min(num_tokens, _SCORED_BLOCK)
    padding = -num_tokens % block_size

    def in_blocks(values: jax.Array) -> jax.Array:
        padded = jnp.pad(values, ((0, padding), *((0, 0),) * (values.ndim - 1)))
        return padded.reshape(-1, block_size, *values.shape[1:])

    def score_block(block: tuple[jax.Array, jax.Array, jax.Array]) -> TokenLogprobs:
        states, tokens, own_ids = block
        return score_tokens(model.logits(states), tokens, own_ids)

    blocks: TokenLogprobs = lax.map(
        score_block, (in_blocks(hidden), in_blocks(successors), in_blocks(ids))
    )
    return TokenLogprobs(*(x.reshape(-1, *x.shape[2:])[:num_tokens] for x in blocks))
