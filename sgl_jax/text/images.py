"""Decodes the images of requests, and resizes them as the model's processor in transformers does.

Runs in worker processes (`worker.py`), because the decoders are native code on a client's bytes.
Must never open a file or a connection.
"""

import base64
import binascii
import io
import math
import re
from urllib.parse import unquote

import numpy as np
from PIL import Image, ImageOps, WebPImagePlugin

from sgl_jax.core.errors import InvalidRequestError
from sgl_jax.core.image_input import ImageSettings, image_token_ids
from sgl_jax.text.jobs import DecodedImage, DecodeImage

Image.preinit()  # the formats of these and WebP; `Image.open` would import the rest
assert WebPImagePlugin.SUPPORTED
Image.MAX_IMAGE_PIXELS = None  # jobs set the limit
_MAX_RATIO = 200  # of the sides, as in the model's processor
_DATA_URI = re.compile(r"\s*data:(?P<kind>[^,;]*)(?P<options>(?:;[^,;]*)*),", re.IGNORECASE)
_KINDS = ("image/", "application/octet-stream")
_FILTERS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
_URL_SAFE = str.maketrans("-_", "+/", " \t\r\n=")


def decode_image(job: DecodeImage) -> DecodedImage:
    """Return the job's image for the model.

    Raises:
        InvalidRequestError: its form, format or size is refused, or it cannot be decoded.
    """
    try:
        data = job.file or _file_of(job.source, job.max_bytes)
        image = _opened(data, job.max_pixels)
        return fit_image(image, job.settings, job.vocab_size, max_area=job.max_area)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{job.name}: {error}", "messages", "invalid_image") from error
    except MemoryError as error:
        reason = f"{job.name}: it takes too much memory to decode"
        raise InvalidRequestError(reason, "messages", "invalid_image") from error
    # Decoders raise errors of any type for a malformed file.
    except Exception as error:
        reason = f"{job.name}: it cannot be decoded: {error}"
        raise InvalidRequestError(reason, "messages", "invalid_image") from error


def fit_image(
    image: Image.Image, settings: ImageSettings, vocab_size: int, *, max_area: int | None = None
) -> DecodedImage:
    """Return an image resized for the model, with its pseudo-ids.

    Args:
        vocab_size: of the model; pseudo-ids are above it.
        max_area: bounds height * width, if it is less than `settings.max_pixels`.

    Raises:
        InvalidRequestError: one side is more than `_MAX_RATIO` times the other.
    """
    upright = _in_rgb(ImageOps.exif_transpose(image))
    height, width = fitted_size(upright.height, upright.width, settings, max_area)
    if (width, height) != upright.size:
        upright = upright.resize((width, height), _FILTERS[settings.resample])
    num_tokens = settings.num_tokens(height, width)
    pixels = upright.tobytes()
    ids = image_token_ids(height, width, pixels, num_tokens, vocab_size)
    return DecodedImage(height, width, pixels, np.asarray(ids, np.int32).tobytes())


def fitted_size(
    height: int, width: int, settings: ImageSettings, max_area: int | None = None
) -> tuple[int, int]:
    """Return height and width, multiples of `settings.side_multiple`, after resizing.

    The rules are those of the models' processors. With "bounds" (Qwen), round both sides; if the
    area is out of bounds, scale both sides before they are rounded, down to the upper bound or up
    to the lower bound. With "budget" (Gemma 4), scale both sides to the upper bound, then round
    down; a side has at least one token.
    """
    sides, unit, least = (height, width), settings.side_multiple, settings.min_pixels
    most = settings.max_pixels
    if max_area is not None:
        most = max(least, min(most, max_area))
    if settings.fit == "square":
        return math.isqrt(settings.max_pixels), math.isqrt(settings.max_pixels)
    if settings.fit == "budget":
        return _within_budget(height, width, most, unit)
    if max(sides) > _MAX_RATIO * min(sides):
        raise InvalidRequestError(
            f"it has {width} x {height} pixels: one side may be at most {_MAX_RATIO} times the "
            "other"
        )
    rounded_height, rounded_width = (round(side / unit) * unit for side in sides)
    if rounded_height * rounded_width > most:
        factor = math.sqrt(height * width / most)
        rounded_height, rounded_width = (
            max(1, math.floor(side / factor / unit)) * unit for side in sides
        )
    elif rounded_height * rounded_width < least:
        factor = math.sqrt(least / (height * width))
        rounded_height, rounded_width = (math.ceil(side * factor / unit) * unit for side in sides)
    return rounded_height, rounded_width


def _within_budget(height: int, width: int, most: int, unit: int) -> tuple[int, int]:
    factor = math.sqrt(most / (height * width))
    tall, wide = (math.floor(factor * side / unit) for side in (height, width))
    if not tall:
        tall, wide = 1, min(width // height, most // unit**2)
    elif not wide:
        tall, wide = min(height // width, most // unit**2), 1
    return tall * unit, wide * unit


def _in_rgb(image: Image.Image) -> Image.Image:
    """Convert an image to RGB, over white where it is transparent."""
    if not image.has_transparency_data:
        return image.convert("RGB")
    white = Image.new("RGBA", image.size, "white")
    return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")


def _opened(data: bytes, max_pixels: int) -> Image.Image:
    """Read the header of an image file, and check the size that it states."""
    image = Image.open(io.BytesIO(data), formats=(_format_of(data),))
    if image.width * image.height > max_pixels:
        raise InvalidRequestError(
            f"it has {image.width} x {image.height} pixels, at most {max_pixels} are taken"
        )
    return image


def _format_of(data: bytes) -> str:
    """Return the format by the first bytes: clients often declare another one."""
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "PNG"
    if data.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return "WEBP"
    raise InvalidRequestError("it must be a PNG, JPEG or WebP file")


def _file_of(text: str, max_bytes: int) -> bytes:
    """Return the bytes of a data URI, or of base64 without a URI's head."""
    head = _DATA_URI.match(text)
    if head is not None:
        kind = head["kind"].strip().lower()
        if kind and not kind.startswith(_KINDS):
            raise InvalidRequestError(f"the data URI is of type {kind[:64]}, not an image")
        if "base64" not in [each.strip().lower() for each in head["options"].split(";")]:
            raise InvalidRequestError("the data URI must be base64")
        text = text[head.end() :]
        text = unquote(text) if "%" in text else text
    digits = text.translate(_URL_SAFE)
    if len(digits) * 3 // 4 > max_bytes:
        raise InvalidRequestError(f"its file exceeds the {max_bytes} bytes that are taken")
    try:
        return base64.b64decode(digits + "=" * (-len(digits) % 4), validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequestError("it is not base64") from error
