"""Which Hugging Face tensors make which parameter, for all supported families.

The families share their tensor names; what a model has (biases, Q and K norms, experts) shows in
its parameters, so one table serves all.
"""

from collections.abc import Callable, Iterable

from sgl_jax.checkpoint.paths import Path
from sgl_jax.checkpoint.sources import (
    GroupedHeads,
    MergedHeads,
    Padded,
    Plain,
    Source,
    Stacked,
    Transposed,
)
from sgl_jax.models.config import ModelConfig

# Tensors some checkpoints carry that no parameter needs.
_IGNORED_SUFFIX = ".rotary_emb.inv_freq"


def is_ignored(name: str, config: ModelConfig) -> bool:
    """Whether a checkpoint may hold this tensor although nothing reads it."""
    tied_head = config.tie_word_embeddings and name == "lm_head.weight"
    return tied_head or name.endswith(_IGNORED_SUFFIX)


def parameter_sources(
    config: ModelConfig, paths: Iterable[Path], num_kv_heads: int
) -> dict[Path, Source]:
    """The source of each parameter. `num_kv_heads` counts copies made for the tensor axis."""
    vocab, hidden = config.vocab_size, config.hidden_size
    whole_model: dict[Path, Source] = {
        ("embedding", "weight"): Padded(
            Plain("model.embed_tokens.weight", (vocab, hidden)), vocab, axis=0
        ),
        ("norm", "weight"): Plain("model.norm.weight", (hidden,)),
        ("lm_head", "weight"): Padded(Transposed("lm_head.weight", (hidden, vocab)), vocab, axis=1),
    }
    layer_sources = _layer_sources(config, num_kv_heads)
    return {
        path: (
            Stacked([layer_sources[path[1:]](layer) for layer in range(config.num_layers)])
            if path[0] == "layers"
            else whole_model[path]
        )
        for path in paths
    }


def _layer_sources(config: ModelConfig, num_kv_heads: int) -> dict[Path, Callable[[int], Source]]:
    """For each parameter of a layer, its source given the layer's index."""
    hidden, head_dim = config.hidden_size, config.head_dim

    def plain(name: str, *shape: int) -> Callable[[int], Source]:
        return lambda layer: Plain(f"model.layers.{layer}.{name}", shape)

    def qkv(kind: str, *inputs: int) -> Callable[[int], Source]:
        def source(layer: int) -> Source:
            q, k, v = (f"model.layers.{layer}.self_attn.{x}_proj.{kind}" for x in "qkv")
            heads = (config.num_heads, config.num_kv_heads, num_kv_heads)
            grouped = GroupedHeads(q, k, v, inputs, *heads, head_dim)
            return MergedHeads(grouped) if inputs else grouped

        return source

    def output(layer: int) -> Source:
        name = f"model.layers.{layer}.self_attn.o_proj.weight"
        return Transposed(name, (config.num_heads * head_dim, hidden))

    return {
        ("input_norm", "weight"): plain("input_layernorm.weight", hidden),
        ("post_attention_norm", "weight"): plain("post_attention_layernorm.weight", hidden),
        ("attention", "qkv"): qkv("weight", hidden),
        ("attention", "qkv_bias"): qkv("bias"),
        ("attention", "q_norm", "weight"): plain("self_attn.q_norm.weight", head_dim),
        ("attention", "k_norm", "weight"): plain("self_attn.k_norm.weight", head_dim),
        ("attention", "output"): output,
        **_mlp_sources(config),
    }


def _mlp_sources(config: ModelConfig) -> dict[Path, Callable[[int], Source]]:
    hidden, moe = config.hidden_size, config.moe
    if moe is None:
        width = config.intermediate_size

        def dense(name: str, inputs: int, outputs: int) -> Callable[[int], Source]:
            matrix = (inputs, outputs)
            return lambda layer: Transposed(f"model.layers.{layer}.mlp.{name}_proj.weight", matrix)

        return {
            ("mlp", "gate"): dense("gate", hidden, width),
            ("mlp", "up"): dense("up", hidden, width),
            ("mlp", "down"): dense("down", width, hidden),
        }

    num_experts, shape = moe.num_experts, (moe.intermediate_size, hidden)

    def experts(name: str, kind: type[Plain] | type[Transposed]) -> Callable[[int], Source]:
        def source(layer: int) -> Source:
            prefix = f"model.layers.{layer}.mlp.experts"
            names = (f"{prefix}.{expert}.{name}_proj.weight" for expert in range(num_experts))
            return Stacked([kind(one, shape) for one in names])

        return source

    return {
        ("mlp", "router"): lambda layer: Transposed(
            f"model.layers.{layer}.mlp.gate.weight", (hidden, num_experts)
        ),
        ("mlp", "gate"): experts("gate", Plain),
        ("mlp", "up"): experts("up", Plain),
        ("mlp", "down"): experts("down", Transposed),
    }
