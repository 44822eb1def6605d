"""What a model is: the fields of a Hugging Face `config.json` that matter, checked.

Owns the reading of config files. What the engine cannot honour is refused here, by name, and
never ignored.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sgl_jax.core.cache_groups import CacheGroup

RopeKind = Literal["default", "linear", "llama3"]
CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
_MAX_INT = 2**31 - 1
_NO_PADDING = -1  # what some models of old say for "none"


class ModelConfigError(ValueError):
    """A config.json that is incomplete, inconsistent, or asks for something unsupported.

    `file` is where the fault lies.
    """

    def __init__(self, message: str, file: str = CONFIG_FILE) -> None:
        super().__init__(message)
        self.file = file


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
class LayerSpec:
    """What one layer is, as far as layers of a model may differ."""

    rope: RopeConfig
    sliding_window: int | None  # None: attention to all tokens
    moe: MoeConfig | None  # None: a dense feed-forward layer


@dataclass(frozen=True)
class ModelConfig:
    """One model. Sizes are those of the whole model, not of one chip."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    initializer_range: float
    eos_token_ids: tuple[int, ...]
    layers: tuple[LayerSpec, ...]  # the first is next to the embedding

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def moe(self) -> MoeConfig | None:
        """Of the layers that have experts; None if none has."""
        return next((spec.moe for spec in self.layers if spec.moe), None)

    def cache_groups(self) -> tuple[CacheGroup, ...]:
        """Layers by what they need of a sequence's KV: all of it first, then the widest window.

        Groups of equally many layers share a pool; the first is that of the first group.
        """
        by_window: dict[int | None, list[int]] = {}
        for layer, spec in enumerate(self.layers):
            by_window.setdefault(spec.sliding_window, []).append(layer)
        windows = sorted(by_window, key=lambda w: -math.inf if w is None else -w)
        pools = list(dict.fromkeys(len(by_window[window]) for window in windows))
        return tuple(
            CacheGroup(window, pools.index(len(by_window[window])), tuple(by_window[window]))
            for window in windows
        )

    @classmethod
    def from_path(cls, model_path: str | Path) -> "ModelConfig":
        """Read `config.json` (and `generation_config.json`, if there) of a model folder, or a file.

        Raises:
            ModelConfigError: naming the file, and the field that is missing, malformed or
                unsupported.
        """
        folder = Path(model_path)
        config_file = folder if folder.is_file() else folder / CONFIG_FILE
        if not config_file.is_file():
            raise ModelConfigError(f"no config.json in model folder {str(folder)!r}")
        generation_file = config_file.parent / GENERATION_FILE
        generation: Mapping[str, Any] = {}
        if folder.is_dir() and generation_file.is_file():
            generation = _read_json(generation_file)
        raw = _read_json(config_file)
        try:
            return cls.from_dict(raw, generation)
        except ModelConfigError as error:
            at_fault = generation_file if error.file == GENERATION_FILE else config_file
            raise ModelConfigError(f"{str(at_fault)!r}: {error}", error.file) from error

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
        vocab_size = _positive_int(raw, "vocab_size")
        for file, source in ((CONFIG_FILE, raw), (GENERATION_FILE, generation or {})):
            _check_token_ids(source, file, vocab_size)
        return cls(
            architecture=_architecture(raw),
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            intermediate_size=_positive_int(raw, "intermediate_size"),
            rms_norm_eps=_positive_float(raw, "rms_norm_eps"),
            max_position_embeddings=max_positions,
            tie_word_embeddings=_switch(raw, "tie_word_embeddings"),
            initializer_range=_positive_float(raw, "initializer_range", default=0.02),
            eos_token_ids=_eos_token_ids(raw, generation or {}),
            layers=_layers(raw, num_layers, max_positions),
        )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelConfigError(f"cannot read {str(path)!r}: {error.strerror}") from error
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
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
    if not _is_int(value) or not 1 <= value <= _MAX_INT:
        raise ModelConfigError(f"{name} must be a positive integer below 2**31, got {value!r}")
    return int(value)


def _positive_float(raw: Mapping[str, Any], name: str, default: float | None = None) -> float:
    value = default if default is not None and raw.get(name) is None else _required(raw, name)
    is_number = _is_int(value) or isinstance(value, float)
    if not is_number or not 0 < value < math.inf:  # nor NaN
        raise ModelConfigError(f"{name} must be a positive number, got {value!r}")
    return float(value)


def _switch(raw: Mapping[str, Any], name: str) -> bool:
    """False if absent."""
    value = raw.get(name)
    if value is not None and not isinstance(value, bool):
        raise ModelConfigError(f"{name} must be true or false, got {value!r}")
    return bool(value)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_token_ids(source: Mapping[str, Any], file: str, vocab_size: int) -> None:
    """What the file calls by token id is in the vocabulary."""
    for name in ("eos_token_id", "bos_token_id", "pad_token_id"):
        value = source.get(name)
        for token in value if isinstance(value, list) else [] if value is None else [value]:
            if name == "pad_token_id" and token == _NO_PADDING:
                continue
            if not _is_int(token) or not 0 <= token < vocab_size:
                raise ModelConfigError(
                    f"{name} must be a token id in [0, {vocab_size}), got {token!r}", file
                )


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


def _layers(raw: Mapping[str, Any], num_layers: int, max_positions: int) -> tuple[LayerSpec, ...]:
    rope, window = _rope(raw, max_positions), _sliding_window(raw, num_layers)
    moe = _moe(raw)
    is_sparse = [False] * num_layers if moe is None else _sparse_layers(raw, num_layers)
    return tuple(LayerSpec(rope, window, moe if sparse else None) for sparse in is_sparse)


def _rope(raw: Mapping[str, Any], max_positions: int) -> RopeConfig:
    """Read `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(scaling, dict):
        raise ModelConfigError(f"rope_parameters and rope_scaling must be objects, got {scaling!r}")
    theta = _positive_float({**raw, **scaling}, "rope_theta", default=10000.0)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, "linear", _positive_float(scaling, "factor"))
    if kind == "llama3":
        return RopeConfig(
            theta,
            "llama3",
            _positive_float(scaling, "factor"),
            _positive_float(scaling, "low_freq_factor"),
            _positive_float(scaling, "high_freq_factor"),
            _positive_int(scaling, "original_max_position_embeddings", default=max_positions),
        )
    raise ModelConfigError(f"rope type must be one of default, linear, llama3, got {kind!r}")


def _eos_token_ids(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    """All tokens that end a text: those of both files, each an id, a list, or absent."""
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
        full = raw.get("max_window_layers") or 0
        if not _is_int(full) or full < 0:
            raise ModelConfigError(f"max_window_layers must be 0 or more, got {full!r}")
        full = min(full, num_layers)
        kinds = ["full_attention"] * full + ["sliding_attention"] * (num_layers - full)
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        raise ModelConfigError(f"layer_types must be a list of names, got {kinds!r}")
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
        norm_topk_prob=_switch(raw, "norm_topk_prob"),
    )


def _sparse_layers(raw: Mapping[str, Any], num_layers: int) -> list[bool]:
    """Which layers have experts: every `decoder_sparse_step`-th, but not `mlp_only_layers`."""
    step = _positive_int(raw, "decoder_sparse_step", default=1)
    dense = raw.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(
        _is_int(layer) and 0 <= layer < num_layers for layer in dense
    ):
        raise ModelConfigError(
            f"mlp_only_layers must be a list of layers in [0, {num_layers}), got {dense!r}"
        )
    return [(layer + 1) % step == 0 and layer not in dense for layer in range(num_layers)]
