"""What the tokens of a step read of images: their vectors, positions and spans.

The vectors of a rank's images are in a table on its chips, each with a part of the rows. In the
token table, a token of an image is the vocabulary's size plus its row.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sgl_jax.core.step_plan import IMAGE_FIELDS
from sgl_jax.layers.mesh_axes import TENSOR_AXIS, any_over_data


class ImageTokens(NamedTuple):
    """The tokens of one step, T with padding."""

    positions: jax.Array  # int32 [T], or [3, T] time, row and column
    slots: jax.Array  # int32 [T] row of the table; outside for other tokens
    table: jax.Array  # [rows of this chip, width]
    # `AttentionBatch.spans`, the images, for layers that see them whole; None: there are none
    spans: jax.Array | None = None

    @property
    def is_image(self) -> jax.Array:
        """Return bool [T], False for the tokens of texts."""
        return (self.slots >= 0) & (self.slots < self._num_slots)

    @property
    def _num_slots(self) -> int:
        return len(self.table) * lax.axis_size(TENSOR_AXIS)

    def split(
        self, hidden_size: int, join: Callable[[jax.Array], jax.Array]
    ) -> tuple[jax.Array, jax.Array | None]:
        """Return this chip's part of the images' vectors, [T, hidden_size], and what they add after
        the first layers, summed by `join` over the chips, [layers, T, hidden_size]."""
        num_rows, width = self.table.shape
        first = lax.axis_index(TENSOR_AXIS) * num_rows
        own = self.slots - first

        def read() -> tuple[jax.Array, jax.Array]:
            found = self.table.at[own].get(mode="fill", fill_value=0, wrap_negative_indices=False)
            vectors, further = found[:, :hidden_size], found[:, hidden_size:]
            return vectors, join(further) if width > hidden_size else further

        def nothing() -> tuple[jax.Array, jax.Array]:
            own, added = jax.eval_shape(read)
            return jnp.zeros(own.shape, own.dtype), jnp.zeros(added.shape, added.dtype)

        # Most steps have no token of an image. Ranks agree, since chips of a rank exchange values.
        vectors, added = lax.cond(any_over_data(jnp.any(self.is_image)), read, nothing)
        if width == hidden_size:
            return vectors, None
        by_layer = added.reshape(len(added), -1, hidden_size).transpose(1, 0, 2)
        return vectors, by_layer


def image_positions(positions: jax.Array, images: jax.Array) -> jax.Array:
    """Return the rotary positions of tokens, int32 [3, T].

    A text's tokens have the same position in all directions. An image's tokens have the position of
    its first token, moved by their row and column; the next text follows the larger side.

    Args:
        positions: int32 [T], the tokens' indices in their rows.
        images: int32 [T, most, IMAGE_FIELDS], the images of their rows, in order (see
            `RowAdmission`); unused entries begin after all tokens.
    """
    starts = images[..., 0]
    number = jnp.sum(starts <= positions[:, None], axis=1) - 1
    own = jnp.take_along_axis(images, jnp.maximum(number, 0)[:, None, None], axis=1)[:, 0]
    start, count, wide, moved = (own[:, i] for i in range(IMAGE_FIELDS))
    wide = jnp.maximum(wide, 1)
    index = positions - start
    is_inside = (number >= 0) & (index < count)
    after = jnp.where(number >= 0, moved + jnp.maximum(count // wide, wide) - count, 0)
    first = jnp.where(is_inside, start + moved, positions + after)
    row, column = (jnp.where(is_inside, n, 0) for n in (index // wide, index % wide))
    return jnp.stack([first, first + row, first + column])


def image_spans(images: jax.Array) -> jax.Array:
    """Return `AttentionBatch.spans` of rows with `images`, int32 [B, most, IMAGE_FIELDS]."""
    starts, counts = images[..., 0], images[..., 1]
    return jnp.stack([starts, starts + counts], axis=-1)
