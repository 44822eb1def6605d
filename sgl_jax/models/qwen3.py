"""Qwen3: Llama with normalised queries and keys; Qwen3-MoE: some or all layers have experts."""

from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple

from sgl_jax.layers.linear import ACTIVATIONS, ExpertLinear, Linear
from sgl_jax.layers.moe import GATED, MixtureOfExperts, SharedExpert, silu_gated
from sgl_jax.layers.sources import OneOf, Slice, Source, Stacked, Tensor
from sgl_jax.models.architecture import Architecture, BuildOptions
from sgl_jax.models.config import LayerSpec, ModelConfig, ModelConfigError, MoeConfig
from sgl_jax.models.decoder_layer import DecoderLayer
from sgl_jax.models.llama import MLPNames, gated_mlp, llama_layer, require_divisible
from sgl_jax.models.projections import quantization_of
from sgl_jax.models.vision_tower import Qwen3VLTower

qwen3_layer = partial(llama_layer, qk_norm="each_head")


# A tensor of all experts' matrices has a row for each output, or a column, or it may have either.
Layouts = Literal["rows", "columns", "either"]


class ExpertNames(NamedTuple):
    """Names of the modules of a layer's experts; all but the first are relative to it.

    Stacked matrices of all experts have the `layouts`.
    """

    block: str = "mlp."
    gate: str | None = "gate_proj"  # None: experts have no gates
    up: str = "up_proj"
    down: str = "down_proj"
    router: str = "gate"
    choice_bias: str = "gate.e_score_correction_bias"
    shared: str = "shared_experts"  # without a gate
    both: str = "experts.gate_up_proj"  # of all experts
    all_down: str = "experts.down_proj"
    layouts: Layouts = "rows"


_NAMES = ExpertNames()


def qwen3_moe_layer(
    config: ModelConfig, spec: LayerSpec, options: BuildOptions, names: ExpertNames = _NAMES
) -> DecoderLayer:
    """Declare one layer, with experts if its spec has them."""
    if config.moe is None:
        raise ModelConfigError(f"{config.architecture} needs layers with experts (num_experts)")
    experts = mixture_of_experts(config, spec, spec.moe, options, names) if spec.moe else None
    return qwen3_layer(config, spec, options, experts=experts)


def mixture_of_experts(
    config: ModelConfig,
    spec: LayerSpec,
    moe: MoeConfig,
    options: BuildOptions,
    names: ExpertNames = _NAMES,
    shared: SharedExpert | None = None,
    **further: Any,
) -> MixtureOfExperts:
    """Declare a layer's experts, with a shared expert if the config has one.

    Checkpoints store a tensor for each expert's matrix, or one for all experts. `shared` is the
    shared expert if its names are not those of `names`. `further` are arguments of
    `MixtureOfExperts`.
    """
    hidden, width, dtype = config.hidden_size, moe.intermediate_size, options.dtype
    require_divisible("moe_intermediate_size", width, options.expert_slices)
    block, router_shape = names.block, (hidden, moe.num_experts)
    router = Tensor(f"{block}{names.router}.weight", router_shape, transposed=True)
    choice_bias = Tensor(block + names.choice_bias, (moe.num_experts,))
    # All three are [experts, width, hidden], the layout of the grouped matmul.
    shape = (moe.num_experts, width, hidden)
    both = Tensor(block + names.both, (moe.num_experts, 2 * width, hidden))
    rows: dict[str | None, Source] = {
        names.gate: Slice(both, 1, 0, width),
        names.up: Slice(both, 1, width, width) if names.gate else replace(both, dims=shape),
        names.down: Tensor(block + names.all_down, shape, transposed=True),
    }
    swapped = replace(both, transposed=True, by_input=True)
    columns: dict[str | None, Source] = {
        names.gate: Slice(swapped, 1, 0, width),
        names.up: Slice(swapped, 1, width, width),
        names.down: Tensor(block + names.all_down, shape, by_input=True),
    }

    def matrices(name: str, *, inwards: bool) -> ExpertLinear:
        one = Tensor(f"{name}.weight", (width, hidden), transposed=not inwards)
        prefixes = tuple(f"{block}experts.{expert}." for expert in range(moe.num_experts))
        source: Source = Stacked(prefixes, one)
        if names.layouts != "rows":
            source = OneOf(source, columns[name])
        if names.layouts != "columns":
            source = OneOf(source, rows[name])
        source = options.all_experts(source)
        one_expert = replace(one, name=prefixes[0] + one.name)
        return ExpertLinear(
            source,
            dtype,
            options.kernels.multiply_groups,
            transposed=inwards,
            expert_axes=options.expert_axes,
            quantized=quantization_of(spec, options, one_expert),
        )

    return MixtureOfExperts(
        Linear(router, dtype),
        matrices(names.gate, inwards=True) if names.gate else None,
        matrices(names.up, inwards=True),
        matrices(names.down, inwards=False),
        num_experts=moe.num_experts,
        choice=moe.choice,
        choice_bias=choice_bias if moe.has_choice_bias else None,
        moves=options.kernels.expert_dispatch,
        shared=shared or _shared_expert(config, spec, moe, options, names),
        scatters=options.sequence_parallel,
        gated=GATED[config.activation] if names.gate else silu_gated,
        activation=ACTIVATIONS[config.activation],
        weighs_inputs=moe.weighs_inputs,
        **further,
    )


def _shared_expert(
    config: ModelConfig,
    spec: LayerSpec,
    moe: MoeConfig,
    options: BuildOptions,
    names: ExpertNames,
) -> SharedExpert | None:
    width = moe.shared_intermediate_size
    if width is None:
        return None
    if not moe.gates_shared:
        prefix = f"{names.block}{names.shared}."
        own = MLPNames() if names.gate else MLPNames(gate=None)
        return SharedExpert(gated_mlp(config, spec, options, prefix, width, names=own), None)
    gate = Tensor("mlp.shared_expert_gate.weight", (config.hidden_size, 1), transposed=True)
    expert = gated_mlp(config, spec, options, "mlp.shared_expert.", width)
    return SharedExpert(expert, Linear(gate, options.dtype))


# The tower's tensors are read only if images are served.
QWEN3_VL = Architecture(
    qwen3_layer,
    body="model.language_model.",
    declare_tower=partial(Qwen3VLTower, prefix="model.visual."),
    spare_prefixes=("model.visual.",),
)
QWEN3_VL_MOE = QWEN3_VL._replace(
    build_layer=partial(qwen3_moe_layer, names=ExpertNames(layouts="either"))
)
