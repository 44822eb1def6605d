"""A step's next tokens, and their log-probabilities, from logits split over the tensor chips."""

import jax
import jax.numpy as jnp
from jax import lax

from sgl_jax.layers.mesh_axes import any_over_data, join_shares, own_share
from sgl_jax.layers.sampling.logprobs import LogprobArrays, no_logprobs, token_logprobs
from sgl_jax.layers.sampling.row_params import RowParams, SampledRows, unpack_row_params
from sgl_jax.layers.sampling.sample import given_logits, is_elaborate, sample_tokens
from sgl_jax.layers.sampling.split_logits import SplitLogits


def draw_tokens(
    logits: SplitLogits,
    row_params: jax.Array,
    token_table: jax.Array,
    where: SampledRows,
    returns_logprobs: jax.Array,
    masks: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, LogprobArrays]:
    """Draw the next tokens of n rows.

    Args:
        logits: the model's logits. A batch of plain greedy rows exchanges none.
        row_params: int32[num_rows, packed_width] sampling parameters of all rows.
        token_table: int32[num_rows, max_context_len].
        where: the rows to draw.
        returns_logprobs: bool[], whether this rank reports log-probabilities.
        masks: int32[n, ceil(vocab_size / 32)] tokens that may be drawn; None if all. They do not
            change raw log-probabilities or the check for finite logits.

    Returns:
        Tokens int32[n], `finite_rows` of the logits bool[n], and log-probabilities, zeros if not
        requested; equal on all tensor chips.
    """
    num_rows = where.rows.shape[0]
    drawable = logits if masks is None else logits.allowed(masks)

    def from_whole_rows() -> tuple[jax.Array, jax.Array, LogprobArrays]:
        own = SampledRows(*map(own_share, where))
        rows = logits.whole_rows()
        params = unpack_row_params(row_params[own.rows])
        allowed = rows if masks is None else drawable.whole_rows()
        unmasked = None if masks is None else rows
        drawn = sample_tokens(allowed, params, token_table, own, returns_logprobs, unmasked)
        results: tuple[jax.Array, jax.Array, LogprobArrays] = jax.tree.map(
            lambda share: join_shares(share, num_rows), tuple(drawn)
        )
        return results

    params = unpack_row_params(row_params[where.rows])
    needs_rows = jnp.any(is_elaborate(params, where)) | returns_logprobs
    # All ranks take the same branch: logits are exchanged in it.
    drawn: tuple[jax.Array, jax.Array, LogprobArrays] = lax.cond(
        any_over_data(needs_rows),
        from_whole_rows,
        lambda: (
            *drawable.greedy_tokens(None if masks is None else logits),
            no_logprobs(num_rows),
        ),
    )
    return drawn


def score_tokens(logits: SplitLogits, tokens: jax.Array, params: RowParams) -> LogprobArrays:
    """Return `token_logprobs` of given tokens and of `params.logprob_ids`, equal on all tensor
    chips, of the distributions that `params.prompt_logprobs_mode` names."""
    own: RowParams = jax.tree.map(own_share, params)
    scored = token_logprobs(
        given_logits(logits.whole_rows(), own), own_share(tokens), own.logprob_ids
    )
    joined: LogprobArrays = jax.tree.map(lambda share: join_shares(share, tokens.shape[0]), scored)
    return joined
