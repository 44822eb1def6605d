"""Reads how a model's images are resized and normalised: `preprocessor_config.json` and the token
ids of `config.json`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sgl_jax.core.image_input import ImageSettings
from sgl_jax.models.config_fields import (
    CONFIG_FILE,
    ModelConfigError,
    is_int,
    object_field,
    positive_float,
    positive_int,
    read_json,
    required,
)

# Published checkpoints have one of them.
_FILES = ("preprocessor_config.json", "processor_config.json")
_SIDE = {"patch_size": 16, "merge_size": 2}
# Pixels of an image after resizing, if the files do not say.
_DEFAULT_SIZE = {"shortest_edge": 65536, "longest_edge": 16777216}
_HALF = (0.5, 0.5, 0.5)
_FIXED: Mapping[str, tuple[Any, ...]] = {
    "do_convert_rgb": (True,),
    "do_normalize": (True,),
    "do_rescale": (True,),
    "do_resize": (True,),
    "resample": (3,),  # bicubic
    "rescale_factor": (1 / 255,),
    "temporal_patch_size": (2,),
}


def read_image_settings(model_path: str | Path) -> ImageSettings | None:
    """Read the settings of a model's folder or config.json; None if it is a text model.

    Raises ModelConfigError, naming the file and the field, for values that are not supported.
    """
    path = Path(model_path)
    config_file = path if path.is_file() else path / CONFIG_FILE
    if not config_file.is_file():
        return None
    folder, config = config_file.parent, read_json(config_file)
    vision = object_field(config, "vision_config")
    if not vision or "image_token_id" not in config or "vision_start_token_id" not in config:
        return None
    file = "" if path.is_file() else _present_file(folder)
    raw = read_json(folder / file) if file else {}
    raw = raw.get("image_processor", raw)
    try:
        return _settings(config, vision, raw)
    except ModelConfigError as error:
        name = str(folder / (file or CONFIG_FILE))
        raise ModelConfigError(f"{name!r}: {error}", file or CONFIG_FILE) from error


def _present_file(folder: Path) -> str:
    return next((name for name in _FILES if (folder / name).is_file()), "")


def _settings(
    config: Mapping[str, Any], vision: Mapping[str, Any], raw: Mapping[str, Any]
) -> ImageSettings:
    for name, allowed in _FIXED.items():
        if raw.get(name) is not None and raw[name] not in allowed:
            raise ModelConfigError(f"{name} must be {allowed[0]!r}, got {raw[name]!r}")
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
        image_token_id=_image_token_id(config),
    )


def _image_token_id(config: Mapping[str, Any]) -> int:
    value = required(config, "image_token_id")
    if not is_int(value) or value < 0:
        raise ModelConfigError(f"image_token_id must be a token id, got {value!r}")
    return int(value)


def _channels(raw: Mapping[str, Any], name: str) -> tuple[float, float, float]:
    values = raw.get(name) or list(_HALF)
    if not isinstance(values, list) or len(values) != len(_HALF):
        raise ModelConfigError(f"{name} must be a list of three numbers, got {values!r}")
    red, green, blue = (positive_float({name: value}, name) for value in values)
    return red, green, blue
