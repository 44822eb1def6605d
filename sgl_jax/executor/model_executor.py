"""The executor: runs the scheduler's step plans on the devices.

Owns the mesh, the weights, the KV pool and the row tables, and has exclusive access to them. It
runs plans as given, without any notion of requests, page owners or sessions.
"""

import hashlib
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import jax
import msgspec
import numpy as np
from jax.experimental import multihost_utils
from numpy.typing import NDArray

from sgl_jax.core.compiled import compile_loops
from sgl_jax.core.engine_sizes import EngineSizes
from sgl_jax.core.page_tables import PageTables
from sgl_jax.core.progress import Progress
from sgl_jax.core.server_args import ServerArgs
from sgl_jax.core.step_plan import (
    Executor,
    ImageEncoding,
    Int32Array,
    RankResult,
    StepPlan,
    mask_words,
)
from sgl_jax.core.transfers import TransferEnd, Transfers
from sgl_jax.executor.block_stores.opening import open_block_store, weights_fingerprint
from sgl_jax.executor.buckets import Bucket
from sgl_jax.executor.compile_stages import CompileStages
from sgl_jax.executor.compile_watch import CompileWatch
from sgl_jax.executor.cpu_blocks import CpuBlocks
from sgl_jax.executor.devices import make_mesh, platform_of, set_compilation_cache
from sgl_jax.executor.engine_config import EngineConfig
from sgl_jax.executor.expert_recorder import ExpertRecorder
from sgl_jax.executor.first_token import check_first_token, first_token_plan, idle_plan
from sgl_jax.executor.image_patches import pack_images
from sgl_jax.executor.layout import LaunchedStep
from sgl_jax.executor.plan_check import check_plan
from sgl_jax.executor.pool_size import choose_pool_pages, require_host_bytes
from sgl_jax.executor.profiler import Profiler
from sgl_jax.executor.programs import Programs
from sgl_jax.executor.row_tables import DeviceRows, cut_admissions, empty_piece
from sgl_jax.executor.store_transfers import StoreTransfers
from sgl_jax.executor.weights import ServedWeights, WeightsError, stored_model
from sgl_jax.kernels.attention.cache_dtype import cache_dtype_name
from sgl_jax.layers.kernels import Kernels
from sgl_jax.mem_cache.device_pool import make_zeros
from sgl_jax.models.placement import PlacedModel, bytes_per_device, place_model
from sgl_jax.models.served import check_same_model

logger = logging.getLogger(__name__)

_NUM_TIMED = 3  # timed steps; the first may take longer
# Of the pages planned before the weights are loaded: `--mem-fraction-static` has room for the rest.
_LEAST_KEPT = 0.99


class ModelExecutor(Executor):
    """Runs a model on a mesh of devices.

    Attributes:
        sizes: the limits of plans.
        info: a human-readable description of the model and the settings.
        prefill_rate: prompt tokens per second that a rank computes, measured by `warm_up`; else 0.
        fetch_rate: tokens per second that a rank fetches from host memory, measured or 0.
        store_rate: tokens per second that a rank loads from the block store, measured or 0.
        weights: the weights that steps read.
        profiler: traces the devices.
        expert_recorder: counts how often experts are chosen.
    """

    sizes: EngineSizes
    _stages: CompileStages

    def __init__(self, args: ServerArgs, progress: Progress | None = None) -> None:
        """Choose devices, load weights, allocate the pools. Compiles no step; see `warm_up`."""
        self._progress = progress or Progress()
        self.mesh = make_mesh(args)
        set_compilation_cache(args.compilation_cache_dir)
        given = args
        model, load_format = stored_model(args.model_path, args.load_format, args)
        args = replace(args, load_format=load_format)
        config = EngineConfig.resolve(args, model, platform_of(self.mesh))
        args, decided = config.args, config.decided(given)
        logger.info("settings: %s", ", ".join(f"{name}={decided[name]}" for name in decided))
        placed = place_model(model, self.mesh, config.build_options)
        self._model, self._args = model, args
        floats = placed.float_matrices
        if model.quantization is not None:
            sizes = (f"{name} {size / 1e9:.2f} GB" for name, size in floats.items())
            logger.info("matrices that are not quantized: %s", ", ".join(sizes))
        self.weights = ServedWeights(placed, args, self._progress)
        self._pool_layouts, self._watch, self._config = config.pool_layouts, CompileWatch(), config
        # Compilation needs shapes only, so that it runs while weights are loaded.
        self._size_pools(placed, bytes_per_device(placed.params))
        self._stages.begin()
        self.cpu_blocks: CpuBlocks | None = None
        try:
            self.weights.load_first()
            self._size_pools(placed)
            for text in config.warnings(self.sizes):
                logger.warning(text)
            self._state, self._row_params = make_zeros(self._state_shapes)
            if self.sizes.host_blocks:
                require_host_bytes(config.host_bytes(self.sizes, args.num_hosts))
                self.cpu_blocks = CpuBlocks(
                    self._state_shapes[0], config.chip_views, self.sizes, self.mesh
                )
                self._layout = config.kv_layout
                if args.hicache_storage_backend != "none":
                    self.cpu_blocks.open_store(
                        open_block_store(args), self._kv_fingerprint(), args.store_timeout_s
                    )
        except BaseException:
            self._stages.close()  # or the process would end only with the last compilation
            raise
        self.prefill_rate = self.fetch_rate = self.store_rate = 0.0
        self.profiler = Profiler()
        self.expert_recorder = ExpertRecorder(self._expert_counts)
        self._in_flight: deque[LaunchedStep] = deque()
        self._page_tables = PageTables(self.sizes)
        buckets = config.buckets.all
        self._layouts = {bucket: self._programs.layout(bucket) for bucket in buckets}
        compile_loops(self._progress)
        self.info: dict[str, Any] = {
            "model_path": args.model_path,
            "architecture": model.architecture,
            "dtype": args.dtype,
            "quantization": model.quantization and model.quantization.scheme_names,
            "float_matrices": list(floats),
            "kv_cache_dtype": cache_dtype_name(config.pool_layouts[0].dtype),
            "platform": config.platform,
            "devices": [str(device) for device in self.mesh.devices.flat],
            "hidden_size": model.hidden_size,
            "num_layers": model.num_layers,
            "experts_per_token": model.moe.choice.top_k if model.moe else 0,
            "eos_token_ids": list(model.eos_token_ids),
            "weight_bytes": sum(leaf.nbytes for leaf in self.weights.arrays),
            "kv_pool_bytes": sum(pool.nbytes for pool in self._state.kv_pools),
            "images": msgspec.to_builtins(config.images and config.images.settings),
            "settings": decided,
            **self.sizes._asdict(),
        }

    def _size_pools(self, placed: PlacedModel, unloaded_bytes: int = 0) -> None:
        """Choose the sizes of pools and their programs, before the weights are loaded, which take
        `unloaded_bytes` on each device, and again afterwards if they took clearly more."""
        config = self._config
        pool_pages = choose_pool_pages(
            *(config.args, config.pools, self.mesh, config.pages_per_row, config.work_bytes),
            unloaded_bytes,
        )
        if not unloaded_bytes:
            if pool_pages[0] >= _LEAST_KEPT * self.sizes.pool_pages[0]:
                return
            logger.warning("the weights took more memory than planned: %s pages", pool_pages)
            self._stages.give_up()
        self.sizes = config.sizes(pool_pages)
        self._state_shapes = config.state_shapes(pool_pages, self.mesh)
        self._programs = Programs(
            *(placed.graphdef, placed.params, *self._state_shapes, self.sizes, self.mesh),
            row_blocks=config.row_blocks,
        )
        self._stages = self._new_stages()

    def use_kernels(self, kernels: Kernels) -> None:
        """Compute all further steps with `kernels`, for instance to compare them with others. Call
        `warm_up` again to compile their programs. Nothing may be in flight."""
        self._watch.disarm()
        options = self._config.build_options._replace(kernels=kernels)
        placed = place_model(self._model, self.mesh, options)
        self._programs = self._programs.of_graph(placed.graphdef)
        self._stages = self._new_stages()

    def _new_stages(self) -> CompileStages:
        images = self._config.images
        return CompileStages(
            self._programs,
            self._config.buckets,
            self._args.warmup,
            self._watch,
            self._progress,
            has_decode_steps=self.sizes.max_decode_steps > 1,
            image_tokens=images.shapes if images else (),
        )

    def compile_counts(self) -> dict[str, int]:
        """Return the compilations until `warm_up` ended, in the background since then, and in the
        loop (each a defect). Without warm-up nothing is counted."""
        return {
            "compiles_at_start": self._watch.num_at_start,
            "compiles_in_background": self._watch.num_beside_loop,
            "compiles_after_ready": self._watch.num_in_loop,
        }

    def warm_up(self) -> None:
        """Compile the programs that `--warmup` names, run each once on only the null row and page,
        then sample a token. Raises ValueError if the model's logits are not finite."""
        if self._stages.warmup == "none":
            logger.warning("no warm-up: the first step of each shape will compile")
            return
        buckets = self._stages.compile_first()
        if self.cpu_blocks is not None:
            self.cpu_blocks.compile()
        sizes = self.sizes
        self._write(empty_piece(sizes.dp_size, sizes.max_stop_ids, sizes.max_images))
        idle = idle_plan(self.sizes)
        several = idle_plan(self.sizes, has_steps=True)
        shape = (0, 1 + self.sizes.max_draft_tokens, mask_words(self.sizes.vocab_size))
        no_masks = [np.zeros(shape, np.int32) for _ in idle.ranks]
        with self._progress.phase("warming_up", len(buckets), "programs") as phase:
            for bucket in buckets:
                self._run(bucket, idle)
                if self._stages.warmup == "all":
                    self._draw(self._run(bucket, replace(idle, is_masked=True)), no_masks)
                phase.advance()
            for bucket in self._stages.ready_decode:
                self._run(bucket, several)
            first = self.result(self.launch(first_token_plan(self.sizes)))
            check_first_token(first, self.sizes.vocab_size, self.info["model_path"])
            if self.cpu_blocks is not None:
                self._measure_rates(self.cpu_blocks)
            self.reset()
        self._watch.arm()

    def _measure_rates(self, cpu_blocks: CpuBlocks) -> None:
        """Time the longest prompt of a step, a fetch and a load. Overwrites pages."""
        plan = first_token_plan(self.sizes, self.sizes.max_chunk_tokens)
        seconds = []
        for _ in range(_NUM_TIMED):
            begin_s = time.perf_counter()
            self.result(self.launch(plan))
            seconds.append(time.perf_counter() - begin_s)
        self.prefill_rate = int(plan.ranks[0].q_lens[0]) / min(seconds)
        self._state, self.fetch_rate = cpu_blocks.measure(self._state)
        self.store_rate = cpu_blocks.measure_store()
        logger.info(
            "a rank computes %.0f prompt tokens a second, fetches %.0f from host memory, and "
            "loads %.0f from the store",
            *(self.prefill_rate, self.fetch_rate, self.store_rate),
        )

    def start_background(self) -> bool:
        """Start compiling the programs that `warm_up` skipped; return False if there are none. If
        True, no masked step may be launched before `background_end` returns a string."""
        return self._stages.start_background()

    def background_end(self) -> str | None:
        """Return "" if masked steps may be launched, the error if their programs failed to compile,
        and None before."""
        return self._stages.background_end()

    @property
    def has_decode_steps(self) -> bool:
        """Return whether the programs of plans with several decode steps are compiled."""
        return self._stages.has_decode_steps

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Start a step and return while it runs.

        Raises ValueError, without any effect, if the plan exceeds `sizes`. After any other error
        the device's state is lost: call `reset` and admit every request again.
        """
        check_plan(plan, self.sizes)
        self._page_tables.apply(plan.page_changes)
        if any(rank.admissions for rank in plan.ranks):
            admissions = [rank.admissions for rank in plan.ranks]
            limits = self.sizes.max_stop_ids, self.sizes.max_images
            for piece in cut_admissions(admissions, *limits):
                self._write(piece)
        for images in zip_longest(*(rank.encodings for rank in plan.ranks)):
            self._encode(images)
        if self.cpu_blocks is not None and plan.saved:
            self.cpu_blocks.copy(self._state, plan.saved)
        launched = self._run(self._stages.bucket_of(plan), plan)
        self._in_flight.append(launched)
        return launched

    def draw(self, handle: LaunchedStep, masks: Sequence[Int32Array]) -> None:
        """Sample the tokens of a masked step; see `Executor.draw`. Raises RuntimeError if they were
        sampled already, or if this is not the step launched last."""
        if not self._in_flight or self._in_flight[-1] is not handle or handle.undrawn is None:
            raise RuntimeError(f"step {handle.plan.step_id} does not wait for masks")
        self._draw(handle, masks)

    def _draw(self, handle: LaunchedStep, masks: Sequence[Int32Array]) -> None:
        assert handle.undrawn is not None
        _, draw = self._programs.halves(handle.bucket)
        tables = self.weights.arrays, self._state, self._row_params
        packed = handle.layout.pack_masks(masks)
        self._state, handle.output = draw(*tables, *handle.undrawn, packed)
        handle.undrawn = None

    def result(self, handle: LaunchedStep) -> tuple[RankResult, ...]:
        """Wait for a step and return each rank's samples. Raises RuntimeError if this result was
        already read, or an earlier step's was not."""
        if not self._in_flight or self._in_flight[0] is not handle:
            raise RuntimeError(
                f"step {handle.plan.step_id}: results are read once each, in launch order"
            )
        self._in_flight.popleft()
        assert handle.output is not None, "a masked step is drawn before its result is read"
        results = handle.layout.unpack_output(handle.plan.ranks, handle.output)
        if self.profiler.steps_left is not None:
            self.profiler.after_step()
        return results

    def transfer(self, transfers: Transfers) -> None:
        """Begin transfers between the devices and host memory; return while they run. After an
        error the device's state is lost: call `reset` and admit every request again."""
        if self.cpu_blocks is not None:
            self._state = self.cpu_blocks.transfer(self._state, transfers)

    @property
    def store(self) -> StoreTransfers | None:
        return None if self.cpu_blocks is None else self.cpu_blocks.store

    def renew_store_keys(self, *, keeps_kv: bool) -> None:
        """Renew the keys of stored KV after a change of the weights. If `keeps_kv`, KV of the old
        weights stays in use, so new blocks get a key that no later engine looks up."""
        if self.store is not None:
            self.store.fingerprint = secrets.token_hex(16) if keeps_kv else self._kv_fingerprint()

    def _kv_fingerprint(self) -> str:
        weights = weights_fingerprint(self.weights.with_places())
        return hashlib.blake2b(f"{weights} {self._layout}".encode(), digest_size=16).hexdigest()

    def ended_transfers(self) -> list[TransferEnd]:
        """Return the transfers that have ended since the last call."""
        return [] if self.cpu_blocks is None else self.cpu_blocks.ended()

    def reset(self) -> None:
        """Start over after a failed step, with empty pools and tables and nothing in flight."""
        self._in_flight.clear()
        if self.cpu_blocks is not None:
            self.cpu_blocks.reset()
        with self._without_state():
            pass

    def release_pools(self) -> None:
        """Delete pools and tables; `reset` creates new ones. Nothing may be in flight."""
        for array in jax.tree.leaves((self._state, self._row_params)):
            array.delete()

    def check_model(self, model_path: str) -> None:
        """Raise ModelConfigError, naming the differences, unless the compiled programs can serve
        the folder's weights."""
        check_same_model(self._model, stored_model(model_path, "auto", self._args)[0])

    def update_weights(
        self, model_path: str, give_up_kv: Callable[[], object] | None = None
    ) -> None:
        """Replace the weights by those in another folder, with the same shapes and shardings.

        Nothing may be in flight. The old weights stay until all new weights are loaded, so both are
        on the devices for a while.

        Args:
            give_up_kv: called if both do not fit next to the pools. Pools and tables are then
                freed, and are new and empty afterwards, as after `reset`, even if loading fails.

        Raises:
            WeightsError: the weights could not be loaded; the old weights stay.
        """
        with self._watch.paused():
            failure = self.weights.replace(model_path)
            if failure is not None and failure.lacks_room and give_up_kv is not None:
                logger.info("the KV pools make room for the weights in %r", model_path)
                give_up_kv()
                with self._without_state():
                    failure = self.weights.replace(model_path)
        if failure is not None:
            raise WeightsError(failure.reason)
        self.info["model_path"] = model_path

    @contextmanager
    def _without_state(self) -> Iterator[None]:
        """Free pools and tables in this context, and create new ones afterwards: there may not be
        room for two of each."""
        self._page_tables = PageTables(self.sizes)
        del self._state, self._row_params
        yield
        with self._watch.paused():
            self._state, self._row_params = make_zeros(self._state_shapes)
            jax.block_until_ready(self._state)
        self.expert_recorder.after_reset()

    def _expert_counts(self) -> NDArray[np.uint32] | None:
        counts = self._state.expert_counts
        if counts is None:
            return None
        if not counts.is_fully_addressable:  # each host has only the counts of its ranks
            counts = multihost_utils.process_allgather(counts, tiled=True)
        return np.asarray(counts).view(np.uint32)

    def close(self) -> None:
        """Wait for steps in flight and free the devices' memory. Cannot be used again."""
        self._watch.disarm()
        self._stages.close()
        if self.cpu_blocks is not None:
            self.cpu_blocks.close()
        self._in_flight.clear()
        pools = jax.tree.leaves(self._state)
        jax.block_until_ready([pool for pool in pools if not pool.is_deleted()])
        del self._state, self._row_params, self.weights, self._programs, self._stages

    def _run(self, bucket: Bucket, plan: StepPlan) -> LaunchedStep:
        layout = self._layouts[bucket]
        step_input = layout.pack(plan.ranks, self._page_tables)
        arguments = (self.weights.arrays, self._state, self._row_params, *step_input)
        if not plan.is_masked:
            program = self._programs.decode_steps if plan.has_steps else self._programs.step
            self._state, output = program(bucket)(*arguments)
            return LaunchedStep(plan, bucket, layout, output)
        compute, _ = self._programs.halves(bucket)
        self._state, computed = compute(*arguments)
        return LaunchedStep(plan, bucket, layout, None, (*step_input, computed))

    def _write(self, piece: Int32Array) -> None:
        state = self._state
        images = state.images
        lists = None if images is None else images.lists
        tables = DeviceRows(state.token_table, state.row_lens, self._row_params, lists)
        tables = self._programs.admit()(tables, piece)
        if images is not None and tables.images is not None:
            images = images._replace(lists=tables.images)
        self._state = state._replace(token_table=tables.tokens, row_lens=tables.lens, images=images)
        self._row_params = tables.params

    def _encode(self, images: Sequence[ImageEncoding | None]) -> None:
        """Run the vision tower on each rank's image."""
        vision, state = self._model.vision, self._state
        assert vision is not None
        assert state.images is not None
        given = pack_images(images, vision)
        encode = self._programs.encode(given.patches.shape[1])
        vectors = encode(self.weights.arrays, state.images.vectors, *given)
        self._state = state._replace(images=state.images._replace(vectors=vectors))
