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

    def gate(prefix: str, width: int) -> Source:
        return Transposed(f"{prefix}.gate_proj.weight", (hidden, width))

    def up(prefix: str, width: int) -> Source:
        return Transposed(f"{prefix}.up_proj.weight", (hidden, width))

    def down(prefix: str, width: int) -> Source:
        return Transposed(f"{prefix}.down_proj.weight", (width, hidden))

    if moe is None:
        width = config.intermediate_size
        return {
            ("mlp", "gate"): lambda layer: gate(f"model.layers.{layer}.mlp", width),
            ("mlp", "up"): lambda layer: up(f"model.layers.{layer}.mlp", width),
            ("mlp", "down"): lambda layer: down(f"model.layers.{layer}.mlp", width),
        }

    def each_expert(make: Callable[[str, int], Source]) -> Callable[[int], Source]:
        return lambda layer: Stacked(
            [
                make(f"model.layers.{layer}.mlp.experts.{expert}", moe.intermediate_size)
                for expert in range(moe.num_experts)
            ]
        )

    return {
        ("mlp", "router"): lambda layer: Transposed(
            f"model.layers.{layer}.mlp.gate.weight", (hidden, moe.num_experts)
        ),
        ("mlp", "gate"): each_expert(gate),
        ("mlp", "up"): each_expert(up),
        ("mlp", "down"): each_expert(down),
    }
