"""What differs between the layers of a Gemma 4, from config.json.

Attention to all tokens has other heads than attention in windows, and the last layers read the
cache of an earlier layer. Other architectures have none of these fields.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sgl_jax.models.config_defaults import has_head_sizes_by_layer
from sgl_jax.models.config_fields import (
    ModelConfigError,
    is_int,
    object_field,
    positive_int,
    switch,
)
from sgl_jax.models.rope_config import FULL, LayerKind


@dataclass(frozen=True)
class HeadSizes:
    """The heads of a layer with KV of another shape than the model's."""

    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class PerLayerEmbeddings:
    """Sizes of a second embedding, with a vector of each token for every layer."""

    vocab_size: int
    size: int  # of one layer's vector


def read_per_layer_embeddings(raw: Mapping[str, Any]) -> PerLayerEmbeddings | None:
    """Return the sizes of config.json's contents `raw`; None without such an embedding.

    Like the functions below, raise ModelConfigError.
    """
    if not has_head_sizes_by_layer(raw) or not raw.get("hidden_size_per_layer_input"):
        return None
    vocab_size = positive_int(raw, "vocab_size_per_layer_input")
    if vocab_size < positive_int(raw, "vocab_size"):
        raise ModelConfigError(
            f"vocab_size_per_layer_input ({vocab_size}) must be at least vocab_size "
            f"({raw['vocab_size']})"
        )
    return PerLayerEmbeddings(vocab_size, positive_int(raw, "hidden_size_per_layer_input"))


def read_head_sizes(raw: Mapping[str, Any], kinds: Sequence[LayerKind]) -> list[HeadSizes | None]:
    """Return the heads of each layer, of one of `kinds`; None for those of the model.

    They are given by layer (transformers 5.24), or for all layers with attention to all tokens.
    """
    if not has_head_sizes_by_layer(raw):
        return [None] * len(kinds)
    usual = HeadSizes(positive_int(raw, "num_key_value_heads"), positive_int(raw, "head_dim"))
    if raw.get("per_layer_config") is not None:
        sizes = _listed_sizes(raw, usual, len(kinds))
    else:
        num_kv_heads = usual.num_kv_heads
        if switch(raw, "attention_k_eq_v") and raw.get("num_global_key_value_heads") is not None:
            num_kv_heads = positive_int(raw, "num_global_key_value_heads")
        full = HeadSizes(num_kv_heads, positive_int(raw, "global_head_dim"))
        sizes = [full if kind == FULL else usual for kind in kinds]
    num_heads = positive_int(raw, "num_attention_heads")
    for own in set(sizes):
        if own.head_dim % 2 or num_heads % own.num_kv_heads:
            raise ModelConfigError(
                f"every head_dim must be even, and num_attention_heads ({num_heads}) a multiple of "
                f"every num_key_value_heads, got {own.head_dim} and {own.num_kv_heads}"
            )
    if len(set(zip(kinds, sizes, strict=True))) > len(set(kinds)):
        raise ModelConfigError("per_layer_config must give layers of one kind the same heads")
    return [None if own == usual else own for own in sizes]


def _listed_sizes(raw: Mapping[str, Any], usual: HeadSizes, num_layers: int) -> list[HeadSizes]:
    sizes = [usual] * num_layers
    for key in (listed := object_field(raw, "per_layer_config")):
        own = object_field(listed, key)
        if not key.isdecimal() or int(key) >= num_layers:
            raise ModelConfigError(
                f"per_layer_config must have layers in [0, {num_layers}), got {key!r}"
            )
        for name in own:
            if name not in ("num_key_value_heads", "head_dim"):
                raise ModelConfigError(
                    f"{name} = {own[name]!r} in per_layer_config is not supported"
                )
        sizes[int(key)] = HeadSizes(
            positive_int(own, "num_key_value_heads", default=usual.num_kv_heads),
            positive_int(own, "head_dim", default=usual.head_dim),
        )
    return sizes


def read_cache_sources(raw: Mapping[str, Any], kinds: Sequence[LayerKind]) -> list[int | None]:
    """Return the layer whose cache each layer reads; None for layers that have one.

    The last `num_kv_shared_layers` read the cache of the last layer of their kind before them.
    """
    num_shared = raw.get("num_kv_shared_layers") or 0
    if not has_head_sizes_by_layer(raw) or num_shared == 0:
        return [None] * len(kinds)
    if not is_int(num_shared) or not 0 < num_shared < len(kinds):
        raise ModelConfigError(
            f"num_kv_shared_layers must be in [0, {len(kinds)}), got {num_shared!r}"
        )
    num_own = len(kinds) - num_shared
    last = {kind: layer for layer, kind in enumerate(kinds[:num_own])}
    if not last.keys() >= set(kinds):
        raise ModelConfigError(
            f"num_kv_shared_layers ({num_shared}) leaves no layer with a cache of some kind of "
            "layer_types"
        )
    return [None if layer < num_own else last[kind] for layer, kind in enumerate(kinds)]


def check_rope_by_kind(raw: Mapping[str, Any], kinds: Sequence[LayerKind]) -> None:
    """Raise ModelConfigError unless each kind of layer has its rotation."""
    if has_head_sizes_by_layer(raw):
        given = object_field(raw, "rope_parameters")
        for kind in set(kinds):
            if not object_field(given, kind):
                raise ModelConfigError(f"rope_parameters must have {kind}")
