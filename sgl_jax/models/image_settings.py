"""How a family's images are resized and normalised, read from `preprocessor_config.json` and the
token ids of `config.json`."""

import math
from collections.abc import Mapping
from typing import Any

from sgl_jax.core.image_input import ImageSettings
from sgl_jax.models.config_fields import (
    CONFIG_FILE,
    ModelConfigError,
    is_int,
    object_field,
    positive_float,
    positive_int,
    required,
)

_SIDE = {"patch_size": 16, "merge_size": 2}
# Pixels of an image after resizing, if the files do not say.
_DEFAULT_SIZE = {"shortest_edge": 65536, "longest_edge": 16777216}
_HALF = (0.5, 0.5, 0.5)
_BILINEAR, _BICUBIC = 2, 3
_FIXED: Mapping[str, tuple[Any, ...]] = {
    "do_convert_rgb": (True,),
    "do_normalize": (True,),
    "do_rescale": (True,),
    "do_resize": (True,),
    "resample": (_BICUBIC,),
    "rescale_factor": (1 / 255,),
    "temporal_patch_size": (2,),
}
_GEMMA4_FIXED: Mapping[str, tuple[Any, ...]] = {
    **_FIXED,
    "do_normalize": (False, True),  # equal, because of the mean and std below
    "image_mean": ([0.0, 0.0, 0.0],),
    "image_std": ([1.0, 1.0, 1.0],),
}
_GEMMA3_FIXED: Mapping[str, tuple[Any, ...]] = {
    **_FIXED,
    "do_pan_and_scan": (False,),
    "resample": (_BILINEAR,),
}


def _check_fixed(raw: Mapping[str, Any], fixed: Mapping[str, tuple[Any, ...]]) -> None:
    for name, allowed in fixed.items():
        if raw.get(name) is not None and raw[name] not in allowed:
            raise ModelConfigError(f"{name} must be {allowed[0]!r}, got {raw[name]!r}")


def read_qwen_settings(
    config: Mapping[str, Any], vision: Mapping[str, Any], raw: Mapping[str, Any]
) -> ImageSettings:
    _check_fixed(raw, _FIXED)
    patch = positive_int(vision, "patch_size", _SIDE["patch_size"])
    merge = positive_int(vision, "spatial_merge_size", _SIDE["merge_size"])
    for name, own in (("patch_size", patch), ("merge_size", merge)):
        if positive_int(raw, name, own) != own:
            raise ModelConfigError(
                f"{name} is {raw[name]}, but vision_config of {CONFIG_FILE} has {own}"
            )
    size = _DEFAULT_SIZE | object_field(raw, "size")
    # An older form, which takes precedence.
    smallest = positive_int(raw, "min_pixels", positive_int(size, "shortest_edge"))
    largest = positive_int(raw, "max_pixels", positive_int(size, "longest_edge"))
    if not (patch * merge) ** 2 <= largest or smallest > largest:
        raise ModelConfigError(
            f"size must have shortest_edge <= longest_edge, and room for one token of "
            f"{patch * merge} x {patch * merge} pixels, got {smallest} and {largest}"
        )
    return ImageSettings(
        patch_size=patch,
        merge_size=merge,
        min_pixels=smallest,
        max_pixels=largest,
        mean=_channels(raw, "image_mean"),
        std=_channels(raw, "image_std"),
        image_token_id=_token_id(config, "image_token_id"),
    )


def read_gemma3_settings(
    config: Mapping[str, Any], vision: Mapping[str, Any], raw: Mapping[str, Any]
) -> ImageSettings:
    _check_fixed(raw, _GEMMA3_FIXED)
    side = positive_int(vision, "image_size", 224)
    patch = positive_int(vision, "patch_size", 16)
    size = {"height": side, "width": side} | object_field(raw, "size")
    if (size["height"], size["width"]) != (side, side):
        raise ModelConfigError(
            f"size must be {side} x {side}, as image_size of vision_config, got {size!r}"
        )
    num_tokens = positive_int(config, "mm_tokens_per_image", 256)
    across = math.isqrt(num_tokens)
    if across**2 != num_tokens or side % (patch * across):
        raise ModelConfigError(
            f"mm_tokens_per_image ({num_tokens}) must be a square of whole patches of {patch} x "
            f"{patch} pixels in an image of {side} x {side}"
        )
    image, begin, end = (
        _token_id(config, f"{name}_token_id", f"{name}_token_index", default)
        for name, default in (("image", 262144), ("boi", 255999), ("eoi", 256000))
    )
    return ImageSettings(
        patch_size=patch,
        merge_size=side // patch // across,
        min_pixels=side**2,
        max_pixels=side**2,
        mean=_channels(raw, "image_mean"),
        std=_channels(raw, "image_std"),
        image_token_id=image,
        fit="square",
        resample="bilinear",
        written_id=begin,
        expansion=("\n\n", begin, image, end, "\n\n"),
    )


def read_gemma4_settings(
    config: Mapping[str, Any], vision: Mapping[str, Any], raw: Mapping[str, Any]
) -> ImageSettings:
    _check_fixed(raw, _GEMMA4_FIXED)
    patch = positive_int(vision, "patch_size", 16)
    merge = positive_int(vision, "pooling_kernel_size", 3)
    for name, own in (("patch_size", patch), ("pooling_kernel_size", merge)):
        if positive_int(raw, name, own) != own:
            raise ModelConfigError(
                f"{name} is {raw[name]}, but vision_config of {CONFIG_FILE} has {own}"
            )
    usual = positive_int(config, "vision_soft_tokens_per_image", 280)
    image, begin, end = (
        _token_id(config, f"{name}_token_id", default=default)
        for name, default in (("image", 258880), ("boi", 255999), ("eoi", 258882))
    )
    return ImageSettings(
        patch_size=patch,
        merge_size=merge,
        min_pixels=(patch * merge) ** 2,
        max_pixels=(patch * merge) ** 2 * positive_int(raw, "max_soft_tokens", usual),
        mean=_HALF,  # the model maps pixels from [0, 1] to [-1, 1]
        std=_HALF,
        image_token_id=image,
        fit="budget",
        expansion=(begin, image, end),
    )


def _token_id(
    config: Mapping[str, Any], name: str, other: str = "", default: int | None = None
) -> int:
    """Return the token of field `name`, or `other` in some configs."""
    given: list[Any] = [config[own] for own in (name, other) if config.get(own) is not None]
    value = given[0] if given else default
    if value is None:
        value = required(config, name)
    if not is_int(value) or value < 0:
        raise ModelConfigError(f"{name} must be a token id, got {value!r}")
    return int(value)


def _channels(raw: Mapping[str, Any], name: str) -> tuple[float, float, float]:
    values = raw.get(name) or list(_HALF)
    if not isinstance(values, list) or len(values) != len(_HALF):
        raise ModelConfigError(f"{name} must be a list of three numbers, got {values!r}")
    red, green, blue = (positive_float({name: value}, name) for value in values)
    return red, green, blue
