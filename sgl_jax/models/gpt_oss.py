"""gpt-oss: attention with sinks and biases, every second layer with a window, experts in MXFP4.

The config has the windows, the rotation (YaRN) and the biases of attention.
"""

from functools import partial

from sgl_jax.core.layer_configs import MXFP4_GROUP
from sgl_jax.kernels.tpu_chip import SUBLANES
from sgl_jax.layers.linear import ExpertLinear, Linear
from sgl_jax.layers.moe import MixtureOfExperts, clamped_swiglu
from sgl_jax.layers.sources import Padded, Slice, Source, Tensor, row_size
from sgl_jax.models.architecture import BuildOptions
from sgl_jax.models.config import LayerSpec, ModelConfig, ModelConfigError, MoeConfig
from sgl_jax.models.decoder_layer import DecoderLayer
from sgl_jax.models.llama import attention, norm
from sgl_jax.models.projections import quantization_of


def gpt_oss_layer(config: ModelConfig, spec: LayerSpec, options: BuildOptions) -> DecoderLayer:
    if spec.moe is None or spec.moe.swiglu_limit is None:
        raise ModelConfigError("GptOssForCausalLM needs num_local_experts and swiglu_limit")
    sinks = Tensor("self_attn.sinks", (config.num_heads,))
    return DecoderLayer(
        norm("input_layernorm", config.hidden_size, config, options),
        attention(config, spec, options, sinks=sinks),
        norm("post_attention_layernorm", config.hidden_size, config, options),
        _experts(config, spec, spec.moe, spec.moe.swiglu_limit, options),
    )


def _experts(
    config: ModelConfig, spec: LayerSpec, moe: MoeConfig, limit: float, options: BuildOptions
) -> MixtureOfExperts:
    hidden, width, experts = config.hidden_size, moe.intermediate_size, moe.num_experts
    # A chip's part of the inner width (180 with 16 chips) is padded to whole registers of a TPU;
    # otherwise its compiler copies all experts in each step, as with rows. Padding adds nothing:
    # gates and values are 0 there, and so are their products with `down`. With MXFP4 the part is
    # padded to whole blocks.
    is_packed = spec.rules.of("mlp.experts.gate_up_proj") is not None
    multiple = (MXFP4_GROUP if is_packed else SUBLANES) * options.expert_slices
    padded = -(-width // multiple) * multiple
    row = row_size(hidden)
    if is_packed:
        row = -(-row // MXFP4_GROUP) * MXFP4_GROUP
    router = Tensor("mlp.router.weight", (hidden, experts), transposed=True)
    # Rows of gate and up alternate.
    both = _matrices("gate_up_proj", (experts, 2 * width, hidden), outwards=False, packed=is_packed)
    down = _matrices("down_proj", (experts, width, hidden), outwards=True, packed=is_packed)
    both_biases = Tensor("mlp.experts.gate_up_proj_bias", (experts, 2 * width))

    def wider(part: Source) -> Source:
        return Padded(options.all_experts(part), padded, axis=1)

    def longer(part: Source) -> Source:
        return wider(Padded(part, row, axis=2, on_every_mesh=True))

    def inwards(first: int) -> ExpertLinear:
        weight, bias = (Slice(part, 1, first, width, step=2) for part in (both, both_biases))
        return ExpertLinear(
            longer(weight),
            options.dtype,
            options.kernels.multiply_groups,
            transposed=True,
            bias=wider(bias),
            expert_axes=options.expert_axes,
            quantized=quantization_of(spec, options, both),
        )

    return MixtureOfExperts(
        Linear(router, options.dtype, bias=Tensor("mlp.router.bias", (experts,))),
        inwards(0),
        inwards(1),
        ExpertLinear(
            longer(down),
            options.dtype,
            options.kernels.multiply_groups,
            transposed=False,
            bias=Tensor("mlp.experts.down_proj_bias", (experts, hidden)),
            expert_axes=options.expert_axes,
            quantized=quantization_of(spec, options, down),
        ),
        num_experts=experts,
        choice=moe.choice,
        moves=options.kernels.expert_dispatch,
        gated=partial(clamped_swiglu, limit=limit, alpha=moe.swiglu_alpha),
        scatters=options.sequence_parallel,
    )


def _matrices(name: str, shape: tuple[int, int, int], *, outwards: bool, packed: bool) -> Source:
    """Return all experts' matrices: [in, out] if they lead `outwards`, else [out, in].

    Floats are stored as [experts, in, out], MXFP4 as [experts, out, in].
    """
    name = f"mlp.experts.{name}"
    if not packed:
        return Tensor(name, shape, transposed=not outwards)
    inputs = shape[1] if outwards else shape[2]
    if inputs % MXFP4_GROUP:
        raise ModelConfigError(
            f"{name} has rows of {inputs} numbers, no multiple of the {MXFP4_GROUP} of MXFP4's "
            "blocks"
        )
    return Tensor(name, shape, transposed=outwards)
