"""What a model is: the fields of a Hugging Face `config.json` that matter, checked.

Owns the reading of config files. Whatever the engine cannot honour is refused here, by name, and
never ignored.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

RopeKind = Literal["default", "linear", "llama3"]


class ModelConfigError(ValueError):
    """A config.json that is incomplete, inconsistent, or asks for something unsupported."""


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: its base frequency and how long contexts stretch it."""

    theta: float = 10000.0
    kind: RopeKind = "default"
    factor: float = 1.0  # linear and llama3: positions are stretched by this
    low_freq_factor: float = 1.0  # llama3 only, like the two below
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True)
class MoeConfig:
    """Mixture of experts: each token is served by the `top_k` experts its router likes best."""

    num_experts: int
    top_k: int
    intermediate_size: int
    norm_topk_prob: bool  # the chosen experts' weights are scaled to sum to 1


@dataclass(frozen=True)
class ModelConfig:
    """One model. Sizes are those of the whole model, not of one chip."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    initializer_range: float
    eos_token_ids: tuple[int, ...]
    sliding_window: int | None = None  # of every layer
    moe: MoeConfig | None = None

    @classmethod
    def from_path(cls, model_path: str | Path) -> "ModelConfig":
        """Read `config.json` (and `generation_config.json`, if there) of a model folder, or a file.

        Raises:
            ModelConfigError: naming the field that is missing, malformed or unsupported.
        """
        folder = Path(model_path)
        if folder.is_file():
            return cls.from_dict(_read_json(folder))
        if not (folder / "config.json").is_file():
            raise ModelConfigError(f"no config.json in model folder {str(folder)!r}")
        generation: Mapping[str, Any] = {}
        if (folder / "generation_config.json").is_file():
            generation = _read_json(folder / "generation_config.json")
        return cls.from_dict(_read_json(folder / "config.json"), generation)

    @classmethod
    def from_dict(
        cls, raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None
    ) -> "ModelConfig":
        """Build from the contents of config.json and generation_config.json."""
        _refuse_unsupported(raw)
        num_heads = _positive_int(raw, "num_attention_heads")
        hidden_size = _positive_int(raw, "hidden_size")
        num_kv_heads = _positive_int(raw, "num_key_value_heads", default=num_heads)
        if num_heads % num_kv_heads:
            raise ModelConfigError(
                f"num_attention_heads ({num_heads}) must be a multiple of num_key_value_heads "
                f"({num_kv_heads})"
            )
        head_dim = _positive_int(raw, "head_dim", default=hidden_size // num_heads)
        if head_dim % 2:
            raise ModelConfigError(f"head_dim must be even, got {head_dim}")
        num_layers = _positive_int(raw, "num_hidden_layers")
        max_positions = _positive_int(raw, "max_position_embeddings")
        return cls(
            architecture=_architecture(raw),
            vocab_size=_positive_int(raw, "vocab_size"),
            hidden_size=hidden_size,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            intermediate_size=_positive_int(raw, "intermediate_size"),
            rms_norm_eps=float(_required(raw, "rms_norm_eps")),
            rope=_rope(raw, max_positions),
            max_position_embeddings=max_positions,
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            initializer_range=float(raw.get("initializer_range", 0.02)),
            eos_token_ids=_eos_token_ids(raw, generation or {}),
            sliding_window=_sliding_window(raw, num_layers),
            moe=_moe(raw),
        )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ModelConfigError(f"{str(path)!r} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelConfigError(f"{str(path)!r} must hold a JSON object")
    return content


def _required(raw: Mapping[str, Any], name: str) -> Any:
    if raw.get(name) is None:
        raise ModelConfigError(f"config.json lacks {name!r}")
    return raw[name]


def _positive_int(raw: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = default if default is not None and raw.get(name) is None else _required(raw, name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelConfigError(f"{name} must be a positive integer, got {value!r}")
    return value


def _architecture(raw: Mapping[str, Any]) -> str:
    names = _required(raw, "architectures")
    if not isinstance(names, list) or len(names) != 1:
        raise ModelConfigError(f"architectures must be a list of one name, got {names!r}")
    return str(names[0])


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    if raw.get("hidden_act", "silu") != "silu":
        raise ModelConfigError(f"hidden_act must be 'silu', got {raw['hidden_act']!r}")
    for name in ("attention_bias", "mlp_bias", "quantization_config"):
        if raw.get(name):
            raise ModelConfigError(f"{name} = {raw[name]!r} is not supported")
    partial = raw.get("partial_rotary_factor")
    if partial not in (None, 1.0):
        raise ModelConfigError(f"partial_rotary_factor must be 1.0, got {partial!r}")


def _rope(raw: Mapping[str, Any], max_positions: int) -> RopeConfig:
    """Read `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = float(scaling.get("rope_theta", raw.get("rope_theta", 10000.0)))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, "linear", float(_required(scaling, "factor")))
    if kind == "llama3":
        return RopeConfig(
            theta,
            "llama3",
            float(_required(scaling, "factor")),
            float(_required(scaling, "low_freq_factor")),
            float(_required(scaling, "high_freq_factor")),
            _positive_int(scaling, "original_max_position_embeddings", default=max_positions),
        )
    raise ModelConfigError(f"rope type must be one of default, linear, llama3, got {kind!r}")


def _eos_token_ids(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    """All tokens that end a text: those of both files, each an int, a list, or absent."""
    ids: list[int] = []
    for source in (generation, raw):
        value = source.get("eos_token_id")
        ids += value if isinstance(value, list) else [] if value is None else [value]
    return tuple(dict.fromkeys(ids))


def _sliding_window(raw: Mapping[str, Any], num_layers: int) -> int | None:
    """The window of every layer, or None. Layers of both kinds in one model are refused."""
    if not raw.get("use_sliding_window", raw.get("sliding_window") is not None):
        return None
    window = _positive_int(raw, "sliding_window")
    kinds = raw.get("layer_types")
    if kinds is None:
        full = min(int(raw.get("max_window_layers", 0)), num_layers)
        kinds = ["full_attention"] * full + ["sliding_attention"] * (num_layers - full)
    if set(kinds) == {"full_attention"}:
        return None
    if set(kinds) == {"sliding_attention"}:
        return window
    raise ModelConfigError(
        "use_sliding_window with some layers full and some sliding (layer_types, "
        "max_window_layers) is not supported"
    )


def _moe(raw: Mapping[str, Any]) -> MoeConfig | None:
    # transformers 5 writes num_local_experts where earlier versions wrote num_experts.
    count_name = "num_experts" if raw.get("num_experts") is not None else "num_local_experts"
    if raw.get(count_name) is None:
        return None
    if raw.get("mlp_only_layers"):
        raise ModelConfigError(
            f"mlp_only_layers must be empty (every layer has experts), got {raw['mlp_only_layers']}"
        )
    if raw.get("decoder_sparse_step", 1) != 1:
        raise ModelConfigError(
            f"decoder_sparse_step must be 1 (every layer has experts), "
            f"got {raw['decoder_sparse_step']}"
        )
    num_experts = _positive_int(raw, count_name)
    top_k = _positive_int(raw, "num_experts_per_tok")
    if top_k > num_experts:
        raise ModelConfigError(
            f"num_experts_per_tok ({top_k}) must not exceed {count_name} ({num_experts})"
        )
    return MoeConfig(
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=_positive_int(raw, "moe_intermediate_size"),
        norm_topk_prob=bool(raw.get("norm_topk_prob", False)),
    )
