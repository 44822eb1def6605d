"""Rotary positions with images, next to a plain loop over the tokens."""

import jax.numpy as jnp
import numpy as np

from sgl_jax.core.image_input import ImageInput
from sgl_jax.models.image_tokens import image_positions
from sgl_jax.scheduler.image_cache import image_lists

SIDE, UNUSED = 8, (2**31 - 1, 0, 0, 0)


def expected(images: list[ImageInput], length: int) -> np.ndarray:
    """Return the positions as transformers' `get_rope_index` defines them, int [3, length]."""
    found, following = [], 0
    for token in range(length):
        image = next((i for i in images if i.start <= token < i.start + i.num_tokens), None)
        if image is None:
            found.append((following, following, following))
            following += 1
            continue
        tall, wide = image.height // SIDE, image.width // SIDE
        row, column = divmod(token - image.start, wide)
        found.append((following, following + row, following + column))
        if token + 1 == image.start + image.num_tokens:
            following += max(tall, wide)
    return np.array(found).T


def image(start: int, tall: int, wide: int) -> ImageInput:
    return ImageInput(
        start=start, num_tokens=tall * wide, height=tall * SIDE, width=wide * SIDE, pixels=b""
    )


def test_positions_follow_rows_and_columns_of_images() -> None:
    chats = [[], [image(0, 2, 5)], [image(4, 3, 2), image(10, 1, 1), image(30, 2, 7)]]
    lists = np.full((len(chats), 4, 4), UNUSED, np.int32)
    for own, images in zip(lists, chats, strict=True):
        own[: len(images)] = image_lists(images, SIDE)
    length = 60
    positions = np.tile(np.arange(length, dtype=np.int32), len(chats))
    of_rows = np.repeat(lists, length, axis=0)
    found = np.asarray(image_positions(jnp.asarray(positions), jnp.asarray(of_rows)))
    np.testing.assert_array_equal(found, np.hstack([expected(own, length) for own in chats]))
