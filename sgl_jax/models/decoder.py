"""A decoder-only language model: embedding, the layers of the config, a head.

Written for one chip's shards, inside one `jax.shard_map` over ('data', 'tensor'): shapes are local
and collectives are explicit. Equal layers are stacked on axis 0 of their parameters, and one
`lax.scan` runs each segment of equal periods, so compile time does not grow with depth; the KV
cache is carried through and updated in place.
"""

import re
from collections.abc import Sequence
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from sgl_jax.kernels.attention.batch import AttentionBatch
from sgl_jax.kernels.gated_delta.batch import StateBatch
from sgl_jax.layers.embedding import Embedding, LMHead, padded_vocab_size
from sgl_jax.layers.latent_attention import LatentMemory
from sgl_jax.layers.layer_weights import gather_over_data, weights_of_layer
from sgl_jax.layers.mesh_axes import join_shares, scatter_sum, sum_over_tensor
from sgl_jax.layers.moe import ExpertCopies, copy_keys, count_experts, join_layers, stack_experts
from sgl_jax.layers.norm import RMSNorm
from sgl_jax.layers.parameter import stack_layers
from sgl_jax.layers.sampling.split_logits import SplitLogits
from sgl_jax.layers.sources import Padded, Source, Tensor, row_size
from sgl_jax.mem_cache.device_pool import LayerStates
from sgl_jax.models.architecture import Architecture, BuildOptions
from sgl_jax.models.config import LayerSpec, ModelConfig
from sgl_jax.models.decoder_layer import DecoderLayer, scaled
from sgl_jax.models.drafter import Drafter
from sgl_jax.models.image_tokens import ImageTokens
from sgl_jax.models.layer_reads import layer_reads, rotation_of
from sgl_jax.models.scan_segments import ScanSegment, find_scan_segments, layer_kinds

# Tensors in some checkpoints that no parameter needs.
_SPARE_SUFFIX = ".rotary_emb.inv_freq"


class _Carry(NamedTuple):
    # One or two terms with the hidden state, [T, hidden_size] or this chip's share, as their sum.
    terms: tuple[jax.Array, ...]
    memories: tuple[Any, ...]  # one per pool: KV pools, then the states if there are any
    # The hidden states before some layers, [slots, ...], and a spare slot for the remaining
    # layers; None if no drafter reads them.
    captured: jax.Array | None


_Routed = tuple[jax.Array | None, jax.Array | None]


class ModelOutput(NamedTuple):
    """One step's results of a model."""

    hidden: jax.Array  # [T, hidden_size], normalised, the input of `logits`
    kv_pools: tuple[jax.Array, ...]
    states: LayerStates | None
    # With `counts_experts`, int32 [layers, experts] how many of this rank's tokens chose each.
    expert_counts: jax.Array | None
    draft_hidden: jax.Array | None  # [T, hidden_size], the first input of `draft`
    # With `returns_experts`, int16 [layers, top_k, T]; 0 in layers without experts.
    experts: jax.Array | None


class CausalLM(nnx.Module):
    """The whole model.

    Layers are declared once for each position in each segment's period, with the parameters of all
    layers at that position stacked on axis 0: `layers[str(n)]`, where n is the first of them.
    """

    def __init__(
        self,
        config: ModelConfig,
        architecture: Architecture,
        options: BuildOptions,
        draft_layer: Drafter | None = None,
    ) -> None:
        self.config = config
        self.architecture = architecture
        self.unrolled_layers = options.unrolled_layers
        self.defers_sum = options.defers_sum
        self.placement = options.placement
        self.num_counted = config.moe.num_experts if config.moe and options.counts_experts else None
        self.top_k = config.moe.choice.top_k if config.moe and options.returns_experts else None
        # The type of hidden states, if steps report them.
        self.hidden_dtype = jnp.dtype(options.dtype) if options.returns_hidden_states else None
        self.sequence_parallel = options.sequence_parallel
        declare = partial(self._declare, options=options)
        self.scan_segments = find_scan_segments(layer_kinds(config.layers, declare))
        self.cache_groups = config.cache_groups()
        self.cache_places = config.cache_places()
        self.layers = nnx.Dict(
            {
                str(layers[0]): self._stack(layers, options)
                for segment in self.scan_segments
                for layers in map(segment.layers_like, range(segment.period))
            }
        )
        hidden, vocab, dtype = config.hidden_size, config.vocab_size, options.dtype
        rows, tied = padded_vocab_size(vocab, options.tp_size), config.tie_word_embeddings
        body = architecture.body
        vectors: Source = Tensor(architecture.embeddings_tensor, (vocab, hidden))
        vectors = Padded(vectors, row_size(hidden), axis=1, on_every_mesh=True)
        table = Padded(vectors, rows, axis=0)
        head = Tensor(architecture.head_tensor, (hidden, vocab), transposed=True)
        self.embedding = Embedding(table, vocab, hidden, dtype, is_head=tied)
        self.per_layer = architecture.declare_per_layer_embedding(config, options, body)
        norm = Tensor(f"{body}{architecture.last_norm}.weight", (hidden,))
        self.norm = RMSNorm(norm, config.rms_norm_eps, dtype, from_one=architecture.norms_from_one)
        self.lm_head = None if tied else LMHead(Padded(head, rows, axis=1), vocab, dtype)
        vision = config.vision
        declare_tower = architecture.declare_tower
        self.tower = declare_tower(vision, dtype) if vision and declare_tower else None
        self.draft_layer = draft_layer
        captured = tuple(draft_layer.captured) if draft_layer else ()
        self.num_captured = len(captured)
        # Each layer's slot in `_Carry.captured`.
        self.capture_slots = tuple(
            captured.index(layer) if layer in captured else len(captured)
            for layer in range(config.num_layers)
        )

    def _stack(self, layers: range, options: BuildOptions) -> DecoderLayer:
        layer = self._declare(self.config.layers[layers[0]], options)
        shards = options.dp_size if options.shards_weights else 1
        slots = options.placement and options.placement.of_layers(layers)
        stack_layers(layer, layers, shards, self.architecture.body + "layers.{}.", slots)
        return layer

    def _declare(self, spec: LayerSpec, options: BuildOptions) -> DecoderLayer:
        return self.architecture.build_layer(self.config, spec, options)

    def __call__(
        self,
        token_ids: jax.Array,
        batches: Sequence[AttentionBatch],
        kv_pools: tuple[jax.Array, ...],
        state_batch: StateBatch | None = None,
        states: LayerStates | None = None,
        images: ImageTokens | None = None,
    ) -> ModelOutput:
        """Run one step's tokens.

        Args:
            token_ids: int32 [T], in the order of the batches.
            batches: rows and pages of this rank, for each of the config's `cache_groups`; the
                recurrent group's entry is not read, and may be omitted.
            kv_pools: this chip's part of each pool, in the layout of `RaggedPagedAttention`; a
                layer's index in its pool is its index in its group.
            state_batch: rows and slots of this rank, for the recurrent group if there is one.
            states: this chip's part of the states of that group's layers.
            images: what the tokens read of images, if any are served.

        Returns:
            The results, with the updated kv_pools and states.
        """
        is_recurrent = self.cache_groups[-1].is_recurrent
        assert is_recurrent == (state_batch is not None) == (states is not None)
        kv_memories: tuple[Any, ...] = kv_pools
        if (top_k := self.config.reused_top_k) is not None:
            none = jnp.zeros((len(token_ids), top_k), jnp.int32)
            kv_memories = tuple(LatentMemory(pool, none) for pool in kv_pools)
        memories = (*kv_memories, states) if is_recurrent else kv_memories
        groups = [group for group, _ in self.cache_places]
        positions = batches[0].positions if images is None else images.positions
        spans = images and images.spans
        reads = layer_reads(self.config, groups, positions, batches, state_batch, spans)
        hidden, added = self._embed(token_ids, images)
        vectors = None
        if self.per_layer is not None:
            texts = token_ids
            if images is not None and self.config.vision is not None:
                texts = jnp.where(images.is_image, self.config.vision.pad_token_id, token_ids)
            vectors = self.per_layer(texts, hidden)
        terms = (hidden, jnp.zeros_like(hidden)) if self.defers_sum else (hidden,)
        keys = copy_keys(token_ids, batches[0].positions) if self.placement else None
        is_token, routed = batches[0].valid, []
        captured = None
        if self.num_captured:
            captured = jnp.zeros((self.num_captured + 1, *hidden.shape), hidden.dtype)
        carry = _Carry(terms, memories, captured)
        for segment in self.scan_segments:
            carry, own = self._run(segment, carry, is_token, keys, reads, (vectors, added))
            routed.append(own)
        hidden = self._whole(self.norm(reduce(jnp.add, carry.terms)), len(token_ids))
        states = carry.memories[-1] if is_recurrent else None
        kv_pools = tuple(
            own.kv_pool if isinstance(own, LatentMemory) else own
            for own in carry.memories[: len(kv_pools)]
        )
        draft_hidden = self._draft_hidden(hidden, carry.captured)
        counts, experts = map(join_layers, zip(*routed, strict=True))
        return ModelOutput(hidden, kv_pools, states, counts, draft_hidden, experts)

    def _whole(self, hidden: jax.Array, num_tokens: int) -> jax.Array:
        return join_shares(hidden, num_tokens) if self.sequence_parallel else hidden

    def _capture(
        self, captured: jax.Array | None, hidden: jax.Array, layer: jax.Array
    ) -> jax.Array | None:
        """Return `captured` with the hidden states before `layer`, int32 []."""
        if captured is None:
            return None
        slot = jnp.array(self.capture_slots, jnp.int32)[layer]
        updated: jax.Array = lax.dynamic_update_index_in_dim(captured, hidden, slot, 0)
        return updated

    def _draft_hidden(self, hidden: jax.Array, captured: jax.Array | None) -> jax.Array | None:
        if self.draft_layer is None:
            return None
        before = () if captured is None else captured[:-1]
        own = [self._whole(one, len(hidden)) for one in before]
        return self.draft_layer.first_hidden(hidden, own)

    @property
    def token_values(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the values that steps report of each token, by the names of
        `core/token_values.py`."""
        values = dict[str, jax.ShapeDtypeStruct]()
        if self.top_k is not None:
            shape = (self.config.num_layers, self.top_k)
            values["routed_experts"] = jax.ShapeDtypeStruct(shape, jnp.int16)
        if self.hidden_dtype is not None:
            size = self.config.hidden_size
            values["hidden_states"] = jax.ShapeDtypeStruct((size,), self.hidden_dtype)
        return values

    def draft(
        self,
        token_ids: jax.Array,
        hidden: jax.Array,
        batches: Sequence[AttentionBatch],
        kv_pools: tuple[jax.Array, ...],
        images: ImageTokens | None = None,
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """Run the draft layer over the batches' T positions.

        `token_ids` int32 [T] are the tokens after these positions. `hidden` [T, hidden_size] is
        `draft_hidden` at the positions, or this method's result. `images` is what the positions and
        the tokens read of images, if any are served.

        Returns:
            [T, hidden_size], the input of `draft_logits` for the tokens two positions ahead; the
            pools.
        """
        spec = self.config.draft_layer
        assert self.draft_layer is not None
        assert spec is not None
        index, place = self.cache_places[-1]
        pool, batch, pools = self.cache_groups[index].pool, batches[index], list(kv_pools)
        positions = batch.positions if images is None else images.positions
        reads = rotation_of(self.config, spec, positions), batch
        vectors = self._scaled(self.embedding.own_part(token_ids))
        if images is not None:
            vectors += images.vectors(self.config.hidden_size)
        vectors = sum_over_tensor(vectors)
        rest = (batch.valid, reads, pools[pool], jnp.int32(place))
        hidden, pools[pool] = self.draft_layer(vectors, hidden, *rest)
        return hidden, tuple(pools)

    def _embed(
        self, token_ids: jax.Array, images: ImageTokens | None
    ) -> tuple[jax.Array, jax.Array | None]:
        """Return the tokens' vectors, and those that images add after the first layers, [layers,
        T, hidden_size] or this chip's share; None if they add nothing."""
        join = scatter_sum if self.sequence_parallel else sum_over_tensor
        vectors = self.embedding.own_part(token_ids)
        if images is None:
            return self._scaled(join(vectors)), None
        own, added = images.split(self.config.hidden_size, join)
        return join(self._scaled(vectors) + own), added

    def _scaled(self, vectors: jax.Array) -> jax.Array:
        if not self.architecture.scales_embedding:
            return scaled(vectors, self.config.embedding_scale)
        # The factor has the model's dtype.
        return vectors * jnp.asarray(self.config.hidden_size**0.5, vectors.dtype)

    def _run(
        self,
        segment: ScanSegment,
        carry: _Carry,
        is_token: jax.Array,
        keys: jax.Array | None,
        reads: Sequence[tuple[Any, ...]],
        by_layer: tuple[jax.Array | None, jax.Array | None],
    ) -> tuple[_Carry, _Routed]:
        """Run all layers of a segment; return the carry, and each iteration's results of
        `count_experts` and `stack_experts`.

        `reads` has an entry for every layer of the model, as has the first of `by_layer`, their
        embeddings; the other is added after the first layers.
        """
        vectors, added = by_layer
        places = range(segment.first, segment.first + segment.period)
        split = {place: nnx.split(self.layers[str(place)]) for place in places}
        remembered = {place: self._remembered_at(segment, place) for place in places}
        slots = [
            self.placement and self.placement.slots(segment.layers_like(place))
            for place in range(segment.period)
        ]

        def run_period(carry: _Carry, turn: jax.Array) -> tuple[_Carry, _Routed]:
            terms, memories, captured = carry.terms, list(carry.memories), carry.captured
            chosen = []
            for place, (graphdef, weights) in split.items():
                layer: DecoderLayer = nnx.merge(graphdef, weights_of_layer(weights, turn))
                gather_over_data(layer)
                pool, first, step = remembered[place]
                hidden = reduce(jnp.add, terms)
                number = place + turn * segment.period
                captured = self._capture(captured, hidden, number)
                copies = ExpertCopies.of_layer(slots[place - segment.first], turn, keys)
                rest = (is_token, copies, reads[place], memories[pool], first + turn * step)
                own = None if vectors is None else vectors[number]
                hidden, delta, memories[pool], experts = layer(hidden, *rest, own)
                if added is not None:
                    last = len(added) - 1
                    after = added[jnp.minimum(number, last)]
                    delta += jnp.where(number <= last, after, jnp.zeros_like(after))
                terms = (hidden, delta) if self.defers_sum else (hidden + delta,)
                chosen.append(experts)
            carry = _Carry(terms, tuple(memories), captured)
            experts = stack_experts(chosen, self.top_k, len(is_token))
            return carry, (count_experts(chosen, self.num_counted), experts)

        turns = jnp.arange(segment.repeats, dtype=jnp.int32)
        unroll = min(max(1, self.unrolled_layers // segment.period), segment.repeats)
        return lax.scan(run_period, carry, turns, unroll=unroll)

    def _remembered_at(self, segment: ScanSegment, place: int) -> tuple[int, int, int]:
        """Return where the layers at `place` of a period store KV or states.

        It is their group's pool, the index of the first of them in the group, and the number of the
        group's layers per period; 0 for layers that all read one layer's cache.
        """
        number, first = self.cache_places[place]
        group = self.cache_groups[number]
        places = range(segment.first, segment.first + segment.period)
        step = sum(layer in group.layers for layer in places) if place in group.layers else 0
        return group.pool, first, step

    def logits(self, hidden: jax.Array) -> SplitLogits:
        """Map hidden [n, hidden_size] to logits of this chip's slice of the vocabulary."""
        head = self.embedding if self.lm_head is None else self.lm_head
        config, logits = self.config, head.logits(hidden)
        columns, cap = scaled(logits.columns, config.logit_scale), config.logit_soft_cap
        return logits._replace(columns=columns if cap is None else cap * jnp.tanh(columns / cap))

    def draft_logits(self, hidden: jax.Array) -> SplitLogits:
        """Compute logits from the draft layer's hidden states [n, hidden_size]."""
        assert self.draft_layer is not None
        return self.draft_layer.logits(hidden, self.logits)

    def is_spare(self, tensor: str) -> bool:
        """Return True for tensors that a checkpoint may hold although no parameter needs them."""
        own = self.architecture
        tied_head = self.lm_head is None and tensor == own.head_tensor
        layer = re.match(rf"{re.escape(own.body)}layers\.(\d+)\.", tensor)
        if layer and self._is_unread(int(layer[1]), tensor[layer.end() :]):
            return True
        return tied_head or tensor.endswith(_SPARE_SUFFIX) or tensor.startswith(own.spare_prefixes)

    def _is_unread(self, layer: int, name: str) -> bool:
        own = self.architecture
        if layer >= self.config.num_layers:
            return own.has_further_layers
        spec = self.config.layers[layer]
        reuses = spec.latent and spec.latent.indexer and spec.latent.indexer.reuses
        shares = spec.cache_source is not None or bool(reuses)
        return shares and name.startswith(own.unused_in_sharing_layers)
