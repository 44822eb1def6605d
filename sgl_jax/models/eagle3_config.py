"""The config.json of an EAGLE-3 head, for the model that it drafts for."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from sgl_jax.models.config import Eagle3Head, ModelConfig, read_json
from sgl_jax.models.config_defaults import architecture_name
from sgl_jax.models.config_fields import CONFIG_FILE, ModelConfigError, is_int, positive_int

# The first is the authors' own: their heads have the name of a whole model.
_ARCHITECTURES = ("LlamaForCausalLM", "LlamaForCausalLMEagle3")
# Fields that the head must have as its model has them, and the reason.
_SHARED = {
    "hidden_size": "it reads the model's hidden states",
    "vocab_size": "the model embeds its tokens",
    "num_kv_heads": "its KV is a layer of the model's cache",
    "head_dim": "its KV is a layer of the model's cache",
}


def with_eagle3_head(model: ModelConfig, folder: Path) -> ModelConfig:
    """`model` with the EAGLE-3 head in `folder`.

    Raises ModelConfigError, naming the file and the field, if it is no head for the model.
    """
    file = folder / CONFIG_FILE
    if not file.is_file():
        raise ModelConfigError(f"--speculative-draft-model-path: no config.json in {str(folder)!r}")
    if model.latent is not None:
        raise ModelConfigError("EAGLE3 is not supported for models with latent attention")
    try:
        head = _head(read_json(file), model)
    except ModelConfigError as error:
        raise ModelConfigError(f"{str(file)!r}: {error}") from error
    return replace(model, draft_layer=head.config.layers[0], eagle3=head)


def _head(raw: dict[str, Any], model: ModelConfig) -> Eagle3Head:
    if architecture_name(raw) not in _ARCHITECTURES:
        raise ModelConfigError(
            f"architecture {architecture_name(raw)!r} is no EAGLE-3 head; supported: "
            + ", ".join(_ARCHITECTURES)
        )
    if raw.get("num_hidden_layers") != 1:
        raise ModelConfigError(
            f"num_hidden_layers of an EAGLE-3 head must be 1, got {raw.get('num_hidden_layers')!r}"
        )
    config = ModelConfig.from_dict(raw | {"architectures": ["LlamaForCausalLM"]})
    for name, reason in _SHARED.items():
        own, wanted = getattr(config, name), getattr(model, name)
        if own != wanted:
            raise ModelConfigError(f"{name} must be the model's {wanted}, got {own}: {reason}")
    size = positive_int(raw, "draft_vocab_size", default=config.vocab_size)
    if size > config.vocab_size:
        raise ModelConfigError(
            f"draft_vocab_size ({size}) must be at most vocab_size ({config.vocab_size})"
        )
    return Eagle3Head(config, size, _captured(raw.get("eagle_config") or {}, model.num_layers))


def _captured(settings: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """The layers whose inputs the head reads. A config has the layers before them."""
    name = "eagle_aux_hidden_state_layer_ids"
    ids = settings.get(name)
    if ids is None:
        return 2, num_layers // 2, num_layers - 3
    if not isinstance(ids, list) or not ids:
        raise ModelConfigError(f"{name} must be a list of layers, got {ids!r}")
    for layer in ids:
        if not is_int(layer) or not 0 <= layer < num_layers:
            raise ModelConfigError(
                f"{name} must be layers of the model, in [0, {num_layers}), got {layer!r}"
            )
    return tuple(layer + 1 for layer in ids)
