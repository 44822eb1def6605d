"""Granite: Llama with factors of embeddings, scores, residual sums and logits, from the config.

Granite MoE has experts; Granite 4 has a feed-forward layer, or experts with a shared one, after
each state space layer (Mamba-2) or attention layer.
"""

from functools import partial

from sgl_jax.layers.linear import GatedMLP
from sgl_jax.layers.moe import MixtureOfExperts, SharedExpert
from sgl_jax.models.architecture import Architecture, BuildOptions
from sgl_jax.models.config import LayerSpec, ModelConfig
from sgl_jax.models.decoder_layer import DecoderLayer
from sgl_jax.models.llama import MLPNames, attention, gated_mlp, norm
from sgl_jax.models.mamba2 import mamba2
from sgl_jax.models.qwen3 import ExpertNames, mixture_of_experts

_EXPERTS = ExpertNames(
    "block_sparse_moe.",
    router="router.layer",
    both="input_linear.weight",
    all_down="output_linear.weight",
)
_SHARED = MLPNames(both="input_linear", down="output_linear")


def granite_layer(
    config: ModelConfig, spec: LayerSpec, options: BuildOptions, *, shares_mlp: bool = False
) -> DecoderLayer:
    """Declare one layer; with `shares_mlp`, its feed-forward layer is also the experts' shared one.

    Raises ValueError if `tp_size` chips cannot split heads or widths.
    """
    own_norm = partial(norm, size=config.hidden_size, config=config, options=options)
    return DecoderLayer(
        own_norm("input_layernorm"),
        mamba2(config, spec, spec.state_space, options, "mamba.")
        if spec.state_space
        else attention(config, spec, options),
        own_norm("post_attention_layernorm"),
        _feed_forward(config, spec, options, shares_mlp=shares_mlp),
        residual_scale=config.residual_scale,
    )


def _feed_forward(
    config: ModelConfig, spec: LayerSpec, options: BuildOptions, *, shares_mlp: bool
) -> GatedMLP | MixtureOfExperts:
    moe = spec.moe
    if not shares_mlp:
        if moe is None:
            return gated_mlp(config, spec, options)
        return mixture_of_experts(config, spec, moe, options, _EXPERTS)
    mlp = gated_mlp(config, spec, options, "shared_mlp.", fused=True, names=_SHARED)
    if moe is None:
        return mlp
    shared = SharedExpert(mlp, None)
    return mixture_of_experts(config, spec, moe, options, _EXPERTS, shared)


GRANITE = Architecture(granite_layer)
GRANITE_HYBRID = Architecture(partial(granite_layer, shares_mlp=True))
