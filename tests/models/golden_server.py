"""A model on a mesh, served by hand: the steps that a test wants, and nothing of the scheduler."""

from itertools import chain
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from sgl_jax.checkpoint.loading import detect_format, load_params
from sgl_jax.checkpoint.stored_head import with_stored_head
from sgl_jax.core.server_args import ServerArgs
from sgl_jax.executor.engine_config import EngineConfig
from sgl_jax.kernels.attention.batch import AttentionBatch
from sgl_jax.kernels.gated_delta.batch import StateBatch
from sgl_jax.layers.mesh_axes import join_shares
from sgl_jax.mem_cache.device_pool import (
    STATE_POOL_SPECS,
    LayerStates,
    StatePoolLayout,
    make_zeros,
    state_pool_shapes,
)
from sgl_jax.models.config import ModelConfig
from sgl_jax.models.placement import place_model

GOLDEN = Path(__file__).parents[1] / "golden"
CACHE_SPEC = P(None, "data", "tensor", None, None)
TOLERANCE = 1e-4
MAX_SNAPSHOTS = 4
# The null slot, the snapshots, two slots of each of three requests, and one of padding rows.
FIRST_OWN_SLOT = 1 + MAX_SNAPSHOTS
NUM_SLOTS = FIRST_OWN_SLOT + 2 * 3 + 1


class Chunk(NamedTuple):
    """One row of a step: which request, and which of its tokens."""

    request: int
    start: int
    tokens: np.ndarray
    source: int | None = None  # the snapshot that it starts from, in place of the row's own state
    keeps: tuple[tuple[int, int], ...] = ()  # after so many tokens the state goes to that snapshot


class Server:
    """A model on a mesh, its cache, and pages assigned in random order; one request per row."""

    def __init__(
        self,
        folder,
        *,
        dp=1,
        tp=1,
        ep=1,
        copies=0,
        page_size=16,
        weight_sharding="replicated",
        attention_backend="auto",
        unrolled_layers=None,
        sequence_parallel=False,
        max_len=80,
        compiler_options=None,
    ):
        self._compiler_options = compiler_options
        devices = np.array(jax.devices()[: dp * tp]).reshape(dp, tp)
        self.mesh = Mesh(devices, ("data", "tensor"))
        load_format = detect_format(folder)
        config = with_stored_head(ModelConfig.from_path(folder), folder, load_format)
        args = ServerArgs(
            dp_size=dp,
            tp_size=tp,
            ep_size=ep,
            ep_num_redundant_experts=copies,
            page_size=page_size,
            weight_sharding=weight_sharding,
            attention_backend=attention_backend,
        )
        resolved = EngineConfig.resolve(args, config, "cpu")
        options = resolved.build_options
        if unrolled_layers is not None:  # as on TPUs that share a rank
            options = options._replace(
                separates_layers=False, unrolled_layers=unrolled_layers, defers_sum=True
            )
        options = options._replace(sequence_parallel=sequence_parallel)
        placed = place_model(config, self.mesh, options)
        self.graphdef = placed.graphdef
        self.params = load_params(placed, folder, load_format)
        self.dp, self.page_size, self.pages_per_row = dp, page_size, -(-max_len // page_size)
        groups = [group for group in config.cache_groups() if not group.is_recurrent]
        num_pages = 1 + len(groups) * 3 * self.pages_per_row
        layers = {group.pool: len(group.layers) for group in groups}
        self.pools = self._make_pools(
            [
                (layers[pool], dp * num_pages, *layout.page_shape)
                for pool, layout in enumerate(resolved.pool_layouts)
            ]
        )
        pages = 1 + np.random.default_rng(0).permutation(num_pages - 1)
        # Of each request and group: those of a group follow those of another in a row's table.
        self.pages = pages.reshape(3, len(groups), self.pages_per_row).astype(np.int32)
        self.num_groups = len(groups)
        self.states = None if config.recurrence is None else self._make_states(config)
        # The slot of each request's state after its last step, of the two that it has.
        self.slots = {}

    def _make_pools(self, shapes):
        """NaN in every slot that was never written: reading one would show."""
        sharding = NamedSharding(self.mesh, CACHE_SPEC)
        return tuple(jax.device_put(jnp.full(shape, jnp.nan), sharding) for shape in shapes)

    def _make_states(self, config):
        """NaN in every slot but the null slot."""
        dtype = jnp.dtype("float32")
        num_layers = sum(spec.recurrence is not None for spec in config.layers)
        layout = StatePoolLayout(num_layers, config.recurrence, dtype, dtype)
        pools = make_zeros(state_pool_shapes(layout, NUM_SLOTS, self.mesh))
        is_null = (jnp.arange(self.dp * NUM_SLOTS) % NUM_SLOTS == 0)[:, None, None]
        return LayerStates(
            jnp.where(is_null, pools.conv, jnp.nan),
            jnp.where(is_null[..., None], pools.recurrent, jnp.nan),
        )

    def _next_slots(self, chunk):
        """Where the state before the chunk is, and where that after it will be."""
        own = [FIRST_OWN_SLOT + 2 * chunk.request + half for half in range(2)]
        before = self.slots.get(chunk.request, own[1])
        after = own[0] if before == own[1] else own[1]
        if chunk.source is not None:
            return chunk.source, after
        return before if chunk.start else 0, after

    def step(self, ranks, num_decode, num_tokens=64):
        """Run one step; ranks[r] lists rank r's chunks. Returns logits per rank, [tokens, V]."""
        rows = 4
        tokens = np.zeros((self.dp, num_tokens), np.int32)
        tables = np.zeros((self.dp, self.num_groups, rows, self.pages_per_row), np.int32)
        starts, lens = np.zeros((2, self.dp, rows), np.int32)
        slots = np.full((self.dp, 2, rows), NUM_SLOTS - 1, np.int32)
        kept = np.zeros((self.dp, MAX_SNAPSHOTS, 3), np.int32)
        for rank, chunks in enumerate(ranks):
            flat = np.concatenate([chunk.tokens for chunk in chunks])
            tokens[rank, : len(flat)] = flat
            for row, chunk in enumerate(chunks):
                tables[rank, :, row] = self.pages[chunk.request]
                starts[rank, row], lens[rank, row] = chunk.start, len(chunk.tokens)
                slots[rank, :, row] = self._next_slots(chunk)
            keeps = [(row, *own) for row, chunk in enumerate(chunks) for own in chunk.keeps]
            kept[rank, : len(keeps)] = np.array(keeps, np.int32).reshape(-1, 3)
        self.slots |= {chunk.request: self._next_slots(chunk)[1] for chunk in chain(*ranks)}
        decode = np.full(self.dp, num_decode, np.int32)
        logits, self.pools, self.states = self._run()(
            *(self.params, self.pools, self.states),
            *(tokens, tables, slots, kept, starts, lens, decode),
        )
        counts = [sum(len(chunk.tokens) for chunk in chunks) for chunks in ranks]
        return [np.asarray(logits)[rank, :count] for rank, count in enumerate(counts)]

    def _run(self):
        if not hasattr(self, "_compiled"):
            specs = jax.tree.map(lambda array: array.sharding.spec, self.params)
            arrays = (P("data"),) * 7
            state_specs = None if self.states is None else STATE_POOL_SPECS
            memory_specs = ((CACHE_SPEC,) * len(self.pools), state_specs)
            self._compiled = jax.jit(
                jax.shard_map(
                    self._step,
                    mesh=self.mesh,
                    in_specs=(specs, *memory_specs, *arrays),
                    out_specs=(P("data"), *memory_specs),
                    check_vma=False,
                ),
                donate_argnums=(1, 2),
                compiler_options=self._compiler_options,
            )
        return self._compiled

    def _step(self, params, pools, states, tokens, tables, slots, kept, starts, lens, num_decode):
        model = nnx.merge(self.graphdef, params)
        rows = (starts[0], lens[0], num_decode[0])
        batches = [AttentionBatch.build(table, *rows, tokens.shape[1]) for table in tables[0]]
        state_batch = None
        if states is not None:
            state_batch = StateBatch.build(*slots[0], kept[0], *rows, tokens.shape[1])  # type: ignore[call-arg]
        hidden, pools, states, *_ = model(tokens[0], batches, pools, state_batch, states)
        logits = join_shares(model.logits(hidden).whole_rows(), tokens.shape[1])
        return logits[None], pools, states


def golden(family, name="golden"):
    return np.load(GOLDEN / family / f"{name}.npz")


def assert_close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE)
