"""Nemotron-H: each layer is a state space model (Mamba-2), attention, or a feed-forward layer.

Attention is not rotated, and dense feed-forward layers and experts have no gates.
"""

from sgl_jax.models.architecture import Architecture, BuildOptions
from sgl_jax.models.config import LayerSpec, ModelConfig
from sgl_jax.models.decoder_layer import DecoderLayer
from sgl_jax.models.llama import MLPNames, attention, gated_mlp, norm
from sgl_jax.models.mamba2 import mamba2
from sgl_jax.models.qwen3 import ExpertNames, mixture_of_experts

_MIXER = "mixer."
_EXPERTS = ExpertNames(_MIXER, gate=None, both="experts.up_proj")


def nemotron_h_layer(config: ModelConfig, spec: LayerSpec, options: BuildOptions) -> DecoderLayer:
    """Declare one layer. Raise ValueError if `tp_size` chips cannot split heads or widths."""
    own_norm = norm("norm", config.hidden_size, config, options)
    if spec.state_space:
        return DecoderLayer(
            own_norm, mamba2(config, spec, spec.state_space, options, _MIXER), None, None
        )
    if spec.mixes_tokens:
        return DecoderLayer(own_norm, attention(config, spec, options, prefix=_MIXER), None, None)
    names = MLPNames(gate=None)
    mlp = (
        mixture_of_experts(config, spec, spec.moe, options, _EXPERTS)
        if spec.moe
        else gated_mlp(config, spec, options, _MIXER, names=names)
    )
    return DecoderLayer(None, None, own_norm, mlp)


NEMOTRON_H = Architecture(
    nemotron_h_layer,
    body="backbone.",
    embeddings="embeddings",
    last_norm="norm_f",
    spare_prefixes=("mtp.",),  # layers that predict further tokens
)
