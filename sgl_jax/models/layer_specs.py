"""The specification of each layer of a model, from config.json.

These fields were renamed over the years; each spelling is read.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from sgl_jax.core.layer_configs import (
    GatedDeltaConfig,
    IndexerConfig,
    LatentConfig,
    Recurrence,
    StateSpaceConfig,
)
from sgl_jax.models.config_defaults import (
    has_chunks,
    has_head_sizes_by_layer,
    has_indexer,
    has_latents,
    has_single_parts,
    has_state_spaces,
    is_hybrid,
    leaves_layers_unrotated,
)
from sgl_jax.models.config_fields import (
    ModelConfigError,
    is_int,
    positive_int,
    switch,
)
from sgl_jax.models.gemma4_config import (
    HeadSizes,
    check_rope_by_kind,
    read_cache_sources,
    read_head_sizes,
)
from sgl_jax.models.moe_config import MoeConfig, read_moe
from sgl_jax.models.quantization import LayerRules
from sgl_jax.models.rope_config import (
    CHUNKED,
    EXPERTS,
    FEEDING,
    FULL,
    LINEAR,
    SLIDING,
    UNROTATED,
    LayerKind,
    QueryScale,
    RopeConfig,
    read_query_scale,
    read_rope,
    read_unrotated_query_scale,
)
from sgl_jax.models.state_space_config import read_state_space


@dataclass(frozen=True)
class LayerSpec:
    """One layer: all settings that may differ between the layers of one model."""

    rope: RopeConfig | None  # None: a recurrence, or attention without rotation
    sliding_window: int | None  # None: attention to all tokens, or a recurrence
    moe: MoeConfig | None  # None: a dense feed-forward layer
    recurrence: Recurrence | None = None  # None: attention, or neither
    latent: LatentConfig | None = None  # None: no latent attention
    query_scale: QueryScale | None = None  # None: queries do not depend on positions
    # Attention is to the tokens since the last multiple of `sliding_window`.
    is_chunked: bool = False
    heads: HeadSizes | None = None  # None: the model's
    values_are_keys: bool = False  # the keys' projection gives values, too
    cache_source: int | None = None  # reads the cache of this layer; None: has a cache
    mlp_width: int | None = None  # of the dense feed-forward layer; None: the model's
    mixes_tokens: bool = True  # False: a feed-forward layer alone, without a cache
    # Layers with equal specifications may have unlike rules: `scan_segments.layer_kinds`.
    rules: LayerRules = field(default=LayerRules(), compare=False)

    @property
    def has_attention(self) -> bool:
        return self.mixes_tokens and self.recurrence is None

    @property
    def gated_delta(self) -> GatedDeltaConfig | None:
        return self.recurrence if isinstance(self.recurrence, GatedDeltaConfig) else None

    @property
    def state_space(self) -> StateSpaceConfig | None:
        return self.recurrence if isinstance(self.recurrence, StateSpaceConfig) else None


def read_layers(raw: Mapping[str, Any], max_positions: int) -> tuple[LayerSpec, ...]:
    """Return the layers of config.json's contents `raw`, starting next to the embedding.

    `max_positions` is the model's context. Raises ModelConfigError.
    """
    num_layers = positive_int(raw, "num_hidden_layers")
    kinds = _layer_kinds(raw, num_layers)
    if has_head_sizes_by_layer(raw):
        kinds[-1] = FULL  # transformers overrides the config here, too
    check_rope_by_kind(raw, kinds)
    head_sizes, sources = read_head_sizes(raw, kinds), read_cache_sources(raw, kinds)
    is_wide, k_is_v = (switch(raw, name) for name in ("use_double_wide_mlp", "attention_k_eq_v"))
    wide = 2 * positive_int(raw, "intermediate_size") if is_wide else None
    ropes = {kind: read_rope(raw, kind, max_positions) for kind in sorted(set(kinds) - UNROTATED)}
    windows = _windows(raw, kinds, max_positions)
    moe, recurrence = read_moe(raw), _recurrence(raw) if LINEAR in kinds else None
    latent = read_latent(raw) if has_latents(raw) else None
    reuses = _reusing_layers(raw, num_layers) if has_indexer(raw) else [False] * num_layers
    query_scale = read_query_scale(raw, max_positions)
    unrotated_query_scale = read_unrotated_query_scale(raw)
    is_rotated = _rotated_layers(raw, num_layers)
    is_sparse = [False] * num_layers if moe is None else _sparse_layers(raw, kinds)
    return tuple(
        LayerSpec(
            rope=ropes.get(kind) if rotated else None,
            sliding_window=windows.get(kind),
            moe=moe if sparse else None,
            recurrence=recurrence if kind == LINEAR else None,
            latent=None if kind == LINEAR else reusing(latent) if reused else latent,
            query_scale=query_scale if rotated else unrotated_query_scale,
            is_chunked=kind == CHUNKED and windows.get(kind) is not None,
            heads=heads,
            values_are_keys=k_is_v and kind == FULL,
            cache_source=source,
            mlp_width=None if source is None else wide,
            mixes_tokens=kind not in FEEDING,
        )
        for kind, rotated, sparse, heads, source, reused in zip(
            kinds, is_rotated, is_sparse, head_sizes, sources, reuses, strict=True
        )
    )


def _windows(
    raw: Mapping[str, Any], kinds: Sequence[LayerKind], max_positions: int
) -> dict[LayerKind, int]:
    """Return the sizes of windows and chunks; those of the whole context are none.

    They stay, as long as the context, where layers without a window have other heads.
    """
    sizes = {}
    # Gemma 4 has no such switch, and its kinds of layers have unlike heads.
    may_switch = not has_head_sizes_by_layer(raw)
    if SLIDING in kinds and (not may_switch or switch(raw, "use_sliding_window", default=True)):
        sizes[SLIDING] = positive_int(raw, "sliding_window")
    if CHUNKED in kinds:
        sizes[CHUNKED] = positive_int(raw, "attention_chunk_size")
    if has_head_sizes_by_layer(raw):
        return {kind: min(size, max_positions) for kind, size in sizes.items()}
    return {kind: size for kind, size in sizes.items() if size < max_positions}


# Names of kinds in earlier versions of transformers.
_EARLIER_NAMES: Mapping[str, LayerKind] = MappingProxyType({"mamba": LINEAR, "attention": FULL})


def _layer_kinds(raw: Mapping[str, Any], num_layers: int) -> list[LayerKind]:
    """Return each layer's kind from the fields that specify it.

    These are a list of kinds; or a period, with each n-th layer full; or the number of full layers
    before layers with a window. Hybrid models have recurrences instead of windows. In models with
    unrotated layers only these may have windows, or all others have chunks.
    """
    kinds = raw.get("layer_types")
    if has_indexer(raw):
        return [FULL] * num_layers
    if kinds is not None:
        known = (FULL, _local_kind(raw), *(sorted(FEEDING) if has_single_parts(raw) else ()))
        if not isinstance(kinds, list) or len(kinds) != num_layers:
            raise ModelConfigError(
                f"layer_types must be a list of {num_layers} names (num_hidden_layers), got "
                f"{kinds!r}"
            )
        if has_state_spaces(raw):
            kinds = [_EARLIER_NAMES.get(kind, kind) for kind in kinds]
        for kind in kinds:
            if kind not in known:
                raise ModelConfigError(
                    f"layer_types may name {' and '.join(known)}; {kind!r} is not supported"
                )
        return list(kinds)
    if has_chunks(raw):
        local = FULL if raw.get("attention_chunk_size") is None else CHUNKED
        return [local if rotated else FULL for rotated in _rotated_layers(raw, num_layers)]
    if is_hybrid(raw):
        period = positive_int(raw, "full_attention_interval")
        return [LINEAR if (i + 1) % period else FULL for i in range(num_layers)]
    for name in ("_sliding_window_pattern", "sliding_window_pattern"):
        if raw.get(name) is not None:
            period = positive_int(raw, name)
            return [SLIDING if (i + 1) % period else FULL for i in range(num_layers)]
    if not switch(raw, "use_sliding_window", default=raw.get("sliding_window") is not None):
        return [FULL] * num_layers
    if leaves_layers_unrotated(raw):
        return [FULL if rotated else SLIDING for rotated in _rotated_layers(raw, num_layers)]
    full = raw.get("max_window_layers") or 0
    if not is_int(full) or full < 0:
        raise ModelConfigError(f"max_window_layers must be 0 or more, got {full!r}")
    return [FULL if i < full else SLIDING for i in range(num_layers)]


def _local_kind(raw: Mapping[str, Any]) -> LayerKind:
    """Return the kind of a model's layers that are not full attention."""
    if has_chunks(raw):
        return CHUNKED
    return LINEAR if is_hybrid(raw) or has_state_spaces(raw) else SLIDING


def _rotated_layers(raw: Mapping[str, Any], num_layers: int) -> list[bool]:
    """Return which layers rotate queries and keys, from a list of 0 and 1 or from a period."""
    if has_state_spaces(raw):
        kind = raw.get("position_embedding_type")
        if kind not in (None, "nope", "rope"):
            raise ModelConfigError(
                f"position_embedding_type must be one of nope, rope, got {kind!r}"
            )
        return [kind == "rope"] * num_layers
    if not leaves_layers_unrotated(raw):
        return [True] * num_layers
    listed = raw.get("no_rope_layers")
    if not listed:
        period = positive_int(raw, "no_rope_layer_interval")
        return [(layer + 1) % period != 0 for layer in range(num_layers)]
    if not isinstance(listed, list) or len(listed) < num_layers or not set(listed) <= {0, 1}:
        raise ModelConfigError(
            f"no_rope_layers must be a list of {num_layers} numbers 0 or 1 (num_hidden_layers), "
            f"got {listed!r}"
        )
    return [bool(own) for own in listed[:num_layers]]


def read_latent(raw: Mapping[str, Any]) -> LatentConfig:
    """Return the sizes of latent attention in config.json's contents. Raise ModelConfigError."""
    rope_dim = positive_int(raw, "qk_rope_head_dim")
    if rope_dim % 2:
        raise ModelConfigError(f"qk_rope_head_dim must be even, got {rope_dim}")
    if not switch(raw, "rope_interleave"):
        raise ModelConfigError("rope_interleave = False is not supported")
    return LatentConfig(
        rank=positive_int(raw, "kv_lora_rank"),
        nope_dim=positive_int(raw, "qk_nope_head_dim"),
        rope_dim=rope_dim,
        value_dim=positive_int(raw, "v_head_dim"),
        query_rank=None if raw.get("q_lora_rank") is None else positive_int(raw, "q_lora_rank"),
        indexer=_indexer(raw, rope_dim) if has_indexer(raw) else None,
    )


def _indexer(raw: Mapping[str, Any], rope_dim: int) -> IndexerConfig:
    positive_int(raw, "q_lora_rank")
    own = IndexerConfig(
        num_heads=positive_int(raw, "index_n_heads"),
        head_dim=positive_int(raw, "index_head_dim"),
        top_k=positive_int(raw, "index_topk"),
        pairs_neighbours=switch(raw, "indexer_rope_interleave"),
    )
    if own.head_dim <= rope_dim:
        raise ModelConfigError(
            f"index_head_dim ({own.head_dim}) must exceed qk_rope_head_dim ({rope_dim})"
        )
    return own


def reusing(latent: LatentConfig | None, reuses: bool = True) -> LatentConfig | None:
    """Return the sizes of a layer like `latent` that reuses the choice of an earlier indexer."""
    if latent is None or latent.indexer is None:
        return latent
    return replace(latent, indexer=replace(latent.indexer, reuses=reuses))


def num_indexers(specs: Sequence[LayerSpec]) -> int:
    """Return the number of layers that choose tokens."""
    indexers = (spec.latent.indexer for spec in specs if spec.latent)
    return sum(own is not None and not own.reuses for own in indexers)


_LISTS_OF_INDEXERS = ("indexer_types", "index_topk_pattern")
# The letters of a pattern, as a text or as a list, and the names of a list.
_REUSES: Mapping[Any, bool] = MappingProxyType(
    {"F": False, "S": True, "full": False, "shared": True}
)


def _reusing_layers(raw: Mapping[str, Any], num_layers: int) -> list[bool]:
    """Return which layers attend to the tokens that the last indexer before them chose.

    They are listed, or are all but the first few (`index_skip_topk_offset`) and, after them, each
    n-th (`index_topk_freq`).
    """
    listed = next((name for name in _LISTS_OF_INDEXERS if raw.get(name)), None)
    if listed is None:
        period = raw.get("index_topk_freq") or 1
        offset = 2 if (given := raw.get("index_skip_topk_offset")) is None else given
        for name, value in (("index_topk_freq", period), ("index_skip_topk_offset", offset)):
            if not is_int(value) or value < 1:
                raise ModelConfigError(f"{name} must be a positive integer, got {value!r}")
        return [max(layer + 1 - offset, 0) % period != 0 for layer in range(num_layers)]
    kinds = raw[listed]
    if not isinstance(kinds, list | str) or not all(kind in _REUSES for kind in map(str, kinds)):
        raise ModelConfigError(f"{listed} may name full and shared, got {kinds!r}")
    found = [_REUSES[kind] for kind in kinds]
    if len(found) != num_layers or found[0]:
        raise ModelConfigError(
            f"{listed} must be {num_layers} kinds (num_hidden_layers), the first full, got "
            f"{kinds!r}"
        )
    return found


def _recurrence(raw: Mapping[str, Any]) -> Recurrence:
    return read_state_space(raw) if has_state_spaces(raw) else _gated_delta(raw)


def _gated_delta(raw: Mapping[str, Any]) -> GatedDeltaConfig:
    key_heads = positive_int(raw, "linear_num_key_heads")
    value_heads = positive_int(raw, "linear_num_value_heads")
    if value_heads % key_heads:
        raise ModelConfigError(
            f"linear_num_value_heads ({value_heads}) must be a multiple of linear_num_key_heads "
            f"({key_heads})"
        )
    conv_size = positive_int(raw, "linear_conv_kernel_dim")
    if conv_size < 2:
        raise ModelConfigError("linear_conv_kernel_dim must be 2 or more, got 1")
    return GatedDeltaConfig(
        num_key_heads=key_heads,
        num_value_heads=value_heads,
        key_dim=positive_int(raw, "linear_key_head_dim"),
        value_dim=positive_int(raw, "linear_value_head_dim"),
        conv_size=conv_size,
        decays_by_channel=raw.get("linear_head_dim") is not None,
    )


def _sparse_layers(raw: Mapping[str, Any], kinds: Sequence[LayerKind]) -> list[bool]:
    """Return which layers have experts: every `decoder_sparse_step`-th except `mlp_only_layers`.

    Llama 4 lists them in `moe_layers`, or they are every `interleave_moe_layer_step`-th.
    With `n_routed_experts`, all layers after the first `first_k_dense_replace` have experts, or
    those that `mlp_layer_types` names "sparse". Where a layer has a single part, its kind says it.
    """
    num_layers = len(kinds)
    if has_single_parts(raw):
        return [kind == EXPERTS for kind in kinds]
    if raw.get("mlp_layer_types") is not None:
        return _typed(raw["mlp_layer_types"], num_layers)
    if raw.get("n_routed_experts") is not None:
        first = raw.get("first_k_dense_replace") or 0
        if not is_int(first) or not 0 <= first <= num_layers:
            raise ModelConfigError(
                f"first_k_dense_replace must be in [0, {num_layers}], got {first!r}"
            )
        if (every := positive_int(raw, "moe_layer_freq", default=1)) != 1:
            raise ModelConfigError(f"moe_layer_freq must be 1, got {every}")
        return [layer >= first for layer in range(num_layers)]
    if raw.get("moe_layers") is not None:
        return _listed(raw["moe_layers"], num_layers)
    step_name = "interleave_moe_layer_step" if has_chunks(raw) else "decoder_sparse_step"
    step = positive_int(raw, step_name, default=1)
    dense = raw.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(
        is_int(layer) and 0 <= layer < num_layers for layer in dense
    ):
        raise ModelConfigError(
            f"mlp_only_layers must be a list of layers in [0, {num_layers}), got {dense!r}"
        )
    return [(layer + 1) % step == 0 and layer not in dense for layer in range(num_layers)]


def _typed(kinds: Any, num_layers: int) -> list[bool]:
    if not isinstance(kinds, list) or len(kinds) != num_layers or {*kinds} - {"dense", "sparse"}:
        raise ModelConfigError(
            f"mlp_layer_types must be a list of {num_layers} names dense or sparse "
            f"(num_hidden_layers), got {kinds!r}"
        )
    return [kind == "sparse" for kind in kinds]


def _listed(layers: Any, num_layers: int) -> list[bool]:
    if not isinstance(layers, list) or not all(
        is_int(layer) and 0 <= layer < num_layers for layer in layers
    ):
        raise ModelConfigError(
            f"moe_layers must be a list of layers in [0, {num_layers}), got {layers!r}"
        )
    return [layer in layers for layer in range(num_layers)]
