"""The images in the histories of sessions.

A history has only their tokens. The pixels are kept as long as the session: its rows in the prefix
cache may be evicted, and are then computed again.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from sgl_jax.core.errors import InvalidRequestError
from sgl_jax.core.image_input import ImageInput
from sgl_jax.core.messages import GenerateRequest
from sgl_jax.core.step_plan import Int32Array


class KnownImage(NamedTuple):
    """The tokens of an image, and the image."""

    tokens: Int32Array
    image: ImageInput


KnownImages = dict[int, KnownImage]  # by the first token


def known_images(message: GenerateRequest) -> KnownImages:
    """Return the images of a turn's own prompt."""
    ids = np.array(message.input_ids if message.images else (), np.int32)
    return {
        int(ids[image.start]): KnownImage(ids[image.start : image.start + image.num_tokens], image)
        for image in message.images
    }


def kept_images(known: KnownImages, kept: Iterable[Int32Array]) -> KnownImages:
    """Return the images of which a session keeps the first token, in any of the lists `kept`."""
    firsts = np.fromiter(known, np.int32, len(known))
    found = set[int]()
    for tokens in kept:
        found.update(firsts[np.isin(firsts, tokens)].tolist())
    return {first: image for first, image in known.items() if first in found}


def find_images(prompt: Int32Array, known: KnownImages, vocab_size: int) -> tuple[ImageInput, ...]:
    """Return the images of a whole prompt, with their places in it.

    Raises `InvalidRequestError` if one is cut, or not known: of saved sessions, not all images are
    saved.
    """
    return tuple(_found(prompt, known, vocab_size))


def _found(prompt: Int32Array, known: KnownImages, vocab_size: int) -> Iterable[ImageInput]:
    end = 0
    for start in np.flatnonzero(prompt >= vocab_size).tolist():
        if start < end:
            continue
        found = known.get(int(prompt[start]))
        if found is None:
            raise InvalidRequestError(
                "the session's history has an image that is no longer there: open a new session "
                "with the whole conversation",
                "session_params",
            )
        own = prompt[start : start + len(found.tokens)]
        if not np.array_equal(own, found.tokens):
            kept = np.count_nonzero(own == found.tokens[: len(own)])
            raise InvalidRequestError(
                f"offset keeps {kept} of the {len(found.tokens)} tokens of an image of the "
                "session's history: keep all of them, or none",
                "session_params",
            )
        image = found.image
        end = start + image.num_tokens
        yield ImageInput(
            start=start,
            num_tokens=image.num_tokens,
            height=image.height,
            width=image.width,
            pixels=image.pixels,
        )
