"""What the tokens of a step read of images: their vectors, positions and spans.

The vectors of a rank's images are in a table on its chips, each with a part of the rows. In the
token table, a token of an image is the vocabulary's size plus its row.
"""

from collections.abc import Callable
from typing import NamedTuple, Self, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from sgl_jax.core.step_plan import IMAGE_FIELDS
from sgl_jax.kernels.attention.batch import AttentionBatch
from sgl_jax.layers.mesh_axes import TENSOR_AXIS, any_over_data
from sgl_jax.models.config import ModelConfig

_T = TypeVar("_T")


class RowImages(NamedTuple):
    """The images of a rank's rows."""

    lists: jax.Array  # int32[num_rows, max_images, IMAGE_FIELDS]
    vectors: jax.Array  # [rows of this chip, width]


class ImageTokens(NamedTuple):
    """The tokens of one step, T with padding."""

    positions: jax.Array  # int32 [T], or [3, T] time, row and column
    slots: jax.Array  # int32 [T] row of the table; outside for other tokens
    table: jax.Array  # [rows of this chip, width]
    # `AttentionBatch.spans`, the images, for layers that see them whole; None: there are none
    spans: jax.Array | None = None

    @classmethod
    def of_step(
        cls,
        config: ModelConfig,
        images: RowImages | None,
        batch: AttentionBatch,
        token_rows: jax.Array,
        rows: jax.Array,
        tokens: jax.Array,
    ) -> Self | None:
        """Return what the queries of a step read; None if no images are served.

        Args:
            batch: the step's queries, T with padding.
            token_rows: int32 [T], the row of each.
            rows: int32 [B], the step's rows.
            tokens: int32 [T], the tokens that are embedded.
        """
        vision = config.vision
        if images is None or vision is None:
            return None
        positions = batch.positions
        if vision.has_axes:
            positions = image_positions(positions, images.lists[token_rows])
        return cls(
            positions,
            jnp.where(batch.valid, tokens - config.vocab_size, -1),
            images.vectors,
            image_spans(images.lists[rows]) if vision.whole_images else None,
        )

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
        width = self.table.shape[1]

        def read() -> tuple[jax.Array, jax.Array]:
            found = self._found(width)
            vectors, further = found[:, :hidden_size], found[:, hidden_size:]
            return vectors, join(further) if width > hidden_size else further

        vectors, added = self._if_any(read)
        if width == hidden_size:
            return vectors, None
        by_layer = added.reshape(len(added), -1, hidden_size).transpose(1, 0, 2)
        return vectors, by_layer

    def vectors(self, hidden_size: int) -> jax.Array:
        """Return this chip's part of the images' vectors, [T, hidden_size]."""
        return self._if_any(lambda: self._found(hidden_size))

    def _found(self, width: int) -> jax.Array:
        """Return the first `width` numbers of the tokens' rows; zeros if they are not here."""
        own = self.slots - lax.axis_index(TENSOR_AXIS) * len(self.table)
        rows = self.table.at[own].get(mode="fill", fill_value=0, wrap_negative_indices=False)
        return rows[:, :width]

    def _if_any(self, read: Callable[[], _T]) -> _T:
        """Return the result of `read`; zeros in the many steps without any image's token."""

        def nothing() -> _T:
            zeros: _T = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(read))
            return zeros

        # Ranks agree, since chips of a rank exchange values.
        found: _T = lax.cond(any_over_data(jnp.any(self.is_image)), read, nothing)
        return found


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
