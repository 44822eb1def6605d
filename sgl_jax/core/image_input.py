"""The images of requests: what the server sends, and what it needs to know of the model.

In the token list of a prompt, an image is a run of pseudo-ids above the vocabulary, computed from
its pixels. So prefix trees, sessions and block stores, which compare tokens, tell images apart by
their content.
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from sgl_jax.core.errors import InvalidRequestError

_LARGEST_ID = 2**31 - 1


class ImageInput(msgspec.Struct, frozen=True, kw_only=True):
    """An image of a prompt, resized for the model.

    Args:
        start: index of its first token in the prompt.
        num_tokens: number of its tokens, see `ImageSettings.num_tokens`.
        height, width: in pixels, multiples of `ImageSettings.side_multiple`.
        pixels: uint8 [height, width, 3], red, green and blue, in rows.
    """

    start: int
    num_tokens: int
    height: int
    width: int
    pixels: bytes


class FittedImage(NamedTuple):
    """An image resized for the model, before it has a place in a prompt."""

    height: int
    width: int
    pixels: bytes
    token_ids: list[int]  # see `image_token_ids`


class ImageSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a model's images must be like. The engine normalizes pixels and cuts the patches.

    Args:
        patch_size: side of a patch in pixels.
        merge_size: a token has this number of patches in each direction.
        min_pixels, max_pixels: bounds of height * width after resizing.
        mean, std: of red, green and blue, of pixel values divided by 255.
        image_token_id: the placeholder of an image in token ids.
        fit: how an image is resized. "bounds": only as far as the bounds need; "budget": as large
            as `max_pixels` allow, with its ratio of sides; "square": to a square of `max_pixels`.
        resample: the filter.
        written_id: the token that a chat template writes for an image; None: `image_token_id`.
        expansion: the texts and tokens that are written in its place, before the text is tokenized.
    """

    patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    image_token_id: int
    fit: Literal["bounds", "budget", "square"] = "bounds"
    resample: Literal["bilinear", "bicubic"] = "bicubic"
    written_id: int | None = None
    expansion: tuple[int | str, ...] = ()

    @property
    def placeholder_id(self) -> int:
        """Return the placeholder of an image in a text."""
        return self.image_token_id if self.written_id is None else self.written_id

    def expanded(self, text: str, text_of: Callable[[int], str]) -> str:
        """Return `text` with the expansion of each placeholder; `text_of` writes a token, or "" if
        the tokenizer has none."""
        placeholder = text_of(self.placeholder_id)
        if not self.expansion or not placeholder:
            return text
        parts = (part if isinstance(part, str) else text_of(part) for part in self.expansion)
        return text.replace(placeholder, "".join(parts))

    @property
    def side_multiple(self) -> int:
        return self.patch_size * self.merge_size

    @property
    def max_tokens(self) -> int:
        """Return the number of tokens of the largest image."""
        return self.max_pixels // self.side_multiple**2

    def num_tokens(self, height: int, width: int) -> int:
        """Return the number of tokens of an image with these sides in pixels."""
        return (height // self.side_multiple) * (width // self.side_multiple)


def image_token_ids(
    height: int, width: int, pixels: bytes, num_tokens: int, vocab_size: int
) -> list[int]:
    """Return the pseudo-ids of an image, in [vocab_size, 2**31).

    They spell a hash of its size and pixels: images that differ have different first tokens, except
    for one pair in about 2**31, and differ in nearly all tokens.
    """
    digest = hashlib.sha256(f"{height}x{width} ".encode())
    digest.update(pixels)
    spelled = hashlib.shake_256(digest.digest()).digest(4 * num_tokens)
    words = np.frombuffer(spelled, "<u4").astype(np.int64)
    ids: list[int] = (vocab_size + words % (_LARGEST_ID + 1 - vocab_size)).tolist()
    return ids


def place_images(
    prompt_ids: list[int], images: Sequence[FittedImage], image_token_id: int, param: str
) -> tuple[list[int], tuple[ImageInput, ...]]:
    """Return a prompt with each placeholder replaced by the tokens of the next image, and the
    images in it.

    Raises `InvalidRequestError`, naming `param`, unless there are as many placeholders as images.
    """
    num_places = prompt_ids.count(image_token_id)
    if num_places != len(images):
        raise InvalidRequestError(
            f"{param}: {len(images)} images need as many placeholders (token {image_token_id}) in "
            f"the prompt, which has {num_places}",
            param,
        )
    placed, inputs, begin = list[int](), list[ImageInput](), 0
    for image in images:
        at = prompt_ids.index(image_token_id, begin)
        placed += prompt_ids[begin:at]
        inputs.append(
            ImageInput(
                start=len(placed),
                num_tokens=len(image.token_ids),
                height=image.height,
                width=image.width,
                pixels=image.pixels,
            )
        )
        placed += image.token_ids
        begin = at + 1
    return placed + prompt_ids[begin:], tuple(inputs)
