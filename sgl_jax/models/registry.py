"""From a Hugging Face architecture name to a model: what each family adds to a plain layer.

To add a family: write a function that composes its layer, and name it in `_FAMILIES`.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from jax.typing import DTypeLike

from sgl_jax.kernels.attention.api import RaggedPagedAttention
from sgl_jax.kernels.attention.xla import (
    ragged_paged_attention as xla_ragged_paged_attention,
)
from sgl_jax.kernels.grouped_matmul.blocked import blocked_grouped_matmul
from sgl_jax.kernels.grouped_matmul.interface import GroupedMatmul
from sgl_jax.layers.attention import Attention, replicated_kv_heads
from sgl_jax.layers.mlp import GatedMLP
from sgl_jax.layers.moe import MixtureOfExperts
from sgl_jax.models.causal_lm import CausalLM, DecoderLayer
from sgl_jax.models.config import ModelConfig, ModelConfigError


class BuildOptions(NamedTuple):
    """What a model is built for, beside its config."""

    dtype: DTypeLike
    tp_size: int = 1
    data_shards: int = 1  # parts each layer's weights are split into over the data axis
    attend: RaggedPagedAttention = xla_ragged_paged_attention
    multiply_groups: GroupedMatmul = blocked_grouped_matmul
    has_kv_scales: bool = False  # of an 8-bit KV cache


def build_model(config: ModelConfig, options: BuildOptions) -> CausalLM:
    """Declare the model: its parameters are shapes until a checkpoint fills them.

    Raises:
        ModelConfigError: the architecture is unknown; the message lists those that are known.
        ValueError: the heads cannot be split over `tp_size` chips.
    """
    if config.architecture not in _FAMILIES:
        known = ", ".join(sorted(_FAMILIES))
        raise ModelConfigError(
            f"architecture {config.architecture!r} is not supported; supported: {known}"
        )
    return CausalLM(
        config,
        _FAMILIES[config.architecture](config, options),
        dtype=options.dtype,
        tp_size=options.tp_size,
        data_shards=options.data_shards,
    )


def _llama(config: ModelConfig, options: BuildOptions) -> DecoderLayer:
    return DecoderLayer(config, _attention(config, options), _mlp(config, options), options.dtype)


def _qwen2(config: ModelConfig, options: BuildOptions) -> DecoderLayer:
    attention = _attention(config, options, qkv_bias=True)
    return DecoderLayer(config, attention, _mlp(config, options), options.dtype)


def _qwen3(config: ModelConfig, options: BuildOptions) -> DecoderLayer:
    attention = _attention(config, options, qk_norm=True)
    return DecoderLayer(config, attention, _mlp(config, options), options.dtype)


def _qwen3_moe(config: ModelConfig, options: BuildOptions) -> DecoderLayer:
    if config.moe is None:
        raise ModelConfigError("Qwen3MoeForCausalLM needs num_experts in config.json")
    _require_divisible("moe_intermediate_size", config.moe.intermediate_size, options.tp_size)
    experts = MixtureOfExperts(
        config.hidden_size,
        config.moe.intermediate_size,
        config.moe.num_experts,
        config.moe.top_k,
        norm_topk_prob=config.moe.norm_topk_prob,
        dtype=options.dtype,
        multiply=options.multiply_groups,
    )
    attention = _attention(config, options, qk_norm=True)
    return DecoderLayer(config, attention, experts, options.dtype)


def _attention(
    config: ModelConfig, options: BuildOptions, *, qkv_bias: bool = False, qk_norm: bool = False
) -> Attention:
    return Attention(
        config.hidden_size,
        config.num_heads,
        replicated_kv_heads(config.num_heads, config.num_kv_heads, options.tp_size),
        config.head_dim,
        dtype=options.dtype,
        qkv_bias=qkv_bias,
        qk_norm_eps=config.rms_norm_eps if qk_norm else None,
        sliding_window=config.sliding_window,
        attend=options.attend,
        has_kv_scales=options.has_kv_scales,
    )


def _mlp(config: ModelConfig, options: BuildOptions) -> GatedMLP:
    _require_divisible("intermediate_size", config.intermediate_size, options.tp_size)
    return GatedMLP(config.hidden_size, config.intermediate_size, options.dtype)


def _require_divisible(name: str, size: int, tp_size: int) -> None:
    if size % tp_size:
        raise ValueError(f"tp_size ({tp_size}) must divide {name} ({size})")


_FAMILIES: Mapping[str, Callable[[ModelConfig, BuildOptions], DecoderLayer]] = MappingProxyType(
    {
        "LlamaForCausalLM": _llama,
        "Qwen2ForCausalLM": _qwen2,
        "Qwen3ForCausalLM": _qwen3,
        "Qwen3MoeForCausalLM": _qwen3_moe,
    }
)
