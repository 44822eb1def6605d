"""Checks the images of a request against the limits of one engine."""

from collections.abc import Sequence
from typing import Protocol

from sgl_jax.core.errors import InvalidRequestError
from sgl_jax.core.image_input import ImageInput


class ImageLimits(Protocol):
    """The limits of images, as in `EngineFacts`."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def max_images(self) -> int: ...
    @property
    def max_image_tokens(self) -> int: ...
    @property
    def image_token_side(self) -> int: ...


def check_placed(
    images: Sequence[ImageInput], prompt_ids: Sequence[int], limits: ImageLimits
) -> None:
    """Raise `InvalidRequestError` if the engine cannot take the images of a prompt."""
    if not limits.max_images:
        raise InvalidRequestError(
            "this server takes no images: it needs --enable-multimodal and a model with a vision "
            "tower",
            "images",
        )
    if len(images) > limits.max_images:
        raise InvalidRequestError(
            f"the prompt has {len(images)} images, at most {limits.max_images} are taken "
            "(--max-images-per-request)",
            "images",
        )
    end, side = 0, limits.image_token_side
    for number, image in enumerate(images):
        problem = None
        if image.num_tokens > limits.max_image_tokens:
            problem = f"it has {image.num_tokens} tokens, at most {limits.max_image_tokens} fit"
        elif min(image.height, image.width) < side or image.height % side or image.width % side:
            problem = f"{image.height} x {image.width} pixels are no multiples of {side}"
        elif image.num_tokens != image.height * image.width // side**2:
            problem = f"{image.height} x {image.width} pixels do not have {image.num_tokens} tokens"
        elif len(image.pixels) != 3 * image.height * image.width:
            problem = f"it has {len(image.pixels)} bytes for {image.height} x {image.width} pixels"
        elif not end <= image.start <= len(prompt_ids) - image.num_tokens:
            problem = f"its first token, {image.start}, is not after the image before it"
        elif min(prompt_ids[image.start : image.start + image.num_tokens]) < limits.vocab_size:
            problem = "its tokens are in the vocabulary"
        if problem is not None:
            raise InvalidRequestError(f"image {number}: {problem}", "images")
        end = image.start + image.num_tokens


def without_images(prompt_ids: Sequence[int], images: Sequence[ImageInput]) -> list[int]:
    """Return the tokens of a prompt that belong to no image."""
    texts, end = list[int](), 0
    for image in images:
        texts += prompt_ids[end : image.start]
        end = image.start + image.num_tokens
    return [*texts, *prompt_ids[end:]]
