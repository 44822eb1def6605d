"""Latent attention kernels for DeepSeek-V3: of this package, and of other engines' checkouts.

A latent of 512 numbers and 64 rotated numbers for all heads, bfloat16, pages of 128 tokens.
"""

import importlib.util
import logging
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

# Before jax: it has the compiler write its schedules.
from benchmarks.kernels.compiled_kernel import (  # isort: skip
    Kernel,
    Shape,
    compile_for,
    compile_schedules,
    hot_loop,
    per,
)
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.kernels.schedule import Loop, Schedule
from sgl_jax.kernels.attention.batch import AttentionBatch, ScoreOptions
from sgl_jax.kernels.attention.tpu.decode import decode_attention
from sgl_jax.kernels.attention.tpu.prefill import prefill_attention
from sgl_jax.kernels.attention.tpu.shared import CacheSlots, Expansion
from sgl_jax.kernels.attention.tpu.tuned import PrefillBlocks
from sgl_jax.kernels.latent_attention.latents import latent_row_size
from sgl_jax.kernels.latent_attention.tpu import (
    DECODE_BLOCKS,
    EXPANDED_HEADS,
    expanded_prefill_blocks,
    latent_prefill_blocks,
    latent_slots,
)
from sgl_jax.planner.topology import Topology, topology_mesh

RANK, ROPE_DIM, NOPE_DIM, VALUE_DIM = 512, 64, 128, 128
PAGE_SIZE, DTYPE = 128, jnp.bfloat16
ROW_SIZE = latent_row_size(RANK, ROPE_DIM)
ROWS, CONTEXT, CHUNK = 64, 4096, 2048
OPTIONS, SLOTS = ScoreOptions(192**-0.5), latent_slots(RANK)
# Keys and rows that other engines' kernels take at once: the most that their tables have.
PEER_PAGES, PEER_ROWS = 16, 2


class DecodeCost(NamedTuple):
    """Bundles of decode, without branches that few rows take."""

    row: float  # once a row
    block_keys: int
    block: int  # for a block of keys
    part_keys: int  # of a block that a row ends in
    part: int
    hot: Loop

    @property
    def per_key(self) -> float:
        return self.block / self.block_keys

    def per_token(self, context: int) -> float:
        """Return bundles per token of a row, averaged over rows of different lengths.

        The rows end at every place of the block of keys before `context`.
        """
        lengths = range(context - self.block_keys + 1, context + 1)
        found = []
        for length in lengths:
            blocks, rest = divmod(length, self.block_keys)
            bundles = self.row + blocks * self.block + -(-rest // self.part_keys) * self.part
            found.append(bundles / length)
        return sum(found) / len(found)


def step_arguments(heads: int, tokens: int) -> list[Shape]:
    """Return shapes of absorbed queries of `tokens`, the cache, its layer, and the rows."""
    rows, pages = ((ROWS,), jnp.int32), CONTEXT // PAGE_SIZE
    return [
        ((tokens, heads, ROW_SIZE), DTYPE),
        ((2, 1 + ROWS * pages, 1, PAGE_SIZE, ROW_SIZE), DTYPE),
        ((), jnp.int32),
        *[((ROWS, pages), jnp.int32), rows, rows, ((), jnp.int32)],
    ]


def our_decode(heads: int) -> Kernel:
    def decode(q, cache, layer, *rows):
        batch = AttentionBatch.build(*rows, ROWS)
        return decode_attention(q, cache, layer, batch, OPTIONS, slots=SLOTS, blocks=DECODE_BLOCKS)

    return Kernel(
        f"latent decode, {heads} heads",
        decode,
        step_arguments(heads, ROWS),
        0,
        "KV token",
        per(DECODE_BLOCKS.block_keys),
        f"{PAGE_SIZE * ROW_SIZE * 2 // 1024} KiB",
    )


def our_decode_cost(chip: str, heads: int) -> DecodeCost:
    _, compiled = compile_for(chip, lambda: our_decode(heads))
    row, block, part = (
        max((loop for loop in compiled.schedule.loops if loop.depth == depth), key=_bundles)
        for depth in (1, 2, 3)
    )
    keys, part_keys = DECODE_BLOCKS
    return DecodeCost(row.bundles, keys, block.bundles, part_keys, part.bundles, block)


class PrefillForm(NamedTuple):
    """A form of prefill for the heads of a chip."""

    heads: int  # of one call
    calls: int
    blocks: PrefillBlocks
    expanded: bool

    @classmethod
    def absorbed(cls, heads: int) -> "PrefillForm":
        blocks = latent_prefill_blocks(heads, PAGE_SIZE, jnp.dtype(DTYPE), CHUNK)
        return cls(heads, 1, blocks, expanded=False)

    @classmethod
    def of_expanded(cls, heads: int) -> "PrefillForm":
        blocks = expanded_prefill_blocks(EXPANDED_HEADS, PAGE_SIZE, CHUNK)
        return cls(EXPANDED_HEADS, heads // EXPANDED_HEADS, blocks, expanded=True)

    def kernel(self) -> Kernel:
        slots = CacheSlots(packed=True, value_dim=VALUE_DIM) if self.expanded else SLOTS

        def prefill(q, cache, layer, keys, values, *rows):
            return prefill_attention(
                q,
                cache,
                layer,
                AttentionBatch.build(*rows, CHUNK),
                OPTIONS,
                slots=slots,
                blocks=self.blocks,
                expansion=Expansion(keys, values) if self.expanded else None,
            )

        _, *others = step_arguments(self.heads, CHUNK)
        width = NOPE_DIM + ROW_SIZE - RANK if self.expanded else ROW_SIZE
        matrices = ((self.heads, NOPE_DIM, RANK), DTYPE), ((self.heads, RANK, VALUE_DIM), DTYPE)
        shapes = [((CHUNK, self.heads, width), DTYPE), *others[:2], *matrices, *others[2:]]
        return Kernel("latent prefill", prefill, shapes, 0, "KV token", per(1), "")

    def chunk_bundles(self, schedule: Schedule, context: int) -> float:
        """Return bundles of the loops over keys for a chunk that ends at `context`, per 10**9
        operations of absorbed heads that causality leaves."""
        blocks, clear = self.blocks, hot_loop(schedule)
        masked = next(loop for loop in schedule.hot_loops if loop is not clear)
        turns = blocks.parts // blocks.heads
        masked_turns = blocks.parts // blocks.masked_heads(blocks.parts)
        bundles = 0
        for position in range(context - CHUNK, context, blocks.queries):
            blocks_seen = (position + 1) // blocks.keys
            rest = position + blocks.queries - blocks_seen * blocks.keys
            bundles += blocks_seen * turns * clear.bundles
            bundles += -(-rest // blocks.part_keys) * masked_turns * masked.bundles
        pairs = sum(range(context - CHUNK + 1, context + 1))
        return bundles / (2 * pairs * self.heads * (RANK + ROPE_DIM + RANK) / 1e9)


def _bundles(loop: Loop) -> int:
    return loop.bundles


class Peer(NamedTuple):
    """Another engine's latent attention: writes, decodes and prefills in one call."""

    name: str
    load: Callable[[Path], Callable[..., Any]]
    heads_first: bool  # of the part of queries without a position
    has_kv_offsets: bool


def peer_decode_cost(peer: Peer, checkout: Path, chip: str, heads: int) -> DecodeCost:
    """Return the cost of the kernel that decodes `PEER_ROWS` rows at once."""
    attend, mesh = peer.load(checkout), topology_mesh(Topology.all_of(chip)[0], 1, 1)
    pages = ROWS * CONTEXT // PAGE_SIZE
    nope = (heads, ROWS, RANK) if peer.heads_first else (ROWS, heads, RANK)
    offsets, rows = ((ROWS + 1,), jnp.int32), ((ROWS,), jnp.int32)
    shapes: list[Shape] = [
        *((shape, DTYPE) for shape in (nope, (ROWS, heads, ROPE_DIM), (ROWS, RANK))),
        *[((ROWS, ROPE_DIM), DTYPE), ((1 + pages, PAGE_SIZE // 2, 2, ROW_SIZE), DTYPE)],
        *[rows, ((pages,), jnp.int32), offsets, *[offsets] * peer.has_kv_offsets],
        ((3,), jnp.int32),
    ]

    def decode(*arrays):
        return attend(
            *arrays,
            sm_scale=OPTIONS.scale,
            num_kv_pages_per_block=PEER_PAGES,
            num_queries_per_block=1,
            decode_batch_size=PEER_ROWS,
            vmem_limit_bytes=(100 if chip in ("v5e", "v6e") else 60) << 20,
        )

    whole = NamedSharding(mesh, PartitionSpec())
    with jax.set_mesh(mesh):
        structs = [jax.ShapeDtypeStruct(s, dtype, sharding=whole) for s, dtype in shapes]
        lowered = jax.jit(decode).lower(*structs)
    schedule = _batched(compile_schedules(lowered).schedules)
    hot, keys = hot_loop(schedule), PEER_PAGES * PAGE_SIZE
    row = max((loop for loop in schedule.loops if loop.depth == hot.depth - 1), key=_bundles)
    # A block of each row; a row's last block is computed on whole.
    block = hot.bundles // PEER_ROWS
    return DecodeCost(row.bundles / PEER_ROWS, keys, block, keys, block, hot)


def _batched(schedules: list[Schedule]) -> Schedule:
    """Return the schedule for `PEER_ROWS` rows, with which both engines' kernel names end."""
    return next(each for each in schedules if each.kernel == f"bsz_{PEER_ROWS}")


def _load_sglang_jax(checkout: Path) -> Callable[..., Any]:
    """Load the module without its package, whose name is our package's."""
    path = checkout / "python/sgl_jax/srt/kernels/mla/v2/kernel.py"
    spec = importlib.util.spec_from_file_location("sglang_jax_latent_attention", path)
    assert spec is not None
    assert spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    attend: Callable[..., Any] = module.mla_ragged_paged_attention
    return attend


def _load_tpu_inference(checkout: Path) -> Callable[..., Any]:
    """Load the kernel without the package's imports, which need vLLM."""

    def refuse(*_: Any, **__: Any) -> None:
        raise ValueError("XLA transposes queries here")

    def stand_in(name: str, **members: Any) -> types.ModuleType:
        module = types.ModuleType(name)
        vars(module).update(members)
        sys.modules[name] = module
        return module

    package = stand_in("tpu_inference", __path__=[str(checkout / "tpu_inference")])
    vars(package)["envs"] = stand_in("tpu_inference.envs", MLA_XPOSE_N_TILE_SIZE=160)
    stand_in("tpu_inference.logger", init_logger=logging.getLogger)
    stand_in("tpu_inference.kernels.mla.v2.transpose", xpose_pipeline=refuse)
    logging.getLogger("tpu_inference").setLevel(logging.ERROR)
    kernel = importlib.import_module("tpu_inference.kernels.mla.v2.kernel")
    attend: Callable[..., Any] = kernel.mla_ragged_paged_attention
    return attend


PEERS = {
    "sglang-jax": Peer("sglang-jax", _load_sglang_jax, heads_first=False, has_kv_offsets=True),
    "tpu-inference": Peer(
        "tpu-inference", _load_tpu_inference, heads_first=True, has_kv_offsets=False
    ),
}
