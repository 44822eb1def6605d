"""Qwen3-Next: three gated delta nets to each layer of attention with a gate, and experts.

Qwen3.5's text model is the same, with a tensor for each projection.
"""

from collections.abc import Callable
from functools import partial

import jax.numpy as jnp

from sgl_jax.core.layer_configs import GatedDeltaConfig
from sgl_jax.layers.gated_delta_net import DepthwiseConv, GatedDeltaNet
from sgl_jax.layers.head_sources import ByHead, HeadRows
from sgl_jax.layers.norm import RMSNorm
from sgl_jax.layers.sources import Source, Tensor
from sgl_jax.models.architecture import Architecture, BuildOptions
from sgl_jax.models.config import LayerSpec, ModelConfig
from sgl_jax.models.decoder_layer import DecoderLayer
from sgl_jax.models.llama import attention, gated_mlp, norm, require_divisible
from sgl_jax.models.projections import linear
from sgl_jax.models.qwen3 import mixture_of_experts
from sgl_jax.models.vision_tower import Qwen3VLTower

# Sources of a gated delta net's input projections, for a hidden size: q, k and v; the output gate;
# the other gates (see `GatedDeltaNet`).
Projections = Callable[[GatedDeltaConfig, int], tuple[Source, Source, Source]]


def hybrid_layer(
    config: ModelConfig, spec: LayerSpec, options: BuildOptions, *, projections: Projections
) -> DecoderLayer:
    """Declare one layer. Raise ValueError if `tp_size` chips cannot split heads or widths."""
    own_norm = partial(norm, size=config.hidden_size, config=config, options=options, from_one=True)
    return DecoderLayer(
        own_norm("input_layernorm"),
        gated_delta_net(config, spec, spec.gated_delta, options, projections)
        if spec.gated_delta
        else attention(config, spec, options, qk_norm="each_head", norms_from_one=True),
        own_norm("post_attention_layernorm"),
        mixture_of_experts(config, spec, spec.moe, options)
        if spec.moe
        else gated_mlp(config, spec, options),
    )


def gated_delta_net(
    config: ModelConfig,
    spec: LayerSpec,
    own: GatedDeltaConfig,
    options: BuildOptions,
    projections: Projections,
) -> GatedDeltaNet:
    require_divisible("linear_num_key_heads", own.num_key_heads, options.tp_size)
    hidden, dtype = config.hidden_size, jnp.dtype(options.dtype)
    qkv, output_gate, gates = projections(own, hidden)
    conv = ByHead(
        flat_rows("linear_attn.conv1d.weight", own), own.num_key_heads, (1, own.conv_size)
    )
    width = own.num_value_heads * own.value_dim
    output = Tensor("linear_attn.out_proj.weight", (width, hidden), transposed=True)
    own_norm = Tensor("linear_attn.norm.weight", (own.value_dim,))
    return GatedDeltaNet(
        linear(spec, options, qkv, "outputs"),
        linear(spec, options, output_gate, "outputs"),
        linear(spec, options, gates, "outputs"),
        DepthwiseConv(conv, dtype, options.kernels.causal_conv),
        Tensor("linear_attn.A_log", (own.num_value_heads,)),
        Tensor("linear_attn.dt_bias", (own.num_value_heads,)),
        RMSNorm(own_norm, config.rms_norm_eps, dtype),
        linear(spec, options, output, "inputs"),
        key_dim=own.key_dim,
        value_dim=own.value_dim,
        group=own.group,
        recur=options.kernels.gated_delta,
    )


def flat_rows(name: str, own: GatedDeltaConfig) -> tuple[HeadRows, ...]:
    """Return a key head's rows of a tensor with all rows of q, then of k, then of v."""
    keys, values = own.num_key_heads * own.key_dim, own.num_value_heads * own.value_dim
    part = partial(HeadRows, name, 2 * keys + values)
    key_size, value_size = own.key_dim, own.group * own.value_dim
    return (
        part(0, key_size, key_size),
        part(keys, key_size, key_size),
        part(2 * keys, value_size, value_size),
    )


def _by_key_head(own: GatedDeltaConfig, hidden: int) -> tuple[Source, Source, Source]:
    """Return each key head's q, k, v and output gate side by side, and its gates."""
    heads, name = own.num_key_heads, "linear_attn.in_proj_qkvz.weight"
    values = own.group * own.value_dim
    stride = own.key_head_channels + values
    part = partial(HeadRows, name, heads * stride)
    gates = Tensor("linear_attn.in_proj_ba.weight", (hidden, 2 * own.num_value_heads), True)
    return (
        ByHead((part(0, stride, own.key_head_channels),), heads, (hidden,)),
        ByHead((part(own.key_head_channels, stride, values),), heads, (hidden,)),
        gates,
    )


def _flat(own: GatedDeltaConfig, hidden: int) -> tuple[Source, Source, Source]:
    heads, values, group = own.num_key_heads, own.num_value_heads, own.group
    gates = tuple(
        HeadRows(f"linear_attn.in_proj_{x}.weight", values, 0, group, group) for x in "ba"
    )
    width = values * own.value_dim
    return (
        ByHead(flat_rows("linear_attn.in_proj_qkv.weight", own), heads, (hidden,)),
        Tensor("linear_attn.in_proj_z.weight", (hidden, width), transposed=True),
        ByHead(gates, heads, (hidden,)),
    )


QWEN3_NEXT = Architecture(
    partial(hybrid_layer, projections=_by_key_head),
    norms_from_one=True,
    spare_prefixes=("mtp.",),  # layers that predict further tokens
)
QWEN3_5_TEXT = QWEN3_NEXT._replace(build_layer=partial(hybrid_layer, projections=_flat))
# The multimodal model: the tower's tensors are read only if images are served.
QWEN3_5 = QWEN3_5_TEXT._replace(
    body="model.language_model.",
    declare_tower=partial(Qwen3VLTower, prefix="model.visual."),
    spare_prefixes=("mtp.", "model.visual."),
)
