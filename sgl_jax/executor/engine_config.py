"""All settings of an engine, resolved from its arguments, its model and its platform.

No later code interprets "auto" or 0 as a default. Uses no device and makes no array, so that a
planner gets the same result for absent chips. Only the number of KV pages remains open: it depends
on the devices' memory.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from sgl_jax.core.engine_sizes import CacheGroup, EngineSizes
from sgl_jax.core.server_args import ServerArgs
from sgl_jax.executor.buckets import Buckets, choose_buckets
from sgl_jax.executor.device_defaults import resolve_for_device
from sgl_jax.executor.image_memory import ImageMemory
from sgl_jax.executor.model_settings import (
    check_recurrence,
    pool_layout,
    resolve_for_model,
    state_layout,
    stores_kv_scales,
)
from sgl_jax.executor.pool_size import KVPools, StateSizes
from sgl_jax.executor.state_slots import RowStates
from sgl_jax.executor.step import StepState
from sgl_jax.kernels.attention.api import check_pages, check_spans
from sgl_jax.kernels.attention.cache_dtype import EIGHT_BITS, cache_dtype_name
from sgl_jax.kernels.gated_delta.batch import CHUNK_TOKENS
from sgl_jax.kernels.row_blocks import RowBlocks
from sgl_jax.layers.kernels import invariant_kernels, invariant_row_blocks, kernels_of
from sgl_jax.layers.sampling.row_params import packed_width
from sgl_jax.layers.sampling.sample import BLOCK_ROWS
from sgl_jax.mem_cache.device_pool import (
    ChipView,
    KVPoolLayout,
    StatePoolLayout,
    kv_pool_shape,
    state_pool_shapes,
)
from sgl_jax.models.architecture import BuildOptions
from sgl_jax.models.config import ModelConfig
from sgl_jax.models.expert_placement import ExpertPlacement, placement_for

_UNROLLED_LAYERS = 4
_MOST_DECODE_STEPS = 16  # that the engine's loop chooses
_EIGHT_BITS = cache_dtype_name(EIGHT_BITS)
_KV_VERSION = "sgl_jax KV 2"  # change it whenever the values in pages change


class EngineConfig(NamedTuple):
    """The resolved settings of an engine."""

    args: ServerArgs  # with a value for each setting that may be "auto" or 0
    platform: str  # "cpu", "gpu" or "tpu"
    model: ModelConfig
    groups: tuple[CacheGroup, ...]  # cache groups of the model's layers
    pool_layouts: tuple[KVPoolLayout, ...]  # one for each pool of pages of `groups`
    state_layout: StatePoolLayout | None  # pool of recurrent states, after the pools of pages
    buckets: Buckets
    placement: ExpertPlacement | None  # expert placement; None: in order

    @classmethod
    def resolve(cls, args: ServerArgs, model: ModelConfig, platform: str) -> "EngineConfig":
        """Resolve the open settings of `args` for "cpu", "gpu" or "tpu".

        Raises ValueError if the context exceeds the model's, heads or experts cannot be
        distributed, the model has no experts to distribute, the platform lacks the backend, or the
        attention kernel cannot read pages of this size or number, or as many images.
        """
        if args.kv_cache_dtype == "auto" and stores_kv_scales(model):
            args = dataclasses.replace(args, kv_cache_dtype=_EIGHT_BITS)
        args = resolve_for_model(resolve_for_device(args, platform), model)
        groups = model.cache_groups()
        paged = [group for group in groups if not group.is_recurrent]
        in_pools = {group.pool: group for group in paged}
        pool_layouts = tuple(pool_layout(args, model, in_pools[i]) for i in range(len(in_pools)))
        buckets = choose_buckets(args, platform)
        states = state_layout(args, model, groups)
        placement = placement_for(args, model)
        config = cls(args, platform, model, groups, pool_layouts, states, buckets, placement)
        if args.attention_backend == "pallas":
            check_pages(args.page_size, config.pages_per_row, pool_layouts[0].dtype)
            check_recurrence(model, args.tp_size)
            if model.vision is not None and model.vision.whole_images:
                check_spans(buckets.rows, args.max_images_per_request)
        return config

    @property
    def dtype(self) -> jnp.dtype:
        return jnp.dtype(self.args.dtype)

    @property
    def context_len(self) -> int:
        assert self.args.context_length is not None, "resolved"
        return self.args.context_length

    @property
    def pages_per_row(self) -> int:
        return -(-self.context_len // self.args.page_size)

    @property
    def build_options(self) -> BuildOptions:
        simulates = self.platform == "cpu" and self.args.attention_backend == "pallas"
        on_tpu = self.platform == "tpu"
        is_invariant = self.args.enable_deterministic_inference
        choose = invariant_kernels if is_invariant else kernels_of
        return BuildOptions(
            dtype=self.dtype,
            ep_size=self.args.ep_size,
            placement=self.placement,
            counts_experts=self._counts_experts,
            returns_experts=self.args.enable_return_routed_experts,
            returns_hidden_states=self.args.enable_return_hidden_states,
            shards_weights=self.args.weight_sharding == "data",
            kernels=choose(self.platform, self.args.attention_backend),
            has_kv_scales=self._has_kv_scales,
            widens_int4=self.platform == "cpu",
            # Elsewhere, a program reads a layer's weights out of the stack in place.
            separates_layers=self.platform == "cpu"
            and not simulates
            and self.args.weight_sharding == "replicated",
            # Within an iteration, the compiler prefetches a layer's weights while the previous
            # layer computes. Figures are in docs/measurements/planning.md. The latent attention
            # kernels take a minute to compile for each unrolled layer.
            unrolled_layers=_UNROLLED_LAYERS if on_tpu and self.model.latent is None else 1,
            # Cheapest: the next layer's norm adds an all-reduced result to the residual, and a
            # matmul adds its result itself if no all-reduce follows.
            defers_sum=on_tpu and self.args.tp_size > 1,
            sequence_parallel=self.args.hidden_sharding == "tensor" and self.args.tp_size > 1,
        )

    @property
    def row_blocks(self) -> RowBlocks | None:
        """Return how rows are computed alike in all shapes of a step; None if they need not be."""
        if not self.args.enable_deterministic_inference:
            return None
        return invariant_row_blocks(self.platform, self.args.attention_backend)

    @property
    def _counts_experts(self) -> bool:
        return self.args.expert_distribution_recorder_mode == "stat"

    @property
    def _has_kv_scales(self) -> bool:
        if self.args.kv_cache_scales is not None:
            return True
        return self.args.kv_cache_dtype == _EIGHT_BITS and stores_kv_scales(self.model)

    def decided(self, given: ServerArgs) -> dict[str, Any]:
        """Return the settings that differ from `given`, with their values."""
        own, theirs = dataclasses.asdict(self.args), dataclasses.asdict(given)
        return {name: value for name, value in own.items() if value != theirs[name]}

    @property
    def logit_bytes(self) -> int:
        """Return the bytes of the largest step's float32 logits and of sampling one block of rows.

        Several chips share the logits, which leaves room for other temporaries. Sampling takes at
        most six arrays of the block's logits: modified, with noise, probabilities, and twice the
        token counts of prompts and outputs.
        """
        num_drawn = self.buckets.decode_tokens
        return 4 * self.model.vocab_size * (num_drawn + 6 * min(num_drawn, BLOCK_ROWS))

    @property
    def pools(self) -> KVPools:
        """Return the pools of a rank, without their numbers of pages."""
        sizes = self._sizes(self.buckets.rows, ())
        in_pools = [
            [group for group in self.groups if group.pool == pool]
            for pool in range(len(self.pool_layouts))
        ]
        # Admission counts only pages of the first pool.
        resting = [sum(map(sizes.resting_pages, groups)) for groups in in_pools[1:]]
        chunk_pages = sizes.pages_for(sizes.max_chunk_tokens)
        return KVPools(
            layouts=self.pool_layouts,
            num_tables=tuple(map(len, in_pools)),
            resting_pages=(0, *resting),
            step_pages=(0, *(chunk_pages * len(groups) for groups in in_pools[1:])),
            num_rows=self.buckets.rows,
            window_tokens_ratio=self.args.swa_full_tokens_ratio,
            states=self._state_sizes,
        )

    @property
    def _state_sizes(self) -> StateSizes | None:
        if self.state_layout is None:
            return None
        return StateSizes(
            self.state_layout.slot_bytes,
            row_slots=2 * (1 + self.buckets.draft_tokens),
            max_snapshots=self.args.max_recurrent_snapshots,
            is_given=self.args.max_total_tokens is not None,
        )

    @property
    def max_decode_steps(self) -> int:
        """Return the most decode steps of one launch."""
        num_steps = self.args.num_decode_steps
        return _MOST_DECODE_STEPS if num_steps == "auto" else int(num_steps)

    @property
    def snapshot_interval(self) -> int:
        """Return the tokens between a path's snapshots: `--recurrent-snapshot-interval`, or the
        minimum for which snapshots take no more memory than the path's KV."""
        if self.state_layout is None:
            return 0
        interval = self.args.recurrent_snapshot_interval
        if interval is None:
            page_bytes = sum(
                self.pool_layouts[group.pool].page_bytes
                for group in self.groups
                if not group.is_recurrent
            )
            tokens = self.args.page_size * self.state_layout.slot_bytes // page_bytes
            interval = 1 << max(tokens - 1, 0).bit_length()
        return -(-interval // self.tail_interval) * self.tail_interval

    @property
    def tail_interval(self) -> int:
        """Return the tokens between a generating row's snapshots; only the last is kept."""
        if self.state_layout is None:
            return 0
        return max(self.args.page_size, CHUNK_TOKENS)  # both are powers of two

    def sizes(self, pool_pages: tuple[int, ...]) -> EngineSizes:
        """Return the scheduler's limits, with pools of `pool_pages` on each rank."""
        num_rows = self.buckets.rows
        if len(pool_pages) > 1:
            num_rows = max(self.pools.rows_within([num - 1 for num in pool_pages]), 1)
        return self._sizes(num_rows, pool_pages)

    def _sizes(self, num_rows: int, pool_pages: tuple[int, ...]) -> EngineSizes:
        limits = self.buckets
        num_absent = (limits.rows - num_rows) * (1 + limits.draft_tokens)
        return EngineSizes(
            dp_size=self.args.dp_size,
            page_size=self.args.page_size,
            pool_pages=pool_pages,
            num_rows=num_rows + 1,
            max_context_len=self.context_len,
            max_step_tokens=limits.tokens - num_absent,
            max_prompt_logprob_tokens=limits.prompt_logprob_tokens,
            vocab_size=self.model.vocab_size,
            eos_token_ids=self.model.eos_token_ids,
            step_token_shapes=self.buckets.for_any_rows(),
            max_draft_tokens=limits.draft_tokens,
            max_decode_steps=self.max_decode_steps,
            lookahead_slots=limits.draft_tokens - 1 if self.model.draft_layer else 0,
            groups=self.groups,
            snapshot_interval=self.snapshot_interval,
            tail_interval=self.tail_interval,
            max_step_snapshots=self._max_step_snapshots(num_rows),
            host_blocks=self._host_blocks(pool_pages),
            **(self.images.sizes if self.images else {}),
        )

    @property
    def images(self) -> ImageMemory | None:
        """Return the memory of images; None if none are served."""
        if self.model.vision is None:
            return None
        most_rows = self.buckets.rows * self.context_len
        return ImageMemory.choose(self.args, self.model.vision, most_rows)

    @property
    def work_bytes(self) -> int:
        """Return the bytes on each device that neither weights nor pages may take."""
        return self.logit_bytes + (self.images.device_bytes if self.images else 0)

    @property
    def page_bytes(self) -> list[int]:
        """Return the bytes of a page of each pool, then of a slot of the pool of states."""
        page_bytes = [layout.page_bytes for layout in self.pool_layouts]
        if self.state_layout is not None:
            page_bytes.append(self.state_layout.slot_bytes)
        return page_bytes

    @property
    def chip_views(self) -> list[tuple[ChipView, ...]]:
        """Return the chips' parts of the arrays of each pool, as in `page_bytes`."""
        views: list[tuple[ChipView, ...]] = [(layout.chip_view,) for layout in self.pool_layouts]
        if self.state_layout is not None:
            views.append(tuple(self.state_layout.chip_views))
        return views

    @property
    def kv_layout(self) -> str:
        """Return text with everything that determines a token's KV except weights and tokens.
        Blocks stored under a different text are not read.

        It depends neither on the number of chips nor on the page size, which change KV by rounding
        only; except for deterministic inference, which promises equal answers.
        """
        layouts = tuple(layout.of_one_chip(page_size=1) for layout in self.pool_layouts)
        described = self.model, layouts, self.state_layout, self.groups
        sizes = (self.args.tp_size, self.args.page_size)
        fixed = sizes if self.args.enable_deterministic_inference else ()
        return " ".join([_KV_VERSION, self.args.dtype, *map(repr, (*described, fixed))])

    def _host_blocks(self, pool_pages: tuple[int, ...]) -> tuple[int, ...]:
        if not self.args.enable_hierarchical_cache or max(pool_pages, default=0) < 2:
            return ()
        ratio = self.args.hicache_ratio
        if self.args.hicache_size:
            on_device = sum(
                (num - 1) * each for num, each in zip(pool_pages, self.page_bytes, strict=False)
            )
            ratio = self.args.hicache_size * 1e9 / on_device
        return tuple(1 + max(int((num - 1) * ratio), 1) for num in pool_pages)

    def host_bytes(self, sizes: EngineSizes, num_hosts: int) -> int:
        """Return the bytes of all blocks in the memory of each of `num_hosts` hosts."""
        of_rank = sum(
            num * each for num, each in zip(sizes.host_blocks, self.page_bytes, strict=True)
        )
        return of_rank * sizes.dp_size // num_hosts

    def warnings(self, sizes: EngineSizes) -> list[str]:
        texts = []
        unscaled = self.args.kv_cache_dtype == _EIGHT_BITS and not self._has_kv_scales
        if unscaled and self.model.latent is None:
            texts.append(
                "K and V are cached in 8 bits as they are, at most 448: "
                "scripts/calibrate_kv_scales finds scales for --kv-cache-scales"
            )
        vision, most = self.model.vision, self.args.chunked_prefill_size
        largest = vision.images.max_tokens if vision and vision.whole_images else 0
        if largest > most:
            texts.append(
                f"images are resized to {most} tokens, --chunked-prefill-size, instead of {largest}"
            )
        if self.state_layout is None or self.args.disable_radix_cache:
            return texts
        if sizes.page_size > CHUNK_TOKENS:
            texts.append(
                "the states of recurrent layers are kept at ends of pages: the prefix cache serves "
                f"no prompt below {sizes.page_size} tokens; a smaller --page-size does"
            )
        if sizes.num_snapshots - 1 < sizes.num_rows - 1:
            texts.append(
                f"the prefix cache of a rank keeps {sizes.num_snapshots - 1} states, fewer than "
                f"the {sizes.num_rows - 1} requests that run at once: most prompts will find none; "
                "raise --max-recurrent-snapshots or lower --max-running-requests"
            )
        return texts

    def _max_step_snapshots(self, num_rows: int) -> int:
        """Bound the snapshots of a step. A row may cross one interval, or two with drafts (fewer
        than an interval). The prompt chunk may cross several, and adds an end and a branch."""
        if self.state_layout is None:
            return 0
        of_rows = num_rows * (2 if self.buckets.draft_tokens else 1)
        return of_rows + self.buckets.chunk_tokens // self.snapshot_interval + 2

    def state_shapes(self, pool_pages: tuple[int, ...], mesh: Mesh) -> tuple[StepState, jax.Array]:
        """Return the engine's state and row parameters as sharded `jax.ShapeDtypeStruct`s."""
        sizes = self.sizes(pool_pages)
        num_rows = sizes.dp_size * sizes.num_rows

        def of_rows(*width: int) -> Any:
            sharding = NamedSharding(mesh, P("data"))
            return jax.ShapeDtypeStruct((num_rows, *width), jnp.int32, sharding=sharding)

        pools: Any = tuple(
            kv_pool_shape(layout, num_pages, mesh)
            for layout, num_pages in zip(self.pool_layouts, pool_pages, strict=False)
        )
        states = None
        if self.state_layout is not None:
            layers = state_pool_shapes(self.state_layout, sizes.num_state_slots, mesh)
            states = RowStates(of_rows(), layers)
        token_table, row_lens = of_rows(sizes.max_context_len), of_rows()
        counts: Any = None
        if self._counts_experts and self.model.moe is not None:
            shape = (sizes.dp_size, self.model.num_layers, self.model.moe.num_experts)
            own = NamedSharding(mesh, P("data"))
            counts = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=own)
        images = None
        if self.images is not None:
            images = self.images.arrays(sizes.dp_size, sizes.num_rows, mesh)
        state = StepState(token_table, row_lens, pools, states, counts, images)
        return state, of_rows(packed_width(sizes.max_stop_ids))
