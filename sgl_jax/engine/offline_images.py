"""The images of the offline `Engine`: arrays or Pillow's images, placed in prompts."""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from sgl_jax.core.errors import InvalidRequestError
from sgl_jax.core.image_input import (
    FittedImage,
    ImageInput,
    ImageSettings,
    image_token_ids,
    place_images,
)


def with_images(
    prompt_ids: Sequence[int], given: Sequence[Any], info: dict[str, Any]
) -> tuple[list[int], tuple[ImageInput, ...]]:
    """Return a prompt with the tokens of its images in place of their placeholders, and the images.

    `given` are uint8 arrays [height, width, 3]; `info` is the engine's. Raises
    `InvalidRequestError`.
    """
    if info["images"] is None:
        raise InvalidRequestError(
            "this engine takes no images: it needs enable_multimodal=True and a model with a "
            "vision tower",
            "image_data",
        )
    settings = msgspec.convert(info["images"], ImageSettings)
    fitted = [_fitted(image, settings, info["vocab_size"]) for image in given]
    return place_images(prompt_ids, fitted, settings.image_token_id)


def _fitted(image: Any, settings: ImageSettings, vocab_size: int) -> FittedImage:
    pixels = np.asarray(image)
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3:
        raise InvalidRequestError(
            "an image must be uint8 [height, width, 3], got "
            f"{pixels.dtype.name} {list(pixels.shape)}",
            "image_data",
        )
    height, width, _ = pixels.shape
    data, num_tokens = pixels.tobytes(), settings.num_tokens(height, width)
    ids = image_token_ids(height, width, data, num_tokens, vocab_size)
    return FittedImage(height, width, data, ids)
