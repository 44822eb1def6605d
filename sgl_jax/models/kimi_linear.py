"""Kimi Linear: delta rules with a decay per channel, unrotated latent attention, experts."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
from numpy.typing import NDArray

from sgl_jax.core.layer_configs import GatedDeltaConfig
from sgl_jax.layers.gated_delta_net import ChannelGates, DepthwiseConv, GatedDeltaNet
from sgl_jax.layers.head_sources import ByHead, HeadRows
from sgl_jax.layers.norm import RMSNorm
from sgl_jax.layers.sources import Derived, Tensor
from sgl_jax.layers.tensor_keys import Index, Shape, Tensors
from sgl_jax.models.architecture import Architecture, BuildOptions
from sgl_jax.models.config import LayerSpec, ModelConfig
from sgl_jax.models.decoder_layer import DecoderLayer
from sgl_jax.models.deepseek import latent_attention
from sgl_jax.models.llama import gated_mlp, norm, require_divisible
from sgl_jax.models.projections import linear
from sgl_jax.models.qwen3 import ExpertNames, mixture_of_experts

_BLOCK = "block_sparse_moe."
_EXPERTS = ExpertNames(
    block=_BLOCK, gate="w1", up="w3", down="w2", choice_bias="gate.e_score_correction_bias"
)


def kimi_linear_layer(config: ModelConfig, spec: LayerSpec, options: BuildOptions) -> DecoderLayer:
    """Declare one layer. Raise ValueError if `tp_size` chips cannot split heads or widths.

    transformers names dense feed-forward layers like those with experts.
    """
    own_norm = partial(norm, size=config.hidden_size, config=config, options=options)
    return DecoderLayer(
        own_norm("input_layernorm"),
        delta_attention(config, spec, spec.recurrence, options)
        if isinstance(spec.recurrence, GatedDeltaConfig)
        else latent_attention(config, spec, options),
        own_norm("post_attention_layernorm"),
        mixture_of_experts(config, spec, spec.moe, options, _EXPERTS)
        if spec.moe
        else gated_mlp(config, spec, options, other_prefix=_BLOCK),
    )


def delta_attention(
    config: ModelConfig, spec: LayerSpec, own: GatedDeltaConfig, options: BuildOptions
) -> GatedDeltaNet:
    """Declare a recurrence. Raise ValueError if `tp_size` chips cannot split its heads."""
    require_divisible("linear_num_heads", own.num_key_heads, options.tp_size)
    hidden, dtype = config.hidden_size, jnp.dtype(options.dtype)
    heads, dim = own.num_key_heads, own.key_dim
    width = heads * dim

    def by_head(kind: str, inputs: Shape) -> ByHead:
        parts = (HeadRows(f"self_attn.{x}_{kind}.weight", width, 0, dim, dim) for x in "qkv")
        return ByHead(tuple(parts), heads, inputs)

    def matrix(name: str, inputs: int, outputs: int) -> Tensor:
        return Tensor(f"self_attn.{name}_proj.weight", (inputs, outputs), transposed=True)

    down = (HeadRows(f"self_attn.{x}_a_proj.weight", dim, 0, dim, dim) for x in "fg")
    return GatedDeltaNet(
        linear(spec, options, by_head("proj", (hidden,)), "outputs"),
        linear(spec, options, matrix("g_b", dim, width), "outputs"),
        linear(spec, options, matrix("b", hidden, heads), "outputs"),
        DepthwiseConv(by_head("conv1d", (1, own.conv_size)), dtype, options.kernels.causal_conv),
        _ByHead(Tensor("self_attn.A_log", (1, 1, heads, 1))),
        Tensor("self_attn.dt_bias", (width,)),
        RMSNorm(Tensor("self_attn.o_norm.weight", (dim,)), config.rms_norm_eps, dtype),
        linear(spec, options, matrix("o", width, hidden), "inputs"),
        key_dim=dim,
        value_dim=dim,
        group=1,
        recur=options.kernels.gated_delta,
        channel_gates=ChannelGates(
            linear(spec, options, ByHead(tuple(down), 1, (hidden,))),
            linear(spec, options, matrix("f_b", dim, width), "outputs"),
        ),
    )


@dataclass(frozen=True)
class _ByHead(Derived):
    """A number for each head, [heads], stored as [1, 1, heads, 1]."""

    @property
    def shape(self) -> Shape:
        return (self.part.shape[2],)

    def fill(self, out: NDArray[Any], index: Index, tensors: Tensors, prefix: str = "") -> None:
        one = slice(0, 1)
        self.part.fill(out[None, None, :, None], (one, one, *index, one), tensors, prefix)


KIMI_LINEAR = Architecture(kimi_linear_layer)
