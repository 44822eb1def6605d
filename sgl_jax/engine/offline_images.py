"""The images of the offline `Engine`: arrays or Pillow's images, placed in prompts."""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from PIL import Image

from sgl_jax.core.errors import InvalidRequestError
from sgl_jax.core.image_input import ImageInput, ImageSettings, place_images
from sgl_jax.text.images import fit_image

_PARAM = "image_data"


def with_images(
    prompt_ids: list[int], given: Sequence[Any], info: dict[str, Any]
) -> tuple[list[int], tuple[ImageInput, ...]]:
    """Return a prompt with the tokens of its images in place of their placeholders, and the images.

    `given` are Pillow's images or uint8 arrays [height, width, 3]; `info` is the engine's. Raises
    `InvalidRequestError`.
    """
    settings = settings_of(info)
    fitted = [fit_image(_as_image(image), settings, info["vocab_size"]).fitted for image in given]
    return place_images(prompt_ids, fitted, settings.image_token_id, _PARAM)


def settings_of(info: dict[str, Any]) -> ImageSettings:
    """Return what the images of an engine with this `info` must be like. Raises
    `InvalidRequestError` if it takes none."""
    if info["images"] is None:
        raise InvalidRequestError(
            "this engine takes no images: it needs enable_multimodal=True and a model with a "
            "vision tower",
            _PARAM,
        )
    return msgspec.convert(info["images"], ImageSettings)


def _as_image(given: Any) -> Image.Image:
    if isinstance(given, Image.Image):
        return given
    pixels = np.asarray(given)
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or not pixels.size:
        raise InvalidRequestError(
            "an image is one of Pillow, or uint8 [height, width, 3]; got "
            f"{pixels.dtype.name} {list(pixels.shape)}",
            _PARAM,
        )
    return Image.fromarray(pixels)
