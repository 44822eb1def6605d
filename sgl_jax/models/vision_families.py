"""Reads the image settings and the vision tower of a model of any family."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from sgl_jax.core.image_input import ImageSettings
from sgl_jax.models.config_defaults import architecture_name
from sgl_jax.models.config_fields import CONFIG_FILE, ModelConfigError, object_field, read_json
from sgl_jax.models.gemma_vision_config import read_gemma3_vision, read_gemma4_vision
from sgl_jax.models.image_settings import (
    read_gemma3_settings,
    read_gemma4_settings,
    read_qwen_settings,
)
from sgl_jax.models.vision_config import VisionConfig, read_qwen3_vl_vision

# Published checkpoints have one of them.
_PREPROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
_Json = Mapping[str, Any]


class _VisionFamily(NamedTuple):
    """The readers of a family."""

    # From config.json, its `vision_config`, and the preprocessor's file.
    settings: Callable[[_Json, _Json, _Json], ImageSettings]
    # From config.json, the settings, and the hidden size of the text model.
    tower: Callable[[_Json, ImageSettings, int], VisionConfig]


_QWEN = _VisionFamily(read_qwen_settings, read_qwen3_vl_vision)
_FAMILIES: Mapping[str, _VisionFamily] = MappingProxyType(
    {
        "Gemma3ForConditionalGeneration": _VisionFamily(read_gemma3_settings, read_gemma3_vision),
        "Gemma4ForConditionalGeneration": _VisionFamily(read_gemma4_settings, read_gemma4_vision),
    }
)


def read_image_settings(model_path: str | Path) -> ImageSettings | None:
    """Read the settings of a model's folder or config.json; None if it is a text model.

    Raises ModelConfigError, naming the file and the field, for values that are not supported.
    """
    path = Path(model_path)
    config_file = path if path.is_file() else path / CONFIG_FILE
    if not config_file.is_file():
        return None
    folder, config = config_file.parent, read_json(config_file)
    vision, family = object_field(config, "vision_config"), _family_of(config)
    is_qwen = "image_token_id" in config and "vision_start_token_id" in config
    if not vision or (family is _QWEN and not is_qwen):
        return None
    file = "" if path.is_file() else _present_file(folder)
    raw = read_json(folder / file) if file else {}
    try:
        return family.settings(config, vision, raw.get("image_processor", raw))
    except ModelConfigError as error:
        name = str(folder / (file or CONFIG_FILE))
        raise ModelConfigError(f"{name!r}: {error}", file or CONFIG_FILE) from error


def read_vision(model_path: Path, hidden_size: int) -> VisionConfig:
    """Read the tower of a model folder; `hidden_size` is the text model's.

    Raises ModelConfigError, with the name of the field, if the folder has no tower or the tower is
    not supported.
    """
    images = read_image_settings(model_path)
    if images is None:
        raise ModelConfigError("--enable-multimodal needs a model with a vision tower")
    config = read_json(model_path if model_path.is_file() else model_path / CONFIG_FILE)
    try:
        return _family_of(config).tower(config, images, hidden_size)
    except ModelConfigError as error:
        raise ModelConfigError(f"vision_config: {error}") from error


def _family_of(config: _Json) -> _VisionFamily:
    name = architecture_name(config) if "architectures" in config else ""
    return _FAMILIES.get(name, _QWEN)


def _present_file(folder: Path) -> str:
    return next((name for name in _PREPROCESSOR_FILES if (folder / name).is_file()), "")
