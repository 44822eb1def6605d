"""Qwen3: Llama with normalised queries and keys; Qwen3-MoE: some or all layers have experts."""

from functools import partial

from sgl_jax.layers.linear import ExpertLinear, Linear
from sgl_jax.layers.moe import MixtureOfExperts
from sgl_jax.layers.sources import Stacked, Tensor
from sgl_jax.models.config import LayerSpec, ModelConfig, ModelConfigError, MoeConfig
from sgl_jax.models.decoder import BuildOptions, DecoderLayer
from sgl_jax.models.llama import llama_layer, require_divisible

qwen3_layer = partial(llama_layer, qk_norm=True)


def qwen3_moe_layer(config: ModelConfig, spec: LayerSpec, options: BuildOptions) -> DecoderLayer:
    """Declare one layer, with experts if its spec says so."""
    if config.moe is None:
        raise ModelConfigError("Qwen3MoeForCausalLM needs num_experts, and layers that have them")
    experts = _experts(config, spec.moe, options) if spec.moe else None
    return qwen3_layer(config, spec, options, experts=experts)


def _experts(config: ModelConfig, moe: MoeConfig, options: BuildOptions) -> MixtureOfExperts:
    hidden, width, dtype = config.hidden_size, moe.intermediate_size, options.dtype
    require_divisible("moe_intermediate_size", width, options.tp_size)
    router = Tensor("mlp.gate.weight", (hidden, moe.num_experts), transposed=True)

    def matrices(name: str, *, inwards: bool) -> ExpertLinear:
        # [experts, width, hidden] all three, as the grouped product wants them.
        one = Tensor(f"{name}_proj.weight", (width, hidden), transposed=not inwards)
        names = tuple(f"mlp.experts.{expert}." for expert in range(moe.num_experts))
        return ExpertLinear(Stacked(names, one), dtype, options.multiply_groups, transposed=inwards)

    return MixtureOfExperts(
        Linear(router, dtype),
        matrices("gate", inwards=True),
        matrices("up", inwards=True),
        matrices("down", inwards=False),
        num_experts=moe.num_experts,
        top_k=moe.top_k,
        norm_topk_prob=moe.norm_topk_prob,
    )
