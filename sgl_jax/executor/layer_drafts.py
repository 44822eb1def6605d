"""Drafts of the next step, made by a draft layer at the end of a step.

They stay in the token table, past each row's last token: there the next step reads them, and there
its verified tokens replace them. A row without room for drafts, or that has just been admitted, has
some tokens there; any token is a draft, since a step verifies each.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sgl_jax.kernels.attention.batch import AttentionBatch
from sgl_jax.layers.sampling.draw import draw_tokens
from sgl_jax.layers.sampling.row_params import SampledRows
from sgl_jax.models.decoder import CausalLM

_Tables = tuple[jax.Array, tuple[jax.Array, ...]]  # the token table and the pools


class DraftRows(NamedTuple):
    """The B rows of a step that is drawn."""

    rows: jax.Array  # int32[B] lines of the token table
    lasts: jax.Array  # int32[B] position of each row's last query that counts
    samples: jax.Array  # bool[B] rows that have drawn a token, and so get drafts
    token_rows: jax.Array  # int32[T] line of the token table of each query


def draft_tokens(
    model: CausalLM,
    tables: _Tables,
    row_params: jax.Array,
    batches: Sequence[AttentionBatch],
    hidden: jax.Array,
    drafted: DraftRows,
    num_drafts: int,
) -> tuple[_Tables, jax.Array]:
    """Write each row's `num_drafts` drafts behind its last token; also return, bool[B], whether the
    logits of its first draft are finite. Later drafts follow guesses, which may be any token.

    The layer's KV is written for all queries of the step. Then each pass covers a position a row,
    the first its last query's; the next step writes the KV of the positions after it again, from
    the model's own hidden states.

    A draft is drawn as its token will be, with the same parameters and noise: so it is the more
    often right, the more alike the distributions are, at any temperature.

    Args:
        model: with a draft layer.
        tables: the token table int32[num_rows, max_context_len], with the tokens just drawn; and
            the KV pools, as in `StepState`.
        row_params: int32[num_rows, packed_width] sampling parameters of all rows.
        batches: of the step, for each cache group.
        hidden: [T, hidden_size] of the step's queries, the model's `draft_hidden`.
        drafted: the step's rows.
        num_drafts: static, at least 1.
    """
    batch, (table, kv_pools) = batches[0], tables
    rows, most = drafted.rows, table.shape[1]
    after = table.at[drafted.token_rows, batch.positions + 1].get(mode="clip")
    # The compiler leaves out all of this that makes no KV: attention and feed-forward.
    _, kv_pools = model.draft(after, hidden, batches, kv_pools)
    places = batch.q_offsets[:-1] + drafted.lasts - batch.kv_starts
    hidden = hidden.at[places].get(mode="clip")
    tokens = after.at[places].get(mode="clip")

    def draft_next(number: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        hidden, tokens, is_finite, table, *pools = carry
        # No request has a token past the table, but padding of its last page.
        positions = jnp.minimum(drafted.lasts + number, most - 1)
        one_each = AttentionBatch.build(
            *(batch.page_table, positions, jnp.minimum(batch.q_lens, 1)),
            *(batch.num_rows, len(rows)),
        )
        by_group = [replace(one_each, page_table=own.page_table) for own in batches]
        hidden, kv_pools = model.draft(tokens, hidden, by_group, tuple(pools))
        positions = drafted.lasts + 2 + number
        where = SampledRows(rows, positions, drafted.samples)
        tokens, is_own_finite, _ = draw_tokens(
            model.draft_logits(hidden), row_params, table, where, jnp.bool_(False)
        )
        is_finite &= is_own_finite | (number > 0)
        is_kept = drafted.samples & (positions < most)
        lines, columns = jnp.where(is_kept, rows, 0), jnp.where(is_kept, positions, 0)
        return hidden, tokens, is_finite, table.at[lines, columns].set(tokens), *kv_pools

    is_finite = jnp.ones(len(rows), jnp.bool_)
    carry = lax.fori_loop(0, num_drafts, draft_next, (hidden, tokens, is_finite, table, *kv_pools))
    _, _, is_finite, table, *pools = carry
    return (table, tuple(pools)), is_finite
