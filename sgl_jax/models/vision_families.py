"""Reads the vision tower of a model of any family."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sgl_jax.core.image_input import ImageSettings
from sgl_jax.models.config_defaults import architecture_name
from sgl_jax.models.config_fields import CONFIG_FILE, ModelConfigError, read_json
from sgl_jax.models.gemma_vision_config import read_gemma3_vision, read_gemma4_vision
from sgl_jax.models.image_settings import read_image_settings
from sgl_jax.models.vision_config import VisionConfig, read_qwen3_vl_vision

_Reader = Callable[[Mapping[str, Any], ImageSettings, int], VisionConfig]
_READERS: Mapping[str, _Reader] = MappingProxyType(
    {
        "Gemma3ForConditionalGeneration": read_gemma3_vision,
        "Gemma4ForConditionalGeneration": read_gemma4_vision,
    }
)


def read_vision(model_path: Path, hidden_size: int) -> VisionConfig:
    """Read the tower of a model folder; `hidden_size` is the text model's.

    Raises ModelConfigError, with the name of the field, if the folder has no tower or the tower is
    not supported.
    """
    images = read_image_settings(model_path)
    if images is None:
        raise ModelConfigError("--enable-multimodal needs a model with a vision tower")
    config = read_json(model_path if model_path.is_file() else model_path / CONFIG_FILE)
    read = _READERS.get(architecture_name(config), read_qwen3_vl_vision)
    try:
        return read(config, images, hidden_size)
    except ModelConfigError as error:
        raise ModelConfigError(f"vision_config: {error}") from error
