"""Drafts of the next step, computed by a draft layer at the end of a step.

They are stored in the token table after each row's last token. There the next step reads them, and
its verified tokens replace them. A row that has no room for drafts, or was just admitted, has
arbitrary tokens there; any token is a valid draft, since a step verifies each.
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
from sgl_jax.models.image_tokens import ImageTokens, RowImages

_Tables = tuple[jax.Array, tuple[jax.Array, ...]]  # the token table and the pools


class DraftRows(NamedTuple):
    """The B rows of a step, and which of them get drafts."""

    rows: jax.Array  # int32[B] rows of the token table
    lasts: jax.Array  # int32[B] position of each row's last accepted query
    samples: jax.Array  # bool[B] rows that have sampled a token, and so get drafts
    token_rows: jax.Array  # int32[T] row of the token table of each query


def draft_tokens(
    model: CausalLM,
    tables: _Tables,
    row_params: jax.Array,
    batches: Sequence[AttentionBatch],
    hidden: jax.Array,
    drafted: DraftRows,
    images: RowImages | None,
    num_drafts: int,
) -> tuple[_Tables, jax.Array]:
    """Write `num_drafts` drafts after each row's last token; also return, as bool[B], whether the
    logits of its first draft are finite. Later drafts follow guesses, which may be any token.

    The layer's KV is written for all queries of the step. Then each pass computes one position per
    row, starting at its last query. The next step overwrites the KV of later positions, computed
    from the model's hidden states. A draft is sampled with the parameters and noise of its token,
    so its acceptance depends only on how similar the distributions are, at any temperature.

    Args:
        model: a model with a draft layer.
        tables: the token table int32[num_rows, max_context_len], with the tokens just sampled, and
            the KV pools (`StepState.kv_pools`).
        row_params: int32[num_rows, packed_width] sampling parameters of all rows.
        batches: the step's batch for each cache group.
        hidden: [T, hidden_size] `draft_hidden` of the model for the step's queries.
        drafted: the step's rows.
        images: the images of all rows; None if none are served.
        num_drafts: static, at least 1.
    """
    batch, (table, kv_pools) = batches[0], tables
    rows, most = drafted.rows, table.shape[1]
    after = table.at[drafted.token_rows, batch.positions + 1].get(mode="clip")
    shown = ImageTokens.of_step(model.config, images, batch, drafted.token_rows, rows, after)
    # Only the KV is used: the compiler removes attention and feed-forward.
    _, kv_pools = model.draft(after, hidden, batches, kv_pools, shown)
    places = batch.q_offsets[:-1] + drafted.lasts - batch.kv_starts
    hidden = hidden.at[places].get(mode="clip")
    tokens = after.at[places].get(mode="clip")

    def draft_next(number: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        hidden, tokens, is_finite, table, *pools = carry
        # Positions past the table are only padding of a request's last page.
        positions = jnp.minimum(drafted.lasts + number, most - 1)
        one_each = AttentionBatch.build(
            *(batch.page_table, positions, jnp.minimum(batch.q_lens, 1)),
            *(batch.num_rows, len(rows)),
        )
        by_group = [replace(one_each, page_table=own.page_table) for own in batches]
        # The token after a chunk may be an image's.
        shown = ImageTokens.of_step(model.config, images, one_each, rows, rows, tokens)
        hidden, kv_pools = model.draft(tokens, hidden, by_group, tuple(pools), shown)
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
