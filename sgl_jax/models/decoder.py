"""A decoder-only language model: embedding, layers as the config specifies them, a head.

Written as one chip sees it, inside one `jax.shard_map` over ('data', 'tensor'): shapes are local
and collectives are explicit. Equal layers are stacked on axis 0 of their parameters, and each
stretch of equal periods is run by one `lax.scan`, so compile time does not grow with depth; the KV
cache is carried through and updated in place.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from sgl_jax.kernels.attention.api import AttentionBatch, RaggedPagedAttention
from sgl_jax.kernels.attention.xla import (
    ragged_paged_attention as xla_ragged_paged_attention,
)
from sgl_jax.kernels.grouped_matmul.interface import GroupedMatmul
from sgl_jax.kernels.grouped_matmul.xla import blocked_grouped_matmul
from sgl_jax.layers.attention import Attention
from sgl_jax.layers.embedding import (
    Embedding,
    LMHead,
    padded_vocab_size,
)
from sgl_jax.layers.layer_weights import gather_over_data, weights_of_layer
from sgl_jax.layers.mlp import GatedMLP
from sgl_jax.layers.moe import MixtureOfExperts
from sgl_jax.layers.norm import RMSNorm
from sgl_jax.layers.parameter import stack_layers
from sgl_jax.layers.qkv_heads import QKVHeads, xla_qkv_heads
from sgl_jax.layers.rotary import Rotation, inverse_frequencies, rotation
from sgl_jax.layers.sampling import SplitLogits
from sgl_jax.layers.sources import Padded, Source, Tensor, row_size
from sgl_jax.models.config import LayerSpec, ModelConfig, RopeConfig
from sgl_jax.models.stretches import Stretch, find_stretches

LAYER_PREFIX = "model.layers.{}."  # of the names of a layer's tensors
# Tensors some checkpoints carry that no parameter needs.
_SPARE_SUFFIX = ".rotary_emb.inv_freq"


class BuildOptions(NamedTuple):
    """What a model is built for, beside its config."""

    dtype: DTypeLike
    shards_weights: bool = False  # each rank holds its part of a layer, and gathers it to run it
    attend: RaggedPagedAttention = xla_ragged_paged_attention
    qkv_heads: QKVHeads = xla_qkv_heads
    multiply_groups: GroupedMatmul = blocked_grouped_matmul
    has_kv_scales: bool = False  # of an 8-bit KV cache
    separates_layers: bool = False  # matrices of layers lie apart, see `layers.layer_weights`
    # How layers are run, by what the compiler makes of it (docs/planning.md): how many in one turn
    # of the loop, in whole periods, and whether a layer's last sum is left to the next one's norm.
    unrolled_layers: int = 1
    defers_sum: bool = False
    tp_size: int = 1  # chips of a rank, and ranks: `place_model` takes them from its mesh
    dp_size: int = 1


class DecoderLayer(nnx.Module):
    """Attention, then a feed-forward layer, each normalised before and added to its input.

    Some models normalise what they add, too.
    """

    def __init__(
        self,
        input_norm: RMSNorm,
        attention: Attention,
        post_attention_norm: RMSNorm,
        mlp: GatedMLP | MixtureOfExperts,
        *,
        attended_norm: RMSNorm | None = None,
        mlp_output_norm: RMSNorm | None = None,
    ) -> None:
        """`post_attention_norm` is that of the feed-forward layer's input; the last two are those
        of what attention and the feed-forward layer add."""
        self.input_norm = input_norm
        self.attention = attention
        self.post_attention_norm = post_attention_norm
        self.mlp = mlp
        self.attended_norm = attended_norm
        self.mlp_output_norm = mlp_output_norm

    def __call__(
        self,
        hidden: jax.Array,
        by: Rotation,
        batch: AttentionBatch,
        kv_cache: jax.Array,
        layer: jax.Array,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """hidden [T, hidden_size] -> (two terms whose sum is it after this layer, kv_cache)."""
        attended, kv_cache = self.attention(self.input_norm(hidden), by, batch, kv_cache, layer)
        hidden = hidden + _normalised(attended, self.attended_norm)
        added = self.mlp(self.post_attention_norm(hidden))
        return hidden, _normalised(added, self.mlp_output_norm), kv_cache


def _normalised(x: jax.Array, norm: RMSNorm | None) -> jax.Array:
    return x if norm is None else norm(x)


# One or two terms whose sum is the hidden state, [T, hidden_size] each; and the KV pools.
Carry = tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]


# How an architecture declares one layer; tensors are named without `LAYER_PREFIX`.
LayerBuilder = Callable[[ModelConfig, LayerSpec, BuildOptions], DecoderLayer]


class Architecture(NamedTuple):
    """What makes a family of models, beside the config of each."""

    build_layer: LayerBuilder
    norms_from_one: bool = False  # of the last norm, see `RMSNorm`; layers have their own
    scales_embedding: bool = False  # by the root of the hidden size
    prefix: str = ""  # of the names of all tensors
    spare_prefixes: tuple[str, ...] = ()  # of tensors that no parameter is made of


class CausalLM(nnx.Module):
    """The whole model.

    Layers are declared once for each place in each stretch's period, with the parameters of all
    layers of that place stacked on axis 0: `layers[str(n)]`, where n is the first of them.
    """

    def __init__(
        self, config: ModelConfig, architecture: Architecture, options: BuildOptions
    ) -> None:
        """Declare it."""
        self.config = config
        self.architecture = architecture
        self.unrolled_layers = options.unrolled_layers
        self.defers_sum = options.defers_sum
        self.stretches = find_stretches(config.layers)
        self.cache_groups = config.cache_groups()
        self.layers = nnx.Dict(
            {
                str(layers[0]): self._stack(layers, options)
                for stretch in self.stretches
                for layers in map(stretch.layers_like, range(stretch.period))
            }
        )
        hidden, vocab, dtype = config.hidden_size, config.vocab_size, options.dtype
        rows, tied = padded_vocab_size(vocab, options.tp_size), config.tie_word_embeddings
        name = f"{architecture.prefix}{{}}.weight".format
        vectors: Source = Tensor(name("model.embed_tokens"), (vocab, hidden))
        vectors = Padded(vectors, row_size(hidden), axis=1, on_every_mesh=True)
        table = Padded(vectors, rows, axis=0)
        head = Tensor(name("lm_head"), (hidden, vocab), transposed=True)
        self.embedding = Embedding(table, vocab, hidden, dtype, is_head=tied)
        norm = Tensor(name("model.norm"), (hidden,))
        self.norm = RMSNorm(norm, config.rms_norm_eps, dtype, from_one=architecture.norms_from_one)
        self.lm_head = None if tied else LMHead(Padded(head, rows, axis=1), vocab, dtype)

    def _stack(self, layers: range, options: BuildOptions) -> DecoderLayer:
        own = self.architecture
        layer = own.build_layer(self.config, self.config.layers[layers[0]], options)
        shards = options.dp_size if options.shards_weights else 1
        stack_layers(layer, layers, shards, own.prefix + LAYER_PREFIX)
        return layer

    def __call__(
        self,
        token_ids: jax.Array,
        batches: Sequence[AttentionBatch],
        kv_pools: tuple[jax.Array, ...],
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """Run one step's tokens.

        Args:
            token_ids: int32 [T], as the batches lay them out.
            batches: rows and pages of this rank, for each of the config's `cache_groups`.
            kv_pools: each as in `RaggedPagedAttention`, this chip's part; a layer's number there
                is its place in its group.

        Returns:
            hidden [T, hidden_size], normalised and ready for `logits`; the updated kv_pools.
        """
        turned = {
            rope: self._rotation(rope, batches[0].positions)
            for rope in dict.fromkeys(spec.rope for spec in self.config.layers)
        }
        hidden = self.embedding(token_ids)
        if self.architecture.scales_embedding:  # by a number of the model's type
            hidden = hidden * jnp.asarray(self.config.hidden_size**0.5, hidden.dtype)
        terms: tuple[jax.Array, ...] = (hidden,)
        if self.defers_sum:
            terms = (hidden, jnp.zeros_like(hidden))
        for stretch in self.stretches:
            terms, kv_pools = self._run(stretch, (terms, kv_pools), turned, batches)
        return self.norm(reduce(jnp.add, terms)), kv_pools

    def _rotation(self, rope: RopeConfig, positions: jax.Array) -> Rotation:
        settings = asdict(rope)
        factor = settings.pop("attention_factor")
        frequencies = inverse_frequencies(self.config.head_dim, **settings)
        return rotation(positions, frequencies, factor)

    def _run(
        self,
        stretch: Stretch,
        carry: Carry,
        turned: dict[RopeConfig, Rotation],
        batches: Sequence[AttentionBatch],
    ) -> Carry:
        """All layers of a stretch."""
        places = range(stretch.first, stretch.first + stretch.period)
        split = {place: nnx.split(self.layers[str(place)]) for place in places}
        cached = {place: self._cached_at(stretch, place) for place in places}

        def run_period(carry: Carry, turn: jax.Array) -> tuple[Carry, None]:
            terms, kv_pools = carry[0], list(carry[1])
            for place, (graphdef, weights) in split.items():
                layer: DecoderLayer = nnx.merge(graphdef, weights_of_layer(weights, turn))
                gather_over_data(layer)
                by = turned[self.config.layers[place].rope]
                group, first, step = cached[place]
                pool = self.cache_groups[group].pool
                hidden, delta, kv_pools[pool] = layer(
                    *(reduce(jnp.add, terms), by, batches[group]),
                    *(kv_pools[pool], first + turn * step),
                )
                terms = (hidden, delta) if self.defers_sum else (hidden + delta,)
            return (terms, tuple(kv_pools)), None

        turns = jnp.arange(stretch.repeats, dtype=jnp.int32)
        unroll = min(max(1, self.unrolled_layers // stretch.period), stretch.repeats)
        return lax.scan(run_period, carry, turns, unroll=unroll)[0]

    def _cached_at(self, stretch: Stretch, place: int) -> tuple[int, int, int]:
        """Where the layers at `place` of a period keep their KV: their group's number, the first
        one's place in it, and how far it is to that of the next period."""
        places = range(stretch.first, stretch.first + stretch.period)
        for number, group in enumerate(self.cache_groups):
            if place in group.layers:
                step = sum(layer in group.layers for layer in places)
                return number, group.layers.index(place), step
        raise AssertionError(f"layer {place} is in no cache group")

    def logits(self, hidden: jax.Array) -> SplitLogits:
        """Of hidden [n, hidden_size], this chip's slice of the vocabulary."""
        head = self.embedding if self.lm_head is None else self.lm_head
        logits, cap = head.logits(hidden), self.config.logit_soft_cap
        if cap is None:
            return logits
        return logits._replace(columns=cap * jnp.tanh(logits.columns / cap))

    def is_spare(self, tensor: str) -> bool:
        """Whether a checkpoint may hold this tensor although no parameter is made of it."""
        own = self.architecture
        tied_head = self.lm_head is None and tensor == f"{own.prefix}lm_head.weight"
        return tied_head or tensor.endswith(_SPARE_SUFFIX) or tensor.startswith(own.spare_prefixes)
