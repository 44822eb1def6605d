"""gpt-oss: attention with sinks and biases, every second layer with a window, experts in MXFP4.

The windows, the rotation (YaRN) and the biases of attention are in the config.
"""

from functools import partial

from sgl_jax.kernels.tpu_chip import SUBLANES
from sgl_jax.layers.linear import ExpertLinear, Linear
from sgl_jax.layers.moe import MixtureOfExperts, clamped_swiglu
from sgl_jax.layers.mxfp4 import BLOCK, Mxfp4
from sgl_jax.layers.sources import Padded, Slice, Source, Tensor, row_size
from sgl_jax.models.config import LayerSpec, ModelConfig, ModelConfigError, MoeConfig
from sgl_jax.models.decoder import BuildOptions, DecoderLayer
from sgl_jax.models.llama import attention, norm


def gpt_oss_layer(config: ModelConfig, spec: LayerSpec, options: BuildOptions) -> DecoderLayer:
    if spec.moe is None or spec.moe.swiglu_limit is None:
        raise ModelConfigError("GptOssForCausalLM needs num_local_experts and swiglu_limit")
    sinks = Tensor("self_attn.sinks", (config.num_heads,))
    return DecoderLayer(
        norm("input_layernorm", config.hidden_size, config, options),
        attention(config, spec, options, sinks=sinks),
        norm("post_attention_layernorm", config.hidden_size, config, options),
        _experts(config, spec.moe, spec.moe.swiglu_limit, options),
    )


def _experts(
    config: ModelConfig, moe: MoeConfig, limit: float, options: BuildOptions
) -> MixtureOfExperts:
    hidden, width, experts = config.hidden_size, moe.intermediate_size, moe.num_experts
    # A chip's part of the inner width (180 with 16 chips) is padded to whole registers of a TPU;
    # otherwise its compiler copies all experts in each step, as with rows. Padding adds nothing:
    # gates and values are 0 there, and so are their products with `down`.
    multiple = SUBLANES * options.expert_slices
    padded = -(-width // multiple) * multiple
    router = Tensor("mlp.router.weight", (hidden, experts), transposed=True)
    # Rows of gate and up lie in turn.
    both = _matrices(config, "gate_up_proj", (experts, 2 * width, hidden), swapped=True)
    down = _matrices(config, "down_proj", (experts, width, hidden), swapped=False)
    both_biases = Tensor("mlp.experts.gate_up_proj_bias", (experts, 2 * width))

    def wider(part: Source) -> Source:
        return Padded(options.all_experts(part), padded, axis=1)

    def longer(part: Source) -> Source:
        return wider(Padded(part, row_size(hidden), axis=2, on_every_mesh=True))

    def inwards(first: int) -> ExpertLinear:
        weight, bias = (Slice(part, 1, first, width, step=2) for part in (both, both_biases))
        return ExpertLinear(
            longer(weight),
            options.dtype,
            options.multiply_groups,
            transposed=True,
            bias=wider(bias),
            expert_axes=options.expert_axes,
        )

    return MixtureOfExperts(
        Linear(router, options.dtype, bias=Tensor("mlp.router.bias", (experts,))),
        inwards(0),
        inwards(1),
        ExpertLinear(
            longer(down),
            options.dtype,
            options.multiply_groups,
            transposed=False,
            bias=Tensor("mlp.experts.down_proj_bias", (experts, hidden)),
            expert_axes=options.expert_axes,
        ),
        num_experts=experts,
        top_k=moe.top_k,
        norm_topk_prob=moe.norm_topk_prob,
        moves=options.move_lines,
        gated=partial(clamped_swiglu, limit=limit, alpha=moe.swiglu_alpha),
    )


def _matrices(
    config: ModelConfig, name: str, shape: tuple[int, int, int], *, swapped: bool
) -> Source:
    """Matrices [in, out] of all experts, or with `swapped` [out, in].

    Floats are stored as [experts, in, out], MXFP4 as [experts, out, in].
    """
    name = f"mlp.experts.{name}"
    if config.expert_format == "mxfp4":
        inputs = shape[2] if swapped else shape[1]
        if inputs % BLOCK:
            raise ModelConfigError(
                f"{name} has rows of {inputs} numbers, no multiple of the {BLOCK} of MXFP4's blocks"
            )
        return Mxfp4(name, shape, transposed=not swapped)
    return Tensor(name, shape, transposed=swapped)
