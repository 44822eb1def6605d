"""Logits as the head leaves them: each tensor chip has the columns of its slice of the vocabulary.

A greedy token needs one value and one index of each chip. Sampling and log-probabilities need whole
rows: one chip computes them for each row, and sends only its results to the others. Rows of a large
vocabulary, in float32, are the largest arrays that a step could exchange.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sgl_jax.layers.mesh_axes import (
    TENSOR_AXIS,
    concatenate_over,
    pad_to_shares,
    split_rows_over_tensor,
)
from sgl_jax.layers.sampling.argmax import first_argmax


class SplitLogits(NamedTuple):
    """Logits of n rows, inside `jax.shard_map`."""

    columns: jax.Array  # float32[n, columns of this chip]; those past the vocabulary are padding
    vocab_size: int  # columns of all chips, without padding
    # int32[vocab_size] the token of each column, ascending; None: columns are tokens.
    token_ids: jax.Array | None = None
    num_tokens: int = 0  # that there are, with `token_ids`

    def allowed(self, masks: jax.Array) -> "SplitLogits":
        """The same, -inf for tokens that are not allowed.

        `masks` int32[n, ceil(vocab_size / 32)], bit i of word w for token 32 w + i, equal on all
        tensor chips.
        """
        assert self.token_ids is None, "masks are by column"
        width = self.columns.shape[1]
        first = lax.axis_index(TENSOR_AXIS) * width
        bits = (masks[:, :, None] >> jnp.arange(32)) & 1
        of_all = bits.reshape(len(masks), -1)
        num_padding = width * lax.axis_size(TENSOR_AXIS) - of_all.shape[1]
        of_all = jnp.pad(of_all, ((0, 0), (0, max(num_padding, 0))))
        is_allowed = lax.dynamic_slice_in_dim(of_all, first, width, axis=1) != 0
        return self._replace(columns=jnp.where(is_allowed, self.columns, -jnp.inf))

    def greedy_tokens(self) -> jax.Array:
        """The lowest id of each row's largest logit, int32[n], equal on all tensor chips.

        Always a valid id, even where logits are NaN.
        """
        width = self.columns.shape[1]
        first = lax.axis_index(TENSOR_AXIS) * width
        columns = self.columns
        if width * lax.axis_size(TENSOR_AXIS) > self.vocab_size:
            columns = jnp.where(first + jnp.arange(width) < self.vocab_size, columns, -jnp.inf)
        ids = jnp.minimum(first + first_argmax(columns), self.vocab_size - 1)
        if lax.axis_size(TENSOR_AXIS) == 1:
            return self._tokens_of(ids)
        # One exchange of both: an integer array holds the values' bits.
        largest = lax.bitcast_convert_type(jnp.max(columns, axis=-1), jnp.int32)
        pairs = concatenate_over(TENSOR_AXIS, jnp.stack([largest, ids])[None])
        values = lax.bitcast_convert_type(pairs[:, 0], jnp.float32)
        # Chips are in the order of their ids, so of equal values the lowest id wins.
        chip = first_argmax(values.T)
        return self._tokens_of(jnp.take_along_axis(pairs[:, 1], chip[None], axis=0)[0])

    def whole_rows(self) -> jax.Array:
        """This chip's share of the rows, float32[ceil(n / chips), tokens], as `own_share`; -inf for
        tokens without a column."""
        rows = split_rows_over_tensor(pad_to_shares(self.columns))[:, : self.vocab_size]
        if self.token_ids is None:
            return rows
        all_tokens = jnp.full((rows.shape[0], self.num_tokens), -jnp.inf, rows.dtype)
        return all_tokens.at[:, self.token_ids].set(
            rows, indices_are_sorted=True, unique_indices=True
        )

    def _tokens_of(self, columns: jax.Array) -> jax.Array:
        return columns if self.token_ids is None else self.token_ids[columns]
