"""The compiled programs of an engine: one per bucket, and one to admit rows.

Owns tracing, sharding, donation and compilation. Programs are compiled ahead of their first use and
called directly, so a call never compiles.
"""

import copy
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from sgl_jax.core.engine_sizes import EngineSizes
from sgl_jax.core.progress import Progress
from sgl_jax.core.step_plan import mask_words
from sgl_jax.executor.buckets import Bucket
from sgl_jax.executor.decode_steps import run_decode_steps
from sgl_jax.executor.devices import platform_of
from sgl_jax.executor.image_patches import image_words, write_vectors
from sgl_jax.executor.layout import DPLayout
from sgl_jax.executor.row_tables import DeviceRows, piece_words, write_piece
from sgl_jax.executor.step import Computed, RankStep, StepState, compute_step, draw_step, run_step
from sgl_jax.kernels.row_blocks import RowBlocks, invariant_rows
from sgl_jax.layers.mesh_axes import DATA_AXIS, MESH_AXES, TENSOR_AXIS
from sgl_jax.models.decoder import CausalLM

# Arguments: weights, state (donated), row parameters, control words, page tables; a step's second
# half also takes the first half's `Computed` and masks. Results: the state, and a `StepOutput` or
# `Computed`.
StepProgram = Callable[..., tuple[StepState, Any]]
AdmitProgram = Callable[[DeviceRows, Any], DeviceRows]  # tables (donated), piece -> tables
# Weights, vectors of images (donated), patches, words (see `image_patches.py`) -> vectors.
EncodeProgram = Callable[..., jax.Array]

_MAX_COMPILE_THREADS = 4
# Logits are sharded by vocabulary; hidden states and queries are replicated on a rank's chips.
_SPECS: tuple[Any, ...] = (P("data", TENSOR_AXIS), *(P("data"),) * 4)
_COMPUTED_SPECS: Any = Computed(*_SPECS)
_OUTPUT_SPEC = P("data")


class Programs:
    """Compiles and keeps the programs of one model on one mesh.

    Args:
        graphdef: `nnx.merge(graphdef, params)` is the model.
        params: the model's weights, a tree of arrays sharded on the mesh as the model declares, or
            of `jax.ShapeDtypeStruct`s with shardings.
        state, row_params: shapes of the tables and pools, see `EngineConfig.state_shapes`.
        sizes: the engine's sizes.
        mesh: ('data', 'tensor').
        row_blocks: how all shapes compute the same bits; None if they need not.
    """

    def __init__(
        self,
        graphdef: Any,
        params: Any,
        state: Any,
        row_params: Any,
        sizes: EngineSizes,
        mesh: Mesh,
        *,
        row_blocks: RowBlocks | None = None,
    ) -> None:
        leaves, self._params_tree = jax.tree.flatten(params)
        self._graphdef = graphdef
        self._sizes = sizes
        self._mesh = mesh
        self._row_blocks = row_blocks
        # If ranks are on several hosts, each host gets the results of all ranks.
        spans_hosts = len({device.process_index for device in mesh.devices.flat}) > 1
        self._gathers_output = spans_hosts and sizes.dp_size > 1
        self._weights = tuple(
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.format) for leaf in leaves
        )
        self._state, self._row_params = state, row_params
        self._steps: dict[Bucket, StepProgram] = {}
        self._decode_steps: dict[Bucket, StepProgram] = {}
        self._traced_halves: dict[Bucket, tuple[jax.stages.Lowered, jax.stages.Lowered]] = {}
        self._halves: dict[Bucket, tuple[StepProgram, StepProgram]] = {}
        self._encoders: dict[int, EncodeProgram] = {}
        self._admit: AdmitProgram | None = None
        self._is_closed = False

    def of_graph(self, graphdef: Any) -> "Programs":
        """Return the programs of another graph with the same parameters; none is compiled yet."""
        other = copy.copy(self)
        other._graphdef = graphdef
        other._steps, other._decode_steps = {}, {}
        other._traced_halves, other._halves, other._encoders = {}, {}, {}
        return other

    def layout(self, bucket: Bucket) -> DPLayout:
        sizes = self._sizes
        has_states = sizes.state_group is not None
        return DPLayout(
            sizes.dp_size,
            bucket.rows,
            sizes.pages_per_row,
            len(sizes.groups),
            sizes.max_step_snapshots if has_states else None,
            sizes.max_draft_tokens,
        )

    def step(self, bucket: Bucket) -> StepProgram:
        """Return the step program of a bucket of padded sizes, compiled on the first call."""
        if bucket not in self._steps:
            program: Any = self.compile_step(bucket)
            self._steps[bucket] = program
        return self._steps[bucket]

    def compile_step(self, bucket: Bucket) -> jax.stages.Compiled:
        """Compile a bucket's step program without caching it, for inspection; needs no chips."""
        return self.lower_step(bucket).compile(compiler_options=self._compiler_options(bucket))

    def decode_steps(self, bucket: Bucket) -> StepProgram:
        """Return the program of several decode steps, compiled on the first call."""
        if bucket not in self._decode_steps:
            program: Any = self.compile_decode_steps(bucket)
            self._decode_steps[bucket] = program
        return self._decode_steps[bucket]

    def compile_decode_steps(self, bucket: Bucket) -> jax.stages.Compiled:
        """Compile a bucket's program of several decode steps without caching it; see
        `compile_step`."""
        lowered = self._lower(bucket, "decode_steps", run_decode_steps, _OUTPUT_SPEC)
        return lowered.compile(compiler_options=self._compiler_options(bucket))

    def halves(self, bucket: Bucket) -> tuple[StepProgram, StepProgram]:
        """Return the two programs of a bucket's masked step, compiled on the first call."""
        if bucket not in self._halves:
            if bucket not in self._traced_halves:
                self.trace_halves(bucket)
            options = self._compiler_options(bucket)
            traced = self._traced_halves.pop(bucket)
            programs: Any = tuple(half.compile(compiler_options=options) for half in traced)
            self._halves[bucket] = programs
        return self._halves[bucket]

    def trace_halves(self, bucket: Bucket) -> None:
        """Trace a masked step. `halves` then only compiles, which needs no interpreter lock."""

        def compute(model: CausalLM, state: StepState, _: jax.Array, given: RankStep) -> Any:
            return compute_step(model, state, given)

        first = self._lower(bucket, "compute", compute, _COMPUTED_SPECS)
        _, computed = first.out_info
        shapes: Any = [
            jax.tree.map(partial(self._on_mesh, spec=spec), part)
            for spec, part in zip(_COMPUTED_SPECS, computed, strict=True)
        ]
        layout = self.layout(bucket)
        num_rows, words = layout.page_tables_shape[0], mask_words(self._sizes.vocab_size)
        masks = self._input((num_rows, layout.max_drafts + 1, words))
        second = self._lower(bucket, "draw", draw_step, _OUTPUT_SPEC, Computed(*shapes), masks)
        self._traced_halves[bucket] = first, second

    def admit(self) -> AdmitProgram:
        """Return the program that writes one piece of admissions, compiled on the first call."""
        if self._admit is None:

            def admit(tables: DeviceRows, piece: jax.Array) -> DeviceRows:
                return write_piece(tables, piece[0])

            images, sizes = self._state.images, self._sizes
            tables: Any = DeviceRows(
                self._state.token_table,
                self._state.row_lens,
                self._row_params,
                images and images.lists,
            )
            shape = sizes.dp_size, piece_words(sizes.max_stop_ids, sizes.max_images)
            arguments = tables, self._input(shape)
            lowered = self._lower_on_mesh(admit, arguments, P("data"), donated=0)
            program: Any = lowered.compile()
            self._admit = program
        return self._admit

    def encode(self, num_tokens: int) -> EncodeProgram:
        """Return the program of the vision tower for an image of up to `num_tokens` tokens on each
        rank, compiled on the first call."""
        if num_tokens not in self._encoders:
            program: Any = self.lower_encode(num_tokens).compile()
            self._encoders[num_tokens] = program
        return self._encoders[num_tokens]

    def lower_encode(self, num_tokens: int) -> jax.stages.Lowered:
        """Lower the program of the tower for the mesh's chips, without compiling it."""

        def encode(
            weights: tuple[jax.Array, ...], vectors: jax.Array, patches: jax.Array, words: jax.Array
        ) -> jax.Array:
            model = nnx.merge(self._graphdef, jax.tree.unflatten(self._params_tree, weights))
            return write_vectors(model, vectors, patches[0], words[0])

        encode.__name__ = f"encode_{num_tokens}_tokens"
        sizes = self._sizes
        arguments = (
            self._weights,
            self._state.images.vectors,
            self._input((sizes.dp_size, num_tokens, sizes.image_token_values), jnp.uint8),
            self._input((sizes.dp_size, image_words(num_tokens))),
        )
        return self._lower_on_mesh(encode, arguments, P(MESH_AXES), donated=1)

    def compile_all(
        self,
        buckets: tuple[Bucket, ...],
        progress: Progress,
        more: Sequence[Callable[[], object]] = (),
    ) -> None:
        """Compile the steps of `buckets` and the program that admits rows, and call each of `more`,
        which compile others."""
        # XLA compiles without the interpreter lock; largest first balances the threads.
        with ThreadPoolExecutor(min(_MAX_COMPILE_THREADS, os.cpu_count() or 1)) as pool:
            steps: list[Callable[[], object]]
            steps = [partial(self.step, bucket) for bucket in reversed(buckets)]
            all_jobs = (*steps, *more, self.admit)
            jobs = [pool.submit(self._unless_closed, make) for make in all_jobs]
            with progress.phase("compiling", len(jobs), "programs") as phase:
                for job in as_completed(jobs):
                    job.result()
                    phase.advance()

    def close(self) -> None:
        """Start no further compilation in `compile_all`."""
        self._is_closed = True

    def _unless_closed(self, make: Callable[[], object]) -> None:
        if not self._is_closed:
            make()

    def lower_step(self, bucket: Bucket) -> jax.stages.Lowered:
        """Lower the program of one bucket for the mesh's chips, without compiling it."""
        return self._lower(bucket, "step", run_step, _OUTPUT_SPEC)

    def _lower(
        self, bucket: Bucket, name: str, run: Callable[..., Any], out_specs: Any, *rest: Any
    ) -> jax.stages.Lowered:
        """Lower a function of `step.py`; `rest` are its argument shapes after `RankStep`."""
        layout = self.layout(bucket)
        gathers = self._gathers_output and out_specs == _OUTPUT_SPEC
        out_specs = P() if gathers else out_specs

        def program(
            weights: tuple[jax.Array, ...],
            state: StepState,
            row_params: jax.Array,
            controls: jax.Array,
            page_tables: jax.Array,
            *rest: Any,
        ) -> Any:
            model = nnx.merge(self._graphdef, jax.tree.unflatten(self._params_tree, weights))
            given = RankStep(
                layout.unpack_controls(controls[0]),
                layout.split_groups(page_tables),
                bucket.tokens,
                self._sizes,
            )
            state, results = run(model, state, row_params, given, *rest)
            if gathers:
                results = jax.tree.map(
                    partial(lax.all_gather, axis_name=DATA_AXIS, tiled=True), results
                )
            return state, results

        program.__name__ = f"{name}_{bucket.rows}_rows_{bucket.tokens}_tokens"
        arguments = (
            self._weights,
            self._state,
            self._row_params,
            self._input((layout.dp_size, layout.control_words)),
            self._input(layout.page_tables_shape),
            *rest,
        )
        state_specs = jax.tree.map(_spec_of, self._state)
        return self._lower_on_mesh(program, arguments, (state_specs, out_specs), donated=1)

    def _lower_on_mesh(
        self, program: Callable[..., Any], arguments: Any, out_specs: Any, donated: int
    ) -> jax.stages.Lowered:
        sharded = jax.shard_map(
            program,
            mesh=self._mesh,
            in_specs=jax.tree.map(_spec_of, arguments),
            out_specs=out_specs,
            check_vma=False,  # jax cannot prove that a rank's chips agree
        )
        # In the mesh context, kernels see the target chip, even if it is absent.
        with jax.set_mesh(self._mesh), invariant_rows(self._row_blocks):
            return jax.jit(sharded, donate_argnums=donated).lower(*arguments)

    def _compiler_options(self, bucket: Bucket) -> dict[str, bool | str]:
        """Return XLA options that differ from the defaults.

        XLA's newer code generator for CPUs makes decode 20% faster and prefill 3%, and takes 3
        seconds per program instead of 2: only pure decode shapes use it, or all shapes if all
        must compute the same bits.
        """
        if platform_of(self._mesh) == "tpu":
            return self._tpu_options()
        on_cpu = platform_of(self._mesh) == "cpu"
        decode_tokens = bucket.rows * (1 + self._sizes.max_draft_tokens)
        if on_cpu and self._row_blocks is None and bucket.tokens > decode_tokens:
            return {"xla_cpu_use_fusion_emitters": False}
        return {}

    def _tpu_options(self) -> dict[str, bool | str]:
        """Return XLA options for TPUs; figures are in docs/measurements/planning.md.

        In loops, a TPU7x's compiler prefers bfloat16 in tiles of 16 rows, but arrays arrive in
        tiles of 8, so every step would begin with a copy of all layers' weights. With excess
        precision, a fusion omits the roundings within it, and shapes have different fusions.
        """
        options: dict[str, bool | str] = {}
        if self._mesh.devices.flat[0].device_kind == "TPU7x":
            options["xla_tpu_control_large_2nd_minor_layout_for_x16"] = False
        if self._row_blocks is not None:
            options["xla_allow_excess_precision"] = False
        return options

    def _on_mesh(self, leaf: Any, spec: P) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(self._mesh, spec)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    def _input(self, shape: tuple[int, ...], dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(self._mesh, P("data")))


def _spec_of(array: jax.ShapeDtypeStruct) -> P:
    sharding: Any = array.sharding
    spec: P = sharding.spec
    return spec
