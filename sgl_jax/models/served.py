"""The model, and its vision tower, with the settings of an engine."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sgl_jax.core.image_input import ImageSettings
from sgl_jax.core.server_args import ServerArgs
from sgl_jax.models.config import ModelConfig
from sgl_jax.models.config_defaults import architecture_name
from sgl_jax.models.config_fields import CONFIG_FILE, ModelConfigError, read_json
from sgl_jax.models.eagle3_config import with_eagle3_head
from sgl_jax.models.gemma_vision_config import read_gemma3_vision, read_gemma4_vision
from sgl_jax.models.image_settings import read_image_settings
from sgl_jax.models.vision_config import VisionConfig, read_qwen3_vl_vision

_Reader = Callable[[Mapping[str, Any], ImageSettings, int], VisionConfig]
_VISION_READERS: Mapping[str, _Reader] = MappingProxyType(
    {
        "Gemma3ForConditionalGeneration": read_gemma3_vision,
        "Gemma4ForConditionalGeneration": read_gemma4_vision,
    }
)


def served_config(config: ModelConfig, args: ServerArgs, source: Path | None = None) -> ModelConfig:
    """Return `config` for the context of `args`, quantized at load and with a draft layer or a
    vision tower if they say so.

    `source` is the folder or file of `config`; None: it is `args.model_path`.

    Raises ModelConfigError if this is not possible.
    """
    config = config.for_context(args.context_length or config.max_position_embeddings)
    config = config.quantized(args.quantization)
    if args.enable_multimodal:
        source = Path(args.model_path) if source is None else source
        config = replace(config, vision=_read_vision(source, config.hidden_size))
    if args.speculative_draft_model_path:
        return with_eagle3_head(config, Path(args.speculative_draft_model_path))
    return config.drafting() if args.has_draft_layer else config


def _read_vision(model_path: Path, hidden_size: int) -> VisionConfig:
    """Read the tower of a model folder; `hidden_size` is the text model's.

    Raises ModelConfigError, with the name of the field, if the folder has no tower or the tower is
    not supported.
    """
    images = read_image_settings(model_path)
    if images is None:
        raise ModelConfigError("--enable-multimodal needs a model with a vision tower")
    config = read_json(model_path if model_path.is_file() else model_path / CONFIG_FILE)
    read = _VISION_READERS.get(architecture_name(config), read_qwen3_vl_vision)
    try:
        return read(config, images, hidden_size)
    except ModelConfigError as error:
        raise ModelConfigError(f"vision_config: {error}") from error


_MAX_NAMED = 8  # a model of another kind differs in every layer


def check_same_model(served: ModelConfig, given: ModelConfig) -> None:
    """Raise ModelConfigError, with the differences, unless `given` fits `served`'s programs."""
    # It only affects dummy weights.
    given = replace(given, initializer_range=served.initializer_range)
    found = list(_differences("", served, given))
    if found:
        more = [f"and {len(found) - _MAX_NAMED} more"] if len(found) > _MAX_NAMED else []
        raise ModelConfigError(
            f"it is not the model that is served: {'; '.join(found[:_MAX_NAMED] + more)}"
        )


def _differences(name: str, served: Any, given: Any) -> Iterator[str]:
    if served == given:
        return
    if is_dataclass(served) and type(served) is type(given):
        for field in fields(served):
            own = f"{name}.{field.name}" if name else field.name
            yield from _differences(own, getattr(served, field.name), getattr(given, field.name))
    elif isinstance(served, tuple) and isinstance(given, tuple):
        if len(served) != len(given):
            yield f"{name}: {len(given)} instead of {len(served)}"
        for i, (old, new) in enumerate(zip(served, given, strict=False)):
            yield from _differences(f"{name}[{i}]", old, new)
    else:
        yield f"{name} is {given!r} instead of {served!r}"
