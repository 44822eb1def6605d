"""The images of requests: decoded by the workers, and put into prompts as pseudo-ids."""

from collections.abc import Sequence
from typing import NamedTuple

from fastapi import Request

from sgl_jax.core import image_input
from sgl_jax.core.errors import InvalidRequestError
from sgl_jax.core.image_input import ImageInput, ImageSettings
from sgl_jax.core.messages import GenerateRequest
from sgl_jax.core.server_args import ServerArgs
from sgl_jax.server.chat_request import LOW_DETAIL_PIXELS, ImageUrl
from sgl_jax.server.guards.connection import unless_gone
from sgl_jax.server.image_fetch import fetch_image
from sgl_jax.server.references import References, references_of
from sgl_jax.text.jobs import DecodedImage, DecodeImage

_URL_HEADS = ("http://", "https://")


class Prompt(NamedTuple):
    """Token ids with the pseudo-ids of `images`, as in a `GenerateRequest`."""

    input_ids: list[int]
    images: tuple[ImageInput, ...] = ()


def check_images(refs: References, images: Sequence[ImageUrl]) -> None:
    """Raise `InvalidRequestError` if the model does not take so many images, or any."""
    most = refs.frontend.facts.max_images
    if images and refs.image_settings is None:
        raise InvalidRequestError(
            f"messages: {refs.model_name!r} takes no images: that needs a model with a vision "
            "tower, and --enable-multimodal",
            "messages",
            "unsupported_images",
        )
    if len(images) > most:
        raise InvalidRequestError(
            f"messages: {len(images)} images, at most {most} are taken (--max-images-per-request)",
            "messages",
        )


async def decode_images(
    request: Request, client: str, images: Sequence[ImageUrl]
) -> list[DecodedImage]:
    """Return all images of a request for the model, decoded by workers. `check_images` comes first.

    Raises:
        InvalidRequestError: one cannot be fetched or decoded.
        ApiError: decoding took too long, or the client went away.
    """
    refs = references_of(request)
    settings = refs.image_settings
    if settings is None or not images:
        return []
    named = [(f"image {n}" if len(images) > 1 else "the image") for n in range(1, len(images) + 1)]
    jobs = (_job_of(image, name, settings, refs) for image, name in zip(images, named, strict=True))
    return await unless_gone(request.receive, refs.texts.decode(client, jobs))


async def _job_of(
    image: ImageUrl, name: str, settings: ImageSettings, refs: References
) -> DecodeImage:
    limits, source, file = refs.limits, image.url, b""
    if source.lstrip()[:8].lower().startswith(_URL_HEADS):
        try:
            file = await fetch_image(
                source, _domains(refs.args), limits.max_image_bytes, limits.image_timeout_s
            )
        except InvalidRequestError as error:
            reason = f"{name}: {error}"
            raise InvalidRequestError(reason, "messages", "invalid_image") from error
        source = ""
    return DecodeImage(
        name=name,
        source=source,
        file=file,
        settings=settings,
        vocab_size=refs.frontend.facts.vocab_size,
        max_area=LOW_DETAIL_PIXELS if image.detail == "low" else None,
        max_bytes=limits.max_image_bytes,
        max_pixels=limits.max_image_pixels,
        seconds=limits.image_timeout_s,
    )


def _domains(args: ServerArgs) -> set[str]:
    names = (args.allowed_media_domains or "").split(",")
    return {name.strip().lower() for name in names if name.strip()}


def place_images(
    ids: list[int], images: Sequence[DecodedImage], settings: ImageSettings | None
) -> Prompt:
    """Replace each placeholder in `ids` by the pseudo-ids of the next image.

    Raises `InvalidRequestError` unless there are as many placeholders as images.
    """
    if settings is None or not images:
        return Prompt(ids)
    fitted = [image.fitted for image in images]
    return Prompt(*image_input.place_images(ids, fitted, settings.image_token_id, "messages"))


def ids_for_client(refs: References, prompt: Prompt | GenerateRequest) -> list[int]:
    """Return the prompt's ids with the model's placeholder in place of pseudo-ids."""
    settings = refs.image_settings
    if settings is None or not prompt.images:
        return prompt.input_ids
    ids = list(prompt.input_ids)
    for image in prompt.images:
        end = image.start + image.num_tokens
        ids[image.start : end] = [settings.image_token_id] * image.num_tokens
    return ids
