"""The config.json of an EAGLE-3 head, checked against its target model."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from sgl_jax.models.config import Eagle3Head, ModelConfig
from sgl_jax.models.config_defaults import architecture_name
from sgl_jax.models.config_fields import (
    CONFIG_FILE,
    ModelConfigError,
    is_int,
    object_field,
    positive_int,
    read_json,
)

# The first is the name from the authors: it is also the name of a whole model.
_ARCHITECTURES = ("LlamaForCausalLM", "LlamaForCausalLMEagle3")
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
# Fields that change a head's computation, with their supported values.
_SUPPORTED = {
    "num_hidden_layers": 1,
    "tie_word_embeddings": False,
    "bias": False,
    "norm_before_fc": False,
    "norm_before_residual": False,
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
}
# Fields of a head that a whole model does not have.
_OF_HEADS = {*_SUPPORTED, _LAYER_IDS, "draft_vocab_size", "eagle_config", "target_model_type"}
# Attributes that must be equal in the head and the model, their fields, and the reason.
_SHARED = (
    ("hidden_size", "hidden_size", "it reads the model's hidden states"),
    ("vocab_size", "vocab_size", "the model embeds its tokens"),
    ("num_kv_heads", "num_key_value_heads", "its KV is a layer of the model's cache"),
    ("head_dim", "head_dim", "its KV is a layer of the model's cache"),
)


def with_eagle3_head(model: ModelConfig, folder: Path) -> ModelConfig:
    """Return `model` with the EAGLE-3 head in `folder`.

    Raises ModelConfigError, which names the file and the field, if the head does not fit the model.
    """
    file = folder / CONFIG_FILE
    if not file.is_file():
        raise ModelConfigError(f"--speculative-draft-model-path: no config.json in {str(folder)!r}")
    if model.latent is not None:
        raise ModelConfigError("EAGLE3 is not supported for models with latent attention")
    if model.has_unlike_heads:
        raise ModelConfigError("EAGLE3 is not supported for models with heads of unlike sizes")
    raw = read_json(file)
    try:
        head = _head(raw, model)
    except ModelConfigError as error:
        raise ModelConfigError(f"{str(file)!r}: {error}") from error
    return replace(model, draft_layer=head.config.layers[0], eagle3=head)


def _head(raw: dict[str, Any], model: ModelConfig) -> Eagle3Head:
    if architecture_name(raw) not in _ARCHITECTURES:
        raise ModelConfigError(
            f"architecture {architecture_name(raw)!r} is no EAGLE-3 head; supported: "
            + ", ".join(_ARCHITECTURES)
        )
    settings = raw | object_field(raw, "eagle_config")
    for name, supported in _SUPPORTED.items():
        if settings.get(name, supported) != supported:
            raise ModelConfigError(
                f"{name} of an EAGLE-3 head must be {supported!r}, got {settings[name]!r}"
            )
    # A head has no windows, though its config may hold the model's fields.
    whole = {"architectures": ["LlamaForCausalLM"], "sliding_window": None, "layer_types": None}
    llama = {name: value for name, value in raw.items() if name not in _OF_HEADS}
    config = ModelConfig.from_dict(llama | whole | {"num_hidden_layers": 1})
    if config.quantization is not None:
        raise ModelConfigError("a quantized EAGLE-3 head is not supported")
    for attribute, field, reason in _SHARED:
        own, wanted = getattr(config, attribute), getattr(model, attribute)
        if own != wanted:
            raise ModelConfigError(f"{field} must be the model's {wanted}, got {own}: {reason}")
    size = None
    if raw.get("draft_vocab_size") is not None:
        size = positive_int(raw, "draft_vocab_size")
        if size > config.vocab_size:
            raise ModelConfigError(
                f"draft_vocab_size ({size}) must be at most vocab_size ({config.vocab_size})"
            )
    return Eagle3Head(config, size, _captured(raw, model.num_layers))


def _captured(raw: dict[str, Any], num_layers: int) -> tuple[int, ...]:
    """Return the layers with inputs that the head reads.

    `eagle_config` lists the layers that output them (SGLang); the same field outside of it lists
    the layers themselves (vLLM).
    """
    outputs, inputs = object_field(raw, "eagle_config").get(_LAYER_IDS), raw.get(_LAYER_IDS)
    if outputs is None and inputs is None:
        layers = [2, num_layers // 2, num_layers - 3]
        if sorted(set(layers)) != layers:
            raise ModelConfigError(
                f"eagle_config must have {_LAYER_IDS} for a model of {num_layers} layers"
            )
        return tuple(layers)
    first = 1 if inputs is None else 0
    ids = outputs if inputs is None else inputs
    if (
        not isinstance(ids, list)
        or not ids
        or not all(is_int(layer) and 0 <= layer < num_layers - first for layer in ids)
        or sorted(set(ids)) != ids
    ):
        raise ModelConfigError(
            f"{_LAYER_IDS} must be ascending layers in [0, {num_layers - first}), got {ids!r}"
        )
    return tuple(layer + first for layer in ids)
