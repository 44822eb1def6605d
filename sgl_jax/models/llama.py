"""Llama: the plain decoder layer, the base of the other families, and its tensors' names.

OLMo 3's layer has the same parts, with norms in other places.
"""

from typing import Literal, NamedTuple

from sgl_jax.kernels.attention.batch import ScoreOptions
from sgl_jax.layers.attention import Attention, replicated_kv_heads
from sgl_jax.layers.head_sources import (
    ByHead,
    FusedHeads,
    HeadRows,
    Heads,
    HeadVectors,
    Reordered,
)
from sgl_jax.layers.linear import ACTIVATIONS, GatedMLP, Linear
from sgl_jax.layers.moe import MixtureOfExperts
from sgl_jax.layers.norm import AllHeadsNorm, RMSNorm
from sgl_jax.layers.qkv_heads import HeadsNorm
from sgl_jax.layers.sources import OneOf, Ones, Slice, Source, Tensor
from sgl_jax.models.architecture import BuildOptions
from sgl_jax.models.config import LayerSpec, ModelConfig
from sgl_jax.models.decoder_layer import DecoderLayer
from sgl_jax.models.projections import linear

# The norm of queries and keys: of each head, with or without weights, or of all heads together.
QKNorm = Literal["each_head", "weightless", "all_heads"]


class MLPNames(NamedTuple):
    """Names of the matrices of a dense feed-forward layer, and of the one for both gate and up."""

    gate: str | None = "gate_proj"  # None: it has no gate
    up: str = "up_proj"
    down: str = "down_proj"
    both: str = "gate_up_proj"


_MLP_NAMES = MLPNames()


def llama_layer(
    config: ModelConfig,
    spec: LayerSpec,
    options: BuildOptions,
    *,
    qkv_bias: bool = False,
    qk_norm: QKNorm | None = None,
    experts: MixtureOfExperts | None = None,
    attention_inputs: int | None = None,
    fused: bool = False,
) -> DecoderLayer:
    """Declare one layer: `attention`, and `experts` or a dense feed-forward layer.

    `qk_norm` normalises queries and keys. `attention_inputs` is the width of attention's input;
    None for the hidden size. If `fused`, Q, K and V are one tensor, and gate and up are another.

    Raises ValueError if `tp_size` chips cannot split heads or widths.
    """
    return DecoderLayer(
        norm("input_layernorm", config.hidden_size, config, options),
        attention(
            *(config, spec, options),
            qkv_bias=qkv_bias,
            qk_norm=qk_norm,
            num_inputs=attention_inputs,
            fused=fused,
        ),
        norm("post_attention_layernorm", config.hidden_size, config, options),
        experts or gated_mlp(config, spec, options, fused=fused),
    )


def olmo3_layer(config: ModelConfig, spec: LayerSpec, options: BuildOptions) -> DecoderLayer:
    """Declare one layer with norms after attention and after the feed-forward layer, not before.

    Raises ValueError if `tp_size` chips cannot split heads or widths.
    """
    return DecoderLayer(
        None,
        attention(config, spec, options, qk_norm="all_heads"),
        None,
        gated_mlp(config, spec, options),
        attended_norm=norm("post_attention_layernorm", config.hidden_size, config, options),
        mlp_output_norm=norm("post_feedforward_layernorm", config.hidden_size, config, options),
    )


def norm(
    name: str, size: int, config: ModelConfig, options: BuildOptions, *, from_one: bool = False
) -> RMSNorm:
    weight = Tensor(f"{name}.weight", (size,))
    return RMSNorm(weight, config.rms_norm_eps, options.dtype, from_one=from_one)


def attention(
    config: ModelConfig,
    spec: LayerSpec,
    options: BuildOptions,
    *,
    qkv_bias: bool = False,
    qk_norm: QKNorm | None = None,
    norms_from_one: bool = False,
    fused: bool = False,
    pairs_neighbours: bool = False,
    sinks: Source | None = None,
    num_inputs: int | None = None,
    normalises_values: bool = False,
    prefix: str = "self_attn.",
) -> Attention:
    """Declare the attention of a layer.

    With `qkv_bias`, the projections of Q, K and V have biases even if the config does not give them
    to all four. `qk_norm` normalises queries and keys; None if they are not. With `norms_from_one`,
    norms multiply by 1 + weight. If `fused`, one tensor has the rows of Q, K and V. With
    `pairs_neighbours`, neighbouring dimensions rotate together. `sinks` are [num_heads].
    `num_inputs` is the width of its input; None for the hidden size. `normalises_values` adds a
    norm without weights. `prefix` is that of the projections' tensors.

    Raises ValueError if `tp_size` chips cannot split heads.
    """
    heads = Heads(
        config.num_heads,
        config.num_kv_heads,
        replicated_kv_heads(config.num_heads, config.num_kv_heads, options.tp_size),
        config.head_dim,
        spec.rope.num_dims(config.head_dim) if spec.rope and spec.rope.share < 1 else None,
        pairs_neighbours,
        num_kv_parts=2 - spec.values_are_keys if spec.cache_source is None else 0,
    )
    hidden, width = config.hidden_size, config.num_heads * config.head_dim
    gated, has_bias = config.attention_gate, qkv_bias or config.attention_bias
    names = ("qkv",) if fused else tuple("qkv"[: 1 + heads.num_kv_parts])
    qkv, bias = (
        FusedHeads(tuple(f"{prefix}{x}_proj.{kind}" for x in names), inputs, heads, gated)
        for kind, inputs in (("weight", (num_inputs or hidden,)), ("bias", ()))
    )
    output = Tensor(f"{prefix}o_proj.weight", (width, hidden), transposed=True)
    output_bias = None
    if config.attention_output_bias:
        output_bias = Tensor(f"{prefix}o_proj.bias", (hidden,))
    q_norm, k_norm = (
        _heads_norm(qk_norm, x, config, heads, options, from_one=norms_from_one)
        if qk_norm and (x == "q" or heads.num_kv_parts)
        else None
        for x in "qk"
    )
    v_norm = None
    if normalises_values and heads.num_kv_parts:
        v_norm = RMSNorm(Ones((config.head_dim,)), config.rms_norm_eps, options.dtype)
    return Attention(
        heads,
        linear(spec, options, qkv, "outputs", bias if has_bias else None),
        linear(spec, options, output, "inputs", output_bias),
        gate=_attention_gate(config, spec, options, has_bias=has_bias) if gated else None,
        attend=options.kernels.attend,
        qkv_heads=options.kernels.qkv_heads,
        q_norm=q_norm,
        k_norm=k_norm,
        v_norm=v_norm,
        scores=ScoreOptions(
            *(config.score_scale, spec.sliding_window, config.score_soft_cap),
            is_chunked=spec.is_chunked,
        ),
        sinks=sinks,
        has_kv_scales=options.has_kv_scales,
    )


def _heads_norm(
    kind: QKNorm,
    of: str,
    config: ModelConfig,
    heads: Heads,
    options: BuildOptions,
    *,
    from_one: bool,
) -> HeadsNorm:
    """Declare the norm of queries, `of` "q", or of keys, "k"."""
    name, constants = f"self_attn.{of}_norm.weight", (config.rms_norm_eps, options.dtype)
    if kind == "all_heads":
        assert not from_one
        stored, num = (
            (heads.num_q, heads.num_q) if of == "q" else (heads.num_stored_kv, heads.num_kv)
        )
        return AllHeadsNorm(HeadVectors(name, stored, num, heads.order), *constants)
    shape = (config.head_dim,)
    weight = Ones(shape) if kind == "weightless" else Reordered(Tensor(name, shape), heads.order)
    return RMSNorm(weight, *constants, from_one=from_one)


def _attention_gate(
    config: ModelConfig, spec: LayerSpec, options: BuildOptions, *, has_bias: bool
) -> Linear:
    """Declare the gate: the second half of each query head's rows."""
    num_heads, size = config.num_heads, config.head_dim
    weight, bias = (
        ByHead(
            (HeadRows(f"self_attn.q_proj.{kind}", 2 * num_heads * size, size, 2 * size, size),),
            num_heads,
            inputs,
        )
        for kind, inputs in (("weight", (config.hidden_size,)), ("bias", ()))
    )
    return linear(spec, options, weight, "outputs", bias if has_bias else None)


def gated_mlp(
    config: ModelConfig,
    spec: LayerSpec,
    options: BuildOptions,
    prefix: str = "mlp.",
    width: int | None = None,
    *,
    fused: bool = False,
    other_prefix: str | None = None,
    names: MLPNames = _MLP_NAMES,
) -> GatedMLP:
    """Declare the feed-forward layer; if `fused`, one tensor has the rows of gate and up.

    Some checkpoints have `other_prefix` in place of `prefix`.

    Raises ValueError if `tp_size` chips cannot split it.
    """
    hidden = config.hidden_size
    width = config.intermediate_size if width is None else width
    require_divisible(f"the width of {prefix.rstrip('.')}", width, options.tp_size)

    def matrix(name: str, *shape: int) -> Source:
        own, other = (
            Tensor(f"{start}{name}.weight", shape, transposed=True)
            for start in (prefix, other_prefix)
        )
        return own if other_prefix is None else OneOf(own, other)

    gate = None if names.gate is None else matrix(names.gate, hidden, width)
    up = matrix(names.up, hidden, width)
    if fused:
        both = matrix(names.both, hidden, 2 * width)
        gate, up = (Slice(both, 1, first, width) for first in (0, width))
    return GatedMLP(
        None if gate is None else linear(spec, options, gate, "outputs"),
        linear(spec, options, up, "outputs"),
        linear(spec, options, matrix(names.down, width, hidden), "inputs"),
        ACTIVATIONS[config.activation],
    )


def require_divisible(name: str, size: int, tp_size: int) -> None:
    """Raise ValueError if `size`, the config's `name`, cannot be split over the chips."""
    if size % tp_size:
        raise ValueError(f"tp_size ({tp_size}) must divide {name} ({size})")
