"""The compiled programs of an engine: one per bucket, and the one that admits rows.

Owns tracing, sharding, donation and compilation. Programs are compiled ahead of their first use
and called directly, so that calling one can never compile.
"""

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from tqdm import tqdm

from sgl_jax.core.engine_sizes import EngineSizes
from sgl_jax.core.step_plan import mask_words
from sgl_jax.executor.buckets import Bucket
from sgl_jax.executor.devices import platform_of
from sgl_jax.executor.layout import DPLayout
from sgl_jax.executor.row_tables import PIECE_WORDS, TABLE_SPEC, RowTables, write_piece
from sgl_jax.executor.step import (
    Computed,
    RankStep,
    StepOutput,
    StepState,
    compute_step,
    draw_step,
    run_step,
)
from sgl_jax.layers.mesh_axes import TENSOR_AXIS
from sgl_jax.models.decoder import CausalLM

# weights, state (donated), row parameters, controls, page table -> state, output
StepProgram = Callable[
    [tuple[jax.Array, ...], StepState, jax.Array, Any, Any], tuple[StepState, StepOutput]
]
# The two halves of a step: the first as above, with a `Computed`; the second draws by masks:
# weights, state (donated), computed, row parameters, controls, page table, masks.
ComputeProgram = Callable[
    [tuple[jax.Array, ...], StepState, jax.Array, Any, Any], tuple[StepState, Computed]
]
DrawProgram = Callable[
    [tuple[jax.Array, ...], StepState, Computed, jax.Array, Any, Any, Any],
    tuple[StepState, StepOutput],
]
AdmitProgram = Callable[[RowTables, Any], RowTables]  # tables (donated), piece -> tables

_MAX_COMPILE_THREADS = 4
# Logits are split by the vocabulary; hidden states and queries are the same on a rank's chips.
_SPECS: tuple[Any, ...] = (P("data", TENSOR_AXIS), P("data"), P("data"))
_COMPUTED_SPECS: Any = Computed(*_SPECS)


class Programs:
    """Compiles and keeps the programs of one model on one mesh.

    Reads only shapes, dtypes and shardings of the arrays: `jax.ShapeDtypeStruct`s with shardings
    do as well.

    Args:
        graphdef: `nnx.merge(graphdef, params)` is the model.
        params: its weights, a tree of arrays that lie on the mesh as the model declares them.
        state: token table and pool.
        row_params: the parameter table.
        sizes: of the engine.
        mesh: ('data', 'tensor').
    """

    def __init__(
        self,
        graphdef: Any,
        params: Any,
        state: Any,
        row_params: Any,
        sizes: EngineSizes,
        mesh: Mesh,
    ) -> None:
        leaves, self._params_tree = jax.tree.flatten(params)
        self._graphdef = graphdef
        self._sizes = sizes
        self._mesh = mesh
        self._weights = tuple(_shape_of(leaf) for leaf in leaves)
        self._state = jax.tree.map(_shape_of, state)
        self._row_params: Any = _shape_of(row_params)
        self._steps: dict[Bucket, StepProgram] = {}
        self._traced_halves: dict[Bucket, tuple[jax.stages.Lowered, jax.stages.Lowered]] = {}
        self._halves: dict[Bucket, tuple[ComputeProgram, DrawProgram]] = {}
        self._admit: AdmitProgram | None = None

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
        """The program of one bucket, compiled now if it was not."""
        if bucket not in self._steps:
            program: Any = self.compile_step(bucket)
            self._steps[bucket] = program
        return self._steps[bucket]

    def compile_step(self, bucket: Bucket) -> jax.stages.Compiled:
        """The program of one bucket, compiled anew: for reading, where its chips are not here."""
        return self.lower_step(bucket).compile(compiler_options=self._compiler_options(bucket))

    def halves(self, bucket: Bucket) -> tuple[ComputeProgram, DrawProgram]:
        """The two programs of one bucket that draw by masks, compiled now if they were not."""
        if bucket not in self._halves:
            if bucket not in self._traced_halves:
                self.trace_halves(bucket)
            options = self._compiler_options(bucket)
            traced = self._traced_halves.pop(bucket)
            programs: Any = tuple(half.compile(compiler_options=options) for half in traced)
            self._halves[bucket] = programs
        return self._halves[bucket]

    def trace_halves(self, bucket: Bucket) -> None:
        """Leave to `halves` no more than to compile them, which takes no interpreter lock."""
        compute, computed = self._lower_compute(bucket)
        self._traced_halves[bucket] = compute, self._lower_draw(bucket, computed)

    def admit(self) -> AdmitProgram:
        """The program that writes one piece of admissions, compiled now if it was not."""
        if self._admit is None:
            self._admit = self._compile_admit()
        return self._admit

    def compile_all(self, buckets: tuple[Bucket, ...], *, masked: bool) -> None:
        """Compile everything, with a progress bar on stderr; without `masked`, the programs of
        masked steps are only traced."""
        halves = self.halves if masked else self.trace_halves
        # XLA compiles without the interpreter lock; the largest first, to end together.
        with ThreadPoolExecutor(min(_MAX_COMPILE_THREADS, os.cpu_count() or 1)) as pool:
            jobs: list[Future[Any]] = [
                pool.submit(make, bucket)
                for bucket in reversed(buckets)
                for make in (self.step, halves)
            ]
            jobs.append(pool.submit(self.admit))
            with tqdm(total=len(jobs), desc="Compiling", unit="program") as progress:
                for job in as_completed(jobs):
                    job.result()
                    progress.update()

    def lower_step(self, bucket: Bucket) -> jax.stages.Lowered:
        """The program of one bucket before compilation, for the mesh's chips."""

        def step(
            weights: tuple[jax.Array, ...],
            state: StepState,
            row_params: jax.Array,
            controls: jax.Array,
            page_tables: jax.Array,
        ) -> tuple[StepState, StepOutput]:
            given = self._given(bucket, controls, page_tables)
            return run_step(self._model(weights), state, row_params, given)

        step.__name__ = f"step_{_shape_name(bucket)}"
        state_specs = self._state_specs
        arguments = (self._weights, self._state, self._row_params, *self._step_inputs(bucket))
        in_specs = (self._weight_specs, state_specs, TABLE_SPEC, P("data"), P("data"))
        return self._lower(step, arguments, in_specs, (state_specs, P("data")), donated=(1,))

    def _lower_compute(self, bucket: Bucket) -> tuple[jax.stages.Lowered, Computed]:
        """The first half, and the shapes of its results, which the second half reads."""

        def compute(
            weights: tuple[jax.Array, ...],
            state: StepState,
            row_params: jax.Array,
            controls: jax.Array,
            page_tables: jax.Array,
        ) -> tuple[StepState, Computed]:
            given = self._given(bucket, controls, page_tables)
            return compute_step(self._model(weights), state, given)

        compute.__name__ = f"compute_{_shape_name(bucket)}"
        state_specs = self._state_specs
        arguments = (self._weights, self._state, self._row_params, *self._step_inputs(bucket))
        in_specs = (self._weight_specs, state_specs, TABLE_SPEC, P("data"), P("data"))
        lowered = self._lower(
            compute, arguments, in_specs, (state_specs, _COMPUTED_SPECS), donated=(1,)
        )
        _, computed = lowered.out_info
        shapes: Any = [
            jax.tree.map(partial(self._on_mesh, spec=spec), part)
            for spec, part in zip(_COMPUTED_SPECS, computed, strict=True)
        ]
        return lowered, Computed(*shapes)

    def _lower_draw(self, bucket: Bucket, computed: Computed) -> jax.stages.Lowered:

        def draw(
            weights: tuple[jax.Array, ...],
            state: StepState,
            computed: Computed,
            row_params: jax.Array,
            controls: jax.Array,
            page_tables: jax.Array,
            masks: jax.Array,
        ) -> tuple[StepState, StepOutput]:
            given = self._given(bucket, controls, page_tables)
            return draw_step(self._model(weights), state, computed, row_params, given, masks)

        draw.__name__ = f"draw_{_shape_name(bucket)}"
        state_specs, layout = self._state_specs, self.layout(bucket)
        words = mask_words(self._sizes.vocab_size)
        arguments = (
            self._weights,
            self._state,
            computed,
            self._row_params,
            *self._step_inputs(bucket),
            self._input((layout.dp_size * layout.rows_per_rank, layout.max_drafts + 1, words)),
        )
        tables = (TABLE_SPEC, P("data"), P("data"), P("data"))
        in_specs = (self._weight_specs, state_specs, _COMPUTED_SPECS, *tables)
        return self._lower(draw, arguments, in_specs, (state_specs, P("data")), donated=(1,))

    def _lower(
        self,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        in_specs: Any,
        out_specs: Any,
        donated: tuple[int, ...],
    ) -> jax.stages.Lowered:
        sharded = jax.shard_map(
            function,
            mesh=self._mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            check_vma=False,  # all chips of a rank compute the same tokens, unproven
        )
        # Under the mesh kernels see which chip they are traced for, there or not.
        with jax.set_mesh(self._mesh):
            return jax.jit(sharded, donate_argnums=donated).lower(*arguments)

    def _model(self, weights: tuple[jax.Array, ...]) -> CausalLM:
        params = jax.tree.unflatten(self._params_tree, weights)
        model: CausalLM = nnx.merge(self._graphdef, params)
        return model

    def _given(self, bucket: Bucket, controls: jax.Array, page_tables: jax.Array) -> RankStep:
        layout = self.layout(bucket)
        return RankStep(
            layout.unpack_controls(controls[0]),
            layout.split_groups(page_tables),
            bucket.tokens,
            self._sizes,
        )

    def _step_inputs(self, bucket: Bucket) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        """Controls and page tables."""
        layout = self.layout(bucket)
        controls = self._input((layout.dp_size, layout.control_words))
        return controls, self._input(layout.page_tables_shape)

    @property
    def _state_specs(self) -> Any:
        return jax.tree.map(lambda leaf: leaf.sharding.spec, self._state)

    @property
    def _weight_specs(self) -> tuple[P, ...]:
        return tuple(leaf.sharding.spec for leaf in self._weights)

    def _compile_admit(self) -> AdmitProgram:
        def admit(tables: RowTables, piece: jax.Array) -> RowTables:
            return write_piece(tables, piece[0])

        sharded = jax.shard_map(
            admit,
            mesh=self._mesh,
            in_specs=(TABLE_SPEC, P("data")),
            out_specs=TABLE_SPEC,
            check_vma=False,
        )
        tables: Any = RowTables(self._state.token_table, self._state.row_lens, self._row_params)
        piece = self._input((self._sizes.dp_size, PIECE_WORDS))
        program: AdmitProgram = jax.jit(sharded, donate_argnums=0).lower(tables, piece).compile()
        return program

    def _compiler_options(self, bucket: Bucket) -> dict[str, bool | str]:
        """XLA's options beside its defaults.

        XLA's newer code generator for CPUs makes decode 20% faster and prefill 3%, and takes
        3 seconds a program instead of 2: only shapes of decode alone use it.

        In loops a TPU7x's compiler prefers bfloat16 in tiles of 16 rows, where arrays arrive in
        tiles of 8, and so every step would begin with a copy of all layers' weights.
        """
        if self._mesh.devices.flat[0].device_kind == "TPU7x":
            return {"xla_tpu_control_large_2nd_minor_layout_for_x16": False}
        on_cpu = platform_of(self._mesh) == "cpu"
        decode_tokens = bucket.rows * (1 + self._sizes.max_draft_tokens)
        if on_cpu and bucket.tokens > decode_tokens:
            return {"xla_cpu_use_fusion_emitters": False}
        return {}

    def _on_mesh(self, leaf: Any, spec: P) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(self._mesh, spec)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    def _input(self, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=NamedSharding(self._mesh, P("data")))


def _shape_name(bucket: Bucket) -> str:
    return f"{bucket.rows}_rows_{bucket.tokens}_tokens"


def _shape_of(array: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
