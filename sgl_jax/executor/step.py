"""One step on the device, as seen by one chip: read tokens, draft, run the model, sample.

A function of arrays, traced once per bucket inside `jax.shard_map`. Rows and page ids are local to
the rank, and no rank reads another's. Every chip of a rank gets the sampled tokens, so that the
token table stays equal on all of them.

Most steps run both halves as one program. Steps with grammars run two programs: the first runs
while the host computes the allowed tokens, which depend on the previous token. The second of two
programs also reports hidden states.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sgl_jax.core.engine_sizes import EngineSizes
from sgl_jax.core.step_plan import NO_DRAFT, NON_FINITE
from sgl_jax.executor.last_queries import LastQueries
from sgl_jax.executor.layer_drafts import DraftRows, draft_tokens
from sgl_jax.executor.layout import RankControls, StepOutput, pack_logprobs
from sgl_jax.executor.state_slots import RowStates, build_state_batch, keep_states
from sgl_jax.kernels.attention.batch import AttentionBatch
from sgl_jax.layers.ngram_drafts import propose_drafts
from sgl_jax.layers.sampling.draw import draw_tokens, score_tokens
from sgl_jax.layers.sampling.logprobs import LogprobArrays, no_logprobs
from sgl_jax.layers.sampling.row_params import SampledRows, unpack_row_params
from sgl_jax.layers.sampling.split_logits import SplitLogits
from sgl_jax.models.decoder import CausalLM
from sgl_jax.models.image_tokens import ImageTokens, RowImages

# Positions scored at once, to bound the memory of logits.
_SCORED_BLOCK = 32


class StepState(NamedTuple):
    """The arrays that a step changes in place; donated to it."""

    token_table: jax.Array  # int32[num_rows, max_context_len]
    row_lens: jax.Array  # int32[num_rows] tokens of each row, valid once it has been admitted
    kv_pools: tuple[jax.Array, ...]  # [layers, pages, *page_shape] each, see `device_pool`
    states: RowStates | None = None  # None without recurrent layers
    # int32[dp, layers, experts] tokens of a rank routed to each expert; None: not counted
    expert_counts: jax.Array | None = None
    images: RowImages | None = None  # None if no images are served


class Computed(NamedTuple):
    """The results of a step's first half, for its second."""

    logits: jax.Array  # float32[queries that may sample, columns of this chip]
    hidden: jax.Array  # [T, hidden_size] after all layers and the final norm
    draft_hidden: jax.Array | None  # hidden states that the draft layer starts from
    token_values: dict[str, jax.Array]  # as in `StepOutput`
    queries: "Queries"


class RankStep(NamedTuple):
    """The inputs of one rank's step, for both halves."""

    controls: RankControls  # this step's rows
    page_tables: Sequence[jax.Array]  # int32[B, pages], one for each cache group
    num_tokens: int  # T, the static number of query tokens, padding included
    sizes: EngineSizes  # limits of drafted and scored tokens, and state slots


def run_step(
    model: CausalLM, state: StepState, row_params: jax.Array, given: RankStep
) -> tuple[StepState, StepOutput]:
    """Run one rank's step, both halves.

    Args:
        model: merged with this chip's weights.
        state: tables and pools before the step.
        row_params: int32[num_rows, packed_width] sampling parameters of all rows.
        given: the step's inputs.
    """
    state, computed = compute_step(model, state, given)
    return draw_step(model, state, row_params, given, computed)


def compute_step(model: CausalLM, state: StepState, given: RankStep) -> tuple[StepState, Computed]:
    """Run the first half: place drafts, run the model, compute logits where tokens are sampled. The
    returned state has the new KV, drafts and recurrent states."""
    token_table, queries = _place_queries(model, state, given)
    given = _placed(given, queries)
    batch, token_rows = _build_batch(given)
    batches = _by_group(batch, given)
    state_batch = layer_states = None
    if state.states is not None:
        state_batch = build_state_batch(state.states, given.controls, given.num_tokens, given.sizes)
        layer_states = state.states.layers
    tokens = token_table[token_rows, batch.positions]
    hidden, kv_pools, layer_states, counts, draft_hidden, experts = model(
        tokens,
        *(batches, state.kv_pools, state_batch, layer_states),
        ImageTokens.of_step(
            *(model.config, state.images, batch, token_rows, given.controls.rows, tokens)
        ),
    )
    sampled = _sampled(batch, queries, given)
    logits = model.logits(hidden[sampled.tokens])
    states = None
    if state.states is not None and layer_states is not None:
        states = state.states._replace(layers=layer_states)
    state = state._replace(token_table=token_table, kv_pools=kv_pools, states=states)
    if state.expert_counts is not None and counts is not None:
        state = state._replace(expert_counts=state.expert_counts + counts)
    values = dict[str, jax.Array]()
    if experts is not None:
        values["routed_experts"] = experts.transpose(2, 0, 1)
    if model.hidden_dtype is not None:
        values["hidden_states"] = hidden
    return state, Computed(logits.columns, hidden, draft_hidden, values, queries)


def draw_step(
    model: CausalLM,
    state: StepState,
    row_params: jax.Array,
    given: RankStep,
    computed: Computed,
    masks: jax.Array | None = None,
) -> tuple[StepState, StepOutput]:
    """Run the second half: sample and record tokens, and report log-probabilities. With `masks`,
    also report each row's last hidden state.

    `masks` int32[B, 1 + max_draft_tokens, ceil(vocab_size / 32)] are the tokens allowed for each
    row next, and after each of its drafts; None: any.
    """
    queries = computed.queries
    given = _placed(given, queries)
    controls, sizes = given.controls, given.sizes
    max_drafts = sizes.max_draft_tokens
    batch, token_rows = _build_batch(given)
    sampled = _sampled(batch, queries, given)
    where = SampledRows(
        controls.rows[sampled.rows], batch.positions[sampled.tokens] + 1, sampled.valid
    )
    logits = SplitLogits(computed.logits, sizes.vocab_size)
    drawn, is_finite, logprobs = draw_tokens(
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
        counts *= 1 + _count_accepted(new_tokens, queries.guesses, queries.drafts)
    token_table = _write_tokens(
        state.token_table, controls.rows, queries.new_starts, new_tokens, counts
    )
    row_lens = state.row_lens.at[jnp.where(controls.samples, controls.rows, 0)].set(
        queries.new_starts + counts
    )
    is_new = jnp.arange(1 + max_drafts) < counts[:, None]
    is_wrong = jnp.any(is_new & ~sampled.by_row(is_finite, 1 + max_drafts), axis=1)
    is_wrong |= _has_wrong_prompt(batch, controls, computed.hidden)
    kv_pools = state.kv_pools
    if computed.draft_hidden is not None and max_drafts:
        lasts = queries.new_starts - 1 + jnp.maximum(counts - 1, 0)
        (token_table, kv_pools), is_finite = draft_tokens(
            *(model, (token_table, kv_pools), row_params, _by_group(batch, given)),
            *(computed.draft_hidden, DraftRows(controls.rows, lasts, controls.samples, token_rows)),
            *(state.images, max_drafts),
        )
        is_wrong |= controls.samples & ~is_finite
    scored = LastQueries.build(batch, controls.num_scored, sizes.max_prompt_logprob_tokens)
    # From the new table: reading the old table here would keep a copy of it alive.
    successors = token_table.at[token_rows[scored.tokens], batch.positions[scored.tokens] + 1].get(
        mode="clip"
    )
    prompt_logprobs = _score_if_any(
        model, controls, computed.hidden, scored, successors, row_params
    )
    # The most likely token's log-probability is finite if, and only if, the row's logits are.
    is_wrong_score = scored.valid & ~jnp.isfinite(prompt_logprobs.top_logprobs[:, 0])
    is_wrong |= _any_of_row(is_wrong_score, scored.rows, len(is_wrong))
    by_row = LogprobArrays(*(sampled.by_row(values, 1 + max_drafts) for values in logprobs))
    new_tokens = jnp.where(is_new & ~is_wrong[:, None], new_tokens, -1)
    new_tokens = new_tokens.at[:, 0].set(jnp.where(is_wrong, NON_FINITE, new_tokens[:, 0]))
    last_hidden = None
    if masks is not None:
        lasts = batch.q_offsets[1:] - 1 - queries.drafts
        last_hidden = computed.hidden[lasts].astype(jnp.float32)
    output = StepOutput(
        *(new_tokens, pack_logprobs(by_row), pack_logprobs(prompt_logprobs)),
        *(last_hidden, computed.token_values),
    )
    states = state.states
    if states is not None:
        state_batch = build_state_batch(states, controls, given.num_tokens, sizes)
        num_kept = controls.q_lens - queries.drafts + counts - 1  # for decode rows
        states = keep_states(states, controls, state_batch, num_kept)
    return state._replace(
        token_table=token_table, row_lens=row_lens, kv_pools=kv_pools, states=states
    ), output


class Queries(NamedTuple):
    """The positions of B rows' queries, and their drafts."""

    kv_starts: jax.Array  # int32[B] position of each row's first query
    drafts: jax.Array  # int32[B] number of drafts, each row's last queries
    new_starts: jax.Array  # int32[B] position of the first new token and of the first draft
    guesses: jax.Array | None  # int32[B, max_drafts]; None without speculation


def _placed(given: RankStep, queries: Queries) -> RankStep:
    """Replace the lower bounds of relayed rows' starts by the true starts."""
    return given._replace(controls=given.controls._replace(kv_starts=queries.kv_starts))


def _build_batch(given: RankStep) -> tuple[AttentionBatch, jax.Array]:
    """Return the attention batch with the first group's pages, and the row of each query token.
    Padding tokens read the null row."""
    controls = given.controls
    batch = AttentionBatch.build(
        given.page_tables[0],
        controls.kv_starts,
        controls.q_lens,
        controls.num_decode,
        given.num_tokens,
        given.sizes.max_draft_tokens,
    )
    return batch, jnp.where(batch.valid, controls.rows[batch.token_rows], 0)


def _by_group(batch: AttentionBatch, given: RankStep) -> tuple[AttentionBatch, ...]:
    return tuple(replace(batch, page_table=table) for table in given.page_tables)


def _sampled(batch: AttentionBatch, queries: Queries, given: RankStep) -> LastQueries:
    controls = given.controls
    num_drawn = jnp.where(controls.samples, 1 + queries.drafts, 0)
    most = controls.rows.shape[0] * (1 + given.sizes.max_draft_tokens)
    return LastQueries.build(batch, num_drawn, most)


def _place_queries(model: CausalLM, state: StepState, given: RankStep) -> tuple[jax.Array, Queries]:
    """Look up relayed lengths and drafts; return the token table with the drafts."""
    controls, max_drafts = given.controls, given.sizes.max_draft_tokens
    rows = controls.rows
    is_decode = jnp.arange(rows.shape[0]) < controls.num_decode
    drafts = jnp.where(is_decode, controls.q_lens - 1, 0)
    kv_starts = jnp.where(controls.relayed, state.row_lens[rows] - 1, controls.kv_starts)
    new_starts = kv_starts + controls.q_lens - drafts
    token_table = state.token_table
    guesses = None
    if max_drafts:
        is_guessed = controls.drafts == NO_DRAFT
        if model.draft_layer is None:
            searched = (drafts > 0) & is_guessed[:, 0]
            guesses = propose_drafts(token_table, rows, new_starts, searched, max_drafts)
            guesses = jnp.where(is_guessed, guesses, controls.drafts)
            token_table = _write_tokens(token_table, rows, new_starts, guesses, drafts)
        else:  # the guesses are already in the table
            num_given = jnp.where(is_guessed[:, 0], 0, drafts)
            given_drafts = jnp.maximum(controls.drafts, 0)
            token_table = _write_tokens(token_table, rows, new_starts, given_drafts, num_given)
            ahead = new_starts[:, None] + jnp.arange(max_drafts, dtype=jnp.int32)
            guesses = token_table.at[rows[:, None], ahead].get(mode="clip")
    return token_table, Queries(kv_starts, drafts, new_starts, guesses)


def _write_tokens(
    token_table: jax.Array,
    rows: jax.Array,
    positions: jax.Array,
    tokens: jax.Array,
    counts: jax.Array,
) -> jax.Array:
    """Write the first counts[i] of tokens[i] to the table, starting at positions[i]. The rest goes
    to the null row, which no result reads."""
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
) -> LogprobArrays:
    """Return log-probabilities of the `successors` of `scored` queries; zeros if no rank scores."""

    def score() -> LogprobArrays:
        params = row_params[controls.rows[scored.rows]]
        return _score(model, hidden[scored.tokens], successors, params)

    # All ranks take the same branch, even if only one scores, because the branch exchanges logits.
    result: LogprobArrays = lax.cond(
        controls.any_scored, score, lambda: no_logprobs(successors.shape[0])
    )
    return result


def _score(
    model: CausalLM, hidden: jax.Array, successors: jax.Array, row_params: jax.Array
) -> LogprobArrays:
    """Return log-probabilities of `successors` int32[S] and the rows' `logprob_ids` after `hidden`.
    Works block by block: the logits of all queries would take too much memory."""
    num_tokens = hidden.shape[0]
    block_size = min(num_tokens, _SCORED_BLOCK)
    padding = -num_tokens % block_size

    def in_blocks(values: jax.Array) -> jax.Array:
        padded = jnp.pad(values, ((0, padding), *((0, 0),) * (values.ndim - 1)))
        return padded.reshape(-1, block_size, *values.shape[1:])

    def score_block(block: tuple[jax.Array, jax.Array, jax.Array]) -> LogprobArrays:
        states, tokens, own = block
        return score_tokens(model.logits(states), tokens, unpack_row_params(own))

    blocks: LogprobArrays = lax.map(
        score_block, (in_blocks(hidden), in_blocks(successors), in_blocks(row_params))
    )
    return LogprobArrays(*(x.reshape(-1, *x.shape[2:])[:num_tokens] for x in blocks))


def _has_wrong_prompt(
    batch: AttentionBatch, controls: RankControls, hidden: jax.Array
) -> jax.Array:
    """Return bool[B]: True if a row's prompt chunk has a non-finite state in `hidden` [T,
    hidden_size]. Later tokens attend to it, even if no logits are computed now."""
    is_wrong = batch.valid & ~jnp.all(jnp.isfinite(hidden), axis=-1)
    rows = jnp.arange(controls.rows.shape[0])
    return (rows >= controls.num_decode) & _any_of_row(is_wrong, batch.token_rows, len(rows))


def _any_of_row(flags: jax.Array, rows: jax.Array, num_rows: int) -> jax.Array:
    """Return bool[num_rows]: True if any of `flags` bool[n] is set for the row.

    `rows` int32[n] are the flags' rows. On a TPU, comparing all pairs is cheaper than the small
    operations of a cumulative sum.
    """
    return jnp.any(flags & (rows == jnp.arange(num_rows)[:, None]), axis=1)


def _count_accepted(drawn: jax.Array, drafted: jax.Array, drafts: jax.Array) -> jax.Array:
    """Return int32[B], the number of leading drafts equal to the token sampled in their place.

    The same token would be sampled after a query without drafts: the noise depends only on seed and
    position. So drafts change neither greedy nor random output. For deterministic drafts this is
    the rejection rule of arXiv 2211.17192, written as a draw.

    Args:
        drawn: int32[B, 1 + K] sampled tokens, starting in the first draft's place.
        drafted: int32[B, K] the drafts.
        drafts: int32[B] number of drafts of each row.
    """
    num_drafts = drafted.shape[1]
    right = (drawn[:, :num_drafts] == drafted) & (jnp.arange(num_drafts) < drafts[:, None])
    return jnp.sum(jnp.cumprod(right, axis=1, dtype=jnp.int32), axis=1, dtype=jnp.int32)
