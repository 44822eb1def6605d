"""The config of a GGUF file's model, as transformers writes it to config.json."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from sgl_jax.checkpoint.gguf.header import GgufError, Header
from sgl_jax.checkpoint.gguf.tensors import ROPE_FACTORS, read_floats
from sgl_jax.models.config import ModelConfig, ModelConfigError, RopeConfig

# Names in transformers by architecture: class and model_type.
_ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
}
# Tokens that end a turn in published chat formats; files mostly name one of them as the end.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|endoftext|>")
# llama.cpp knows Gemma 3 27B by its layers. Only this size has another scale of scores.
_LAYERS_OF_GEMMA3_27B = 62
_GEMMA3_PERIOD = 6  # each so many layers, one has no window
# Parameters of Llama 3's rotary embedding that files do not have; all published models have these.
_LLAMA3_ROPE: Mapping[str, Any] = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def hf_config(header: Header) -> dict[str, Any]:
    """Return the contents of config.json. Raise GgufError for a model that cannot be served."""
    architecture = header.required("general.architecture")
    if architecture not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise GgufError(
            f"{str(header.path)!r} has the architecture {architecture!r}; supported: {known}"
        )
    own = {
        key.removeprefix(f"{architecture}."): value
        for key, value in header.metadata.items()
        if key.startswith(f"{architecture}.")
    }
    _refuse_unsupported(header, own)

    def required(key: str) -> Any:
        return header.required(f"{architecture}.{key}")

    if "token_embd.weight" not in header.tensors:
        raise GgufError(f"{str(header.path)!r} lacks the tensor 'token_embd.weight'")
    class_name, model_type = _ARCHITECTURES[architecture]
    hidden, num_heads = required("embedding_length"), required("attention.head_count")
    head_dim = own.get("attention.key_length", hidden // max(num_heads, 1))
    theta = own.get("rope.freq_base", 1e6 if architecture == "gemma3" else 10000.0)
    config = {
        "architectures": [class_name],
        "model_type": model_type,
        "vocab_size": header.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "intermediate_size": required("feed_forward_length"),
        "num_hidden_layers": required("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": own.get("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "rms_norm_eps": required("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": required("context_length"),
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(header, own, theta, head_dim),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        **token_ids(header),
    }
    if architecture == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in header.tensors
    if architecture == "gemma3":
        is_27b = config["num_hidden_layers"] == _LAYERS_OF_GEMMA3_27B
        period = own.get("attention.sliding_window_pattern", _GEMMA3_PERIOD)
        config |= {
            "sliding_window": required("attention.sliding_window"),
            "sliding_window_pattern": period,
            "rope_local_base_freq": own.get("rope.freq_base_swa", 10000.0),
            "query_pre_attn_scalar": hidden // num_heads if is_27b else head_dim,
            "final_logit_softcapping": own.get("final_logit_softcapping"),
        }
    try:
        ModelConfig.from_dict(config)
    except ModelConfigError as error:
        raise GgufError(f"{str(header.path)!r}: {error}") from error
    return config


def token_ids(header: Header) -> dict[str, Any]:
    """Return the special tokens of the config. All tokens that end a turn end an answer."""
    names = ("eos", "eot", "eom")
    ids = [header.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in names]
    tokens = header.texts("tokenizer.ggml.tokens")
    ids += [number for number, token in enumerate(tokens) if token in _TURN_ENDS]
    ends = sorted({number for number in ids if number is not None})
    return {
        "bos_token_id": header.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": ends or None,
        "pad_token_id": header.metadata.get("tokenizer.ggml.padding_token_id"),
    }


def _refuse_unsupported(header: Header, own: Mapping[str, Any]) -> None:
    if own.get("expert_count"):
        raise GgufError(f"{str(header.path)!r} has experts, which are not supported in GGUF files")
    for key in ("embedding_length", "attention.head_count", "attention.head_count_kv"):
        if key in own and not isinstance(own[key], int):
            raise GgufError(f"{key} in {str(header.path)!r} must be one integer")
    dims = own.get("rope.dimension_count"), own.get("attention.key_length")
    if None not in dims and dims[0] != dims[1]:
        raise GgufError(f"{str(header.path)!r} rotates {dims[0]} of {dims[1]} dimensions of a head")


def _rope_scaling(
    header: Header, own: Mapping[str, Any], theta: float, head_dim: int
) -> dict[str, Any] | None:
    if ROPE_FACTORS in header.tensors:
        return _llama3_scaling(header, theta, head_dim)
    kind = own.get("rope.scaling.type", "none")
    if kind == "none":
        return None
    scaling = {"rope_type": kind, "factor": own.get("rope.scaling.factor")}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = own.get(
            "rope.scaling.original_context_length"
        )
    return scaling


def _llama3_scaling(header: Header, theta: float, head_dim: int) -> dict[str, Any]:
    """Return the parameters of Llama 3's scaling whose factors the file has."""
    found = read_floats(header.path, header.tensors[ROPE_FACTORS])
    factor = float(found.max())
    plain = RopeConfig(theta).inverse_frequencies(head_dim)
    scaled = RopeConfig(theta, "llama3", factor, **_LLAMA3_ROPE).inverse_frequencies(head_dim)
    if found.shape != plain.shape or not np.allclose(plain / scaled, found, rtol=1e-3):
        raise GgufError(f"{ROPE_FACTORS} in {str(header.path)!r} are not those of Llama 3")
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3_ROPE}
