"""A model's sizes and layers, read from a Hugging Face `config.json` and checked.

Owns the reading of config files: `config_fields` has the kinds of fields, `config_defaults` the
defaults, `known_fields` the fields of each architecture, `layer_specs` the fields of layers. A
setting that the engine does not support is refused by name, never ignored.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from sgl_jax.core.engine_sizes import CacheGroup
from sgl_jax.core.layer_configs import LatentConfig, Recurrence
from sgl_jax.models.cache_groups import cache_places, group_layers
from sgl_jax.models.config_defaults import (
    architecture_name,
    chooses_qk_norm,
    completed,
    has_head_sizes_by_layer,
    has_latents,
    has_multipliers,
    is_hybrid,
    renamed,
)
from sgl_jax.models.config_fields import (
    CONFIG_FILE,
    GENERATION_FILE,
    QUANTIZATION_FILE,
    ModelConfigError,
    is_int,
    optional_float,
    positive_float,
    positive_int,
    read_json,
    switch,
)
from sgl_jax.models.draft_names import DRAFT_NAMES, DraftNames
from sgl_jax.models.gemma4_config import HeadSizes, PerLayerEmbeddings, read_per_layer_embeddings
from sgl_jax.models.known_fields import check_architecture, refuse_unknown_fields
from sgl_jax.models.layer_specs import LayerSpec, read_latent, read_layers, reusing
from sgl_jax.models.moe_config import MoeConfig
from sgl_jax.models.quantization import AT_LOAD, LayerRules, QuantizationConfig, quantize_at_load
from sgl_jax.models.quantization_config import read_quantization
from sgl_jax.models.rope_config import RopeConfig, score_factor
from sgl_jax.models.vision_config import VisionConfig

__all__ = [
    "CONFIG_FILE",
    "CacheGroup",
    "LayerSpec",
    "ModelConfig",
    "ModelConfigError",
    "MoeConfig",
    "RopeConfig",
]

Activation = Literal["silu", "gelu_pytorch_tanh", "relu2"]
_ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu_pytorch_tanh")
_UNGATED = ("NemotronHForCausalLM",)  # feed-forward layers without gates, with relu2
_WITH_MXFP4 = ("GptOssForCausalLM",)
_NO_PADDING = -1  # some old models write it for "none"


@dataclass(frozen=True)
class ModelConfig:
    """One model, with the sizes of the whole model, not of one chip."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int  # 1 for latent attention: all heads read the same rows
    head_dim: int  # size of a query
    intermediate_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    initializer_range: float
    eos_token_ids: tuple[int, ...]
    activation: Activation  # of the gate of feed-forward layers
    attention_bias: bool  # attention's projections of Q, K and V have biases
    attention_output_bias: bool
    qk_norm: bool  # the config asks for normalised queries and keys
    attention_gate: bool  # the sigmoid of a projection multiplies attention's result
    score_scale: float  # factor of query times key
    score_soft_cap: float | None  # scores become cap * tanh(score / cap)
    logit_soft_cap: float | None  # logits become cap * tanh(logit / cap)
    quantization: QuantizationConfig | None  # None: the checkpoint's matrices are floats
    layers: tuple[LayerSpec, ...]  # starts next to the embedding
    brings_draft_layer: bool = True  # False if the checkpoint has no draft layer
    # The layer that drafts tokens, see `DraftLayer`; None if it is unused or missing.
    draft_layer: LayerSpec | None = None
    eagle3: "Eagle3Head | None" = None  # the head that has `draft_layer`
    per_layer_embeddings: PerLayerEmbeddings | None = None
    vision: VisionConfig | None = None  # None if no images are served
    embedding_scale: float = 1.0  # factors of embeddings, ...
    residual_scale: float = 1.0  # ... of each term of a residual sum, ...
    logit_scale: float = 1.0  # ... and of logits

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def all_layers(self) -> tuple[LayerSpec, ...]:
        return self.layers if self.draft_layer is None else (*self.layers, self.draft_layer)

    @property
    def num_attention_layers(self) -> int:
        """Return the number of layers that read KV, including the draft layer."""
        return sum(spec.has_attention for spec in self.all_layers)

    def of_layer(self, spec: LayerSpec) -> "ModelConfig":
        """Return the config with the sizes of a layer in place of the model's."""
        heads = spec.heads or HeadSizes(self.num_kv_heads, self.head_dim)
        return replace(
            self,
            num_kv_heads=heads.num_kv_heads,
            head_dim=heads.head_dim,
            intermediate_size=spec.mlp_width or self.intermediate_size,
        )

    @property
    def has_unlike_heads(self) -> bool:
        return any(spec.heads is not None for spec in self.layers)

    @property
    def has_shared_caches(self) -> bool:
        return any(spec.cache_source is not None for spec in self.layers)

    @property
    def moe(self) -> MoeConfig | None:
        return next((spec.moe for spec in self.layers if spec.moe), None)

    @property
    def recurrence(self) -> Recurrence | None:
        return next((spec.recurrence for spec in self.layers if spec.recurrence), None)

    @property
    def latent(self) -> LatentConfig | None:
        """Return the shape of latent attention, or None; it is the same for all such layers."""
        return next((spec.latent for spec in self.layers if spec.latent), None)

    @property
    def reused_top_k(self) -> int | None:
        """Return the tokens of a choice that layers reuse; None if each layer has an indexer."""
        indexers = (spec.latent.indexer for spec in self.layers if spec.latent)
        return next((own.top_k for own in indexers if own and own.reuses), None)

    @property
    def rope_head_dim(self) -> int:
        return self.head_dim if self.latent is None else self.latent.rope_dim

    def cache_groups(self) -> tuple[CacheGroup, ...]:
        """Return the groups of all layers; the draft layer has the number after the last layer."""
        return group_layers(self.all_layers)

    def cache_places(self) -> tuple[tuple[int, int], ...]:
        """Return each layer's group and its place in it, also those of the draft layer."""
        return cache_places(self.all_layers, self.cache_groups())

    @property
    def draft_names(self) -> DraftNames | None:
        """Return the names of the draft layer's tensors; None if the model has none."""
        names = DRAFT_NAMES.get(self.architecture) if self.brings_draft_layer else None
        return names and DraftNames(*(own.format(self.num_layers) for own in names))

    def drafting(self) -> "ModelConfig":
        """Return the model with its draft layer. Raise ModelConfigError if it has none."""
        if self.draft_names is None:
            raise ModelConfigError(
                f"{self.architecture} has no draft layer for --speculative-algorithm MTP: models "
                f"of {', '.join(sorted(DRAFT_NAMES))} may have one; NGRAM drafts for any model"
            )
        like = [spec for spec in self.layers if spec.has_attention and spec.sliding_window is None]
        rules = LayerRules(self.quantization, self.draft_names.layer)
        # It has an indexer, also after a layer that reuses a choice.
        latent = reusing(like[-1].latent, reuses=False)
        return replace(self, draft_layer=replace(like[-1], latent=latent, rules=rules))

    def for_context(self, num_tokens: int) -> "ModelConfig":
        """Return the model for contexts of up to `num_tokens`, see `RopeConfig.for_context`."""
        layers = (
            replace(spec, rope=spec.rope and spec.rope.for_context(num_tokens))
            for spec in self.layers
        )
        return replace(self, layers=tuple(layers))

    def quantized(self, scheme: str) -> "ModelConfig":
        """Return the model with its matrices quantized at load to the `scheme` of `--quantization`.

        Raises ModelConfigError if they are quantized in the checkpoint, or cannot be.
        """
        if scheme not in AT_LOAD:
            return self
        quantization = quantize_at_load(AT_LOAD[scheme])
        if self.quantization is not None:
            raise ModelConfigError("the model is quantized already: leave --quantization out")
        if self.architecture in _WITH_MXFP4:
            raise ModelConfigError(f"{self.architecture} cannot be quantized at load")
        layers = _quantized(self.layers, quantization)
        return replace(self, quantization=quantization, layers=layers)

    @classmethod
    def from_path(cls, model_path: str | Path) -> "ModelConfig":
        """Read `config.json` (and `generation_config.json`, if any) of a model folder, or a file.

        Raises:
            ModelConfigError: names the file, and the missing, malformed or unsupported field.
        """
        folder = Path(model_path)
        config_file = folder if folder.is_file() else folder / CONFIG_FILE
        if not config_file.is_file():
            raise ModelConfigError(f"no config.json in model folder {str(folder)!r}")
        generation_file = config_file.parent / GENERATION_FILE
        generation: Mapping[str, Any] = {}
        if folder.is_dir() and generation_file.is_file():
            generation = read_json(generation_file)
        raw = read_json(config_file)
        quantization_file = config_file.parent / QUANTIZATION_FILE
        if "quantization_config" not in raw and folder.is_dir() and quantization_file.is_file():
            own = read_json(quantization_file)
            raw = {**raw, "quantization_config": {"quant_method": "modelopt", **own}}
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
        check_architecture(raw)
        raw = completed(raw)
        refuse_unknown_fields(raw)
        raw = renamed(raw)
        _refuse_unsupported(raw)
        num_heads = positive_int(raw, "num_attention_heads")
        hidden_size = positive_int(raw, "hidden_size")
        if has_latents(raw):
            raw |= {"num_key_value_heads": 1, "head_dim": read_latent(raw).query_dim}
        num_kv_heads = positive_int(raw, "num_key_value_heads", default=num_heads)
        if num_heads % num_kv_heads:
            raise ModelConfigError(
                f"num_attention_heads ({num_heads}) must be a multiple of num_key_value_heads "
                f"({num_kv_heads})"
            )
        head_dim = positive_int(raw, "head_dim", default=hidden_size // num_heads)
        if head_dim % 2 and not has_latents(raw):
            raise ModelConfigError(f"head_dim must be even, got {head_dim}")
        max_positions = positive_int(raw, "max_position_embeddings")
        vocab_size = positive_int(raw, "vocab_size")
        quantization = _quantization(raw)
        for file, source in ((CONFIG_FILE, raw), (GENERATION_FILE, generation or {})):
            _check_token_ids(source, file, vocab_size)
        return cls(
            architecture=architecture_name(raw),
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            intermediate_size=positive_int(raw, "intermediate_size"),
            rms_norm_eps=positive_float(raw, "rms_norm_eps"),
            max_position_embeddings=max_positions,
            tie_word_embeddings=switch(raw, "tie_word_embeddings"),
            initializer_range=positive_float(raw, "initializer_range", default=0.02),
            eos_token_ids=_eos_token_ids(raw, generation or {}),
            activation=_activation(raw),
            attention_bias=(attention_bias := switch(raw, "attention_bias")),
            attention_output_bias=switch(raw, "attention_out_bias", default=attention_bias),
            qk_norm=chooses_qk_norm(raw) and switch(raw, "use_qk_norm"),
            attention_gate=switch(raw, "attn_output_gate"),
            score_scale=_score_scale(raw, head_dim),
            score_soft_cap=optional_float(raw, "attn_logit_softcapping"),
            logit_soft_cap=optional_float(raw, "final_logit_softcapping"),
            quantization=quantization,
            layers=_layers(raw, head_dim, max_positions, quantization),
            brings_draft_layer=raw.get("num_nextn_predict_layers") != 0,
            per_layer_embeddings=read_per_layer_embeddings(raw),
            embedding_scale=_multiplier(raw, "embedding_multiplier"),
            residual_scale=_multiplier(raw, "residual_multiplier"),
            logit_scale=1.0 / _multiplier(raw, "logits_scaling"),
        )


@dataclass(frozen=True)
class Eagle3Head:
    """A layer from a separate checkpoint that drafts for a model, see `Eagle3Layer`."""

    config: ModelConfig  # config with one layer
    draft_vocab_size: int | None  # tokens that it can draft; None: it uses the model's head
    captured: tuple[int, ...]  # layers of the model with inputs that it reads, ascending


def _check_token_ids(source: Mapping[str, Any], file: str, vocab_size: int) -> None:
    """Raise ModelConfigError if a special token of the file is not in the vocabulary."""
    for name in ("eos_token_id", "bos_token_id", "pad_token_id"):
        value = source.get(name)
        for token in value if isinstance(value, list) else [] if value is None else [value]:
            if name == "pad_token_id" and token == _NO_PADDING:
                continue
            if not is_int(token) or not 0 <= token < vocab_size:
                raise ModelConfigError(
                    f"{name} must be a token id in [0, {vocab_size}), got {token!r}", file
                )


def _layers(
    raw: Mapping[str, Any],
    usual_head_dim: int,
    max_positions: int,
    quantization: QuantizationConfig | None,
) -> tuple[LayerSpec, ...]:
    layers = read_layers(raw, max_positions)
    if quantization is not None:
        layers = _quantized(layers, quantization)
    ropes = {(spec.rope, spec.heads) for spec in layers if spec.rope and not spec.latent}
    for rope, heads in ropes:
        head_dim = heads.head_dim if heads else usual_head_dim
        if rope.num_dims(head_dim) % 2 or not rope.num_dims(head_dim):
            raise ModelConfigError(
                f"partial_rotary_factor ({rope.share}) of head_dim ({head_dim}) must be an even "
                f"number of dimensions, got {rope.num_dims(head_dim)}"
            )
        for name in ("long_factors", "short_factors"):
            factors = getattr(rope, name)
            if factors and 2 * len(factors) != rope.num_dims(head_dim):
                raise ModelConfigError(
                    f"{name.removesuffix('s')} must have a number for each of the "
                    f"{rope.num_dims(head_dim) // 2} rotated pairs of a head, got {len(factors)}"
                )
    if not any(spec.has_attention for spec in layers):
        raise ModelConfigError("layer_types must name a full_attention layer")
    return layers


def _multiplier(raw: Mapping[str, Any], name: str) -> float:
    return positive_float(raw, name, default=1.0) if has_multipliers(raw) else 1.0


def _score_scale(raw: Mapping[str, Any], head_dim: int) -> float:
    if has_multipliers(raw):
        return _multiplier(raw, "attention_multiplier")
    usual = 1 if has_head_sizes_by_layer(raw) else head_dim
    scale: float = positive_float(raw, "query_pre_attn_scalar", default=usual) ** -0.5
    return scale * score_factor(raw) if has_latents(raw) else scale


def _quantized(
    layers: tuple[LayerSpec, ...], quantization: QuantizationConfig
) -> tuple[LayerSpec, ...]:
    return tuple(
        replace(spec, rules=quantization.of_layer(layer)) for layer, spec in enumerate(layers)
    )


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    if is_hybrid(raw) and _activation(raw) != "silu":
        raise ModelConfigError(f"hidden_act must be silu, got {raw['hidden_act']!r}")
    if has_latents(raw) and raw.get("attention_bias"):
        raise ModelConfigError("attention_bias is not supported with latent attention")


def _activation(raw: Mapping[str, Any]) -> Activation:
    # Gemma names it hidden_activation.
    name = "hidden_act" if raw.get("hidden_activation") is None else "hidden_activation"
    value: Activation = raw.get(name) or "silu"
    allowed = ("relu2",) if architecture_name(raw) in _UNGATED else _ACTIVATIONS
    if value not in allowed:
        raise ModelConfigError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
    return value


def _quantization(raw: Mapping[str, Any]) -> QuantizationConfig | None:
    config = read_quantization(raw)
    rules = [rule for _, rule in config.rules if rule] if config else []
    packings = {rule.stored.packing for rule in rules}
    if "mxfp4" in packings and architecture_name(raw) not in _WITH_MXFP4:
        raise ModelConfigError(f"quant_method mxfp4 is supported for {', '.join(_WITH_MXFP4)}")
    if packings - {"mxfp4"} and architecture_name(raw) in _WITH_MXFP4:
        raise ModelConfigError(
            f"{architecture_name(raw)} is supported with quant_method mxfp4, or unquantized"
        )
    return config


def _eos_token_ids(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    """Return all tokens that end a text; each file has an id, a list of ids, or neither."""
    ids: list[int] = []
    for source in (generation, raw):
        value = source.get("eos_token_id")
        ids += value if isinstance(value, list) else [] if value is None else [value]
    return tuple(dict.fromkeys(ids))
