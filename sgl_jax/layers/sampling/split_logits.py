"""Logits after the head: each tensor chip has the columns of its slice of the vocabulary.

A greedy token needs one value and one index of each chip. Sampling and log-probabilities need whole
rows: one chip computes them for each row, and sends only its results to the other chips. Rows of a
large vocabulary, in float32, are the largest arrays that a step could exchange.
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
from sgl_jax.layers.sampling.race import first_argmax


class SplitLogits(NamedTuple):
    """Logits of n rows, inside `jax.shard_map`."""

    columns: jax.Array  # float32[n, columns of this chip]; those past the vocabulary are padding
    vocab_size: int  # columns of all chips, without padding
    # int32[vocab_size] the token of each column, ascending; None: columns are tokens.
    token_ids: jax.Array | None = None
    num_tokens: int = 0  # size of the vocabulary, if there are `token_ids`

    def allowed(self, masks: jax.Array) -> "SplitLogits":
        """Return logits with -inf for tokens that `masks` does not allow.

        `masks` int32[n, ceil(vocab_size / 32)] has token 32 w + i in bit i of word w, and is equal
        on all tensor chips.
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

    def greedy_tokens(self, unmasked: "SplitLogits | None" = None) -> tuple[jax.Array, jax.Array]:
        """Return the lowest id of each row's largest logit, int32[n], and `finite_rows`, bool[n].

        Both are equal on all tensor chips. The id is valid even if logits are NaN. `unmasked` are
        the logits before `allowed`, to check for finite rows; None if these are unmasked.
        """
        columns = self._known_columns()
        first = lax.axis_index(TENSOR_AXIS) * columns.shape[1]
        ids = jnp.minimum(first + first_argmax(columns), self.vocab_size - 1)
        values = [jnp.max(columns, axis=-1)]
        if unmasked is not None:
            values.append(jnp.max(unmasked._known_columns(), axis=-1))
        if lax.axis_size(TENSOR_AXIS) == 1:
            return self._tokens_of(ids), jnp.isfinite(values[-1])
        # One exchange for both: an integer array holds the values' bits.
        bits = [lax.bitcast_convert_type(each, jnp.int32) for each in values]
        words = concatenate_over(TENSOR_AXIS, jnp.stack([ids, *bits])[None])
        largest = lax.bitcast_convert_type(words[:, 1:], jnp.float32)
        # Chips are in the order of their ids, so the lowest id of equal values wins.
        chip = first_argmax(largest[:, 0].T)
        ids = jnp.take_along_axis(words[:, 0], chip[None], axis=0)[0]
        return self._tokens_of(ids), jnp.isfinite(jnp.max(largest[:, -1], axis=0))

    def _known_columns(self) -> jax.Array:
        """Return this chip's columns, with -inf past the vocabulary."""
        width, num_chips = self.columns.shape[1], lax.axis_size(TENSOR_AXIS)
        if width * num_chips == self.vocab_size:
            return self.columns
        ids = lax.axis_index(TENSOR_AXIS) * width + jnp.arange(width)
        return jnp.where(ids < self.vocab_size, self.columns, -jnp.inf)

    def whole_rows(self) -> jax.Array:
        """Return this chip's share of rows, float32[ceil(n / chips), tokens], padded with -inf."""
        rows = split_rows_over_tensor(pad_to_shares(self.columns))[:, : self.vocab_size]
        if self.token_ids is None:
            return rows
        all_tokens = jnp.full((rows.shape[0], self.num_tokens), -jnp.inf, rows.dtype)
        return all_tokens.at[:, self.token_ids].set(
            rows, indices_are_sorted=True, unique_indices=True
        )

    def _tokens_of(self, columns: jax.Array) -> jax.Array:
        return columns if self.token_ids is None else self.token_ids[columns]
