#!/usr/bin/env python
"""The cost of decode with an indexer on TPU, next to dense decode; needs no TPU.

    python -m benchmarks.kernels.chosen_cost [--chips v6e tpu7x] [--contexts 4096 32768 131072]
        [--rows 64] [--tp 8] [--heads 128] [--index-heads 64] [--json FILE]

A layer of DeepSeek-V3.2 (`--heads 64 --index-heads 32`: of GLM-5) in a step of decode rows that all
have the context. The chips of a rank share the rows: each chooses for its rows and attends to the
chosen tokens with all heads. Dense decode reads all rows, with its share of the heads.

The TPU compiler compiles both. Kernels, and the gather of chosen rows, take the longer of their
bundles, one per cycle, and their bytes; the other operations take the cycles that the compiler
estimates; the exchange of queries and results is two all-to-alls over the rank's ring. Absorbed
queries and values of results, the same in both, are left out. Prints microseconds of a layer, and
of a layer that reuses an earlier choice, and the share of dense decode's bytes.
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

# Before jax: it has the compiler write its schedules.
from benchmarks.kernels.compiled_kernel import Schedules, compile_schedules  # isort: skip
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.kernels.latent_kernels import DTYPE, PAGE_SIZE, RANK, ROPE_DIM, our_decode_cost
from benchmarks.kernels.schedule import Schedule
from sgl_jax.kernels.attention.batch import AttentionBatch
from sgl_jax.kernels.latent_attention.chosen import Chooser, ChosenLatents
from sgl_jax.kernels.latent_attention.index_scores import BLOCK_KEYS
from sgl_jax.kernels.latent_attention.latents import IndexQueries, latent_row_size
from sgl_jax.kernels.latent_attention.tpu import CHOICE
from sgl_jax.kernels.tpu_chip import LANES
from sgl_jax.planner.program_cost import Collective, dearest_cycles
from sgl_jax.planner.step_time import collective_time
from sgl_jax.planner.topology import CHIPS, Chip, Topology, topology_mesh

KEY_DIM, TOP_K = 128, 2048
ROW_BYTES = 2 * latent_row_size(RANK, ROPE_DIM, KEY_DIM)
DIGITS = 16  # of a score, each found by a pass over all scores
GATHER = "gather_fusion"


class Load(NamedTuple):
    """A step of one rank."""

    rows: int
    tp: int
    heads: int
    index_heads: int
    context: int

    @property
    def own_rows(self) -> int:
        return -(-self.rows // self.tp)


class Cost(NamedTuple):
    """Microseconds of a layer on one chip, and bytes that it reads."""

    scores: float
    choice: float
    gather: float
    attend: float
    other: float
    exchange: float
    dense: float
    sparse_bytes: float
    dense_bytes: float

    @property
    def sparse(self) -> float:
        return self.scores + self.choice + self.reusing

    @property
    def reusing(self) -> float:
        return self.gather + self.attend + self.other + self.exchange


def compile_decode(chip: str, load: Load) -> Schedules:
    """Compile the choice and attention of one chip's rows, with all heads."""
    mesh = topology_mesh(Topology.all_of(chip)[0], 1, 1)
    whole = NamedSharding(mesh, PartitionSpec())
    rows, pages = load.own_rows, load.context // PAGE_SIZE

    def struct(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=whole)

    def decode(q, index, cache, layer, table, *lens):
        # Only decode rows, so that no other loop counts.
        batch = AttentionBatch.build(table, *lens, jnp.int32(rows), rows)
        chooser = Chooser(IndexQueries(*index, TOP_K), cache, layer, batch, CHOICE)
        attend = ChosenLatents(RANK, cache, layer, batch, 0.1, CHOICE)
        every = jnp.int32(0), jnp.int32(rows)
        return attend(q, batch.token_rows, chooser.of_decode_rows(), *every)

    row = struct(jnp.int32, rows)
    arguments = (
        struct(DTYPE, rows, load.heads, latent_row_size(RANK, ROPE_DIM)),
        (
            struct(DTYPE, rows, load.index_heads, KEY_DIM),
            struct(jnp.float32, rows, load.index_heads),
            struct(DTYPE, rows, KEY_DIM),
        ),
        struct(DTYPE, 2, 1 + rows * pages, 1, PAGE_SIZE, ROW_BYTES // 2),
        struct(jnp.int32),
        struct(jnp.int32, rows, pages),
        *(row, row),
    )
    with jax.set_mesh(mesh):
        return compile_schedules(jax.jit(decode).lower(*arguments))


def measure(chip_name: str, load: Load) -> Cost:
    chip, compiled = CHIPS[chip_name], compile_decode(chip_name, load)
    own = {schedule.kernel: schedule for schedule in compiled.schedules}
    rows, context = load.own_rows, load.context
    turns = -(-rows // 8)
    key_bytes = rows * context * 2 * KEY_DIM
    chosen_bytes = rows * TOP_K * ROW_BYTES
    gathers = (each for each in compiled.schedules if each.kernel.startswith(GATHER))
    # The others gather numbers, not rows.
    loop = max((loop for each in gathers for loop in each.loops), key=lambda loop: loop.dmas)
    per_row = loop.bundles / loop.dmas
    cycles = dearest_cycles(compiled.program) * turns
    dense_bytes = load.rows * context * ROW_BYTES
    dense = our_decode_cost(chip_name, load.heads // load.tp).per_token(context)
    attend = our_decode_cost(chip_name, load.heads).per_token(TOP_K)
    return Cost(
        scores=longer(chip, rows * score_bundles(own["index_scores"], context), key_bytes),
        choice=longer(chip, rows * choice_bundles(own["greatest_scores"], context), 0),
        gather=longer(chip, rows * TOP_K * per_row, chosen_bytes),
        attend=longer(chip, rows * TOP_K * attend, chosen_bytes),
        other=cycles / chip.clock_hz * 1e6,
        exchange=exchange(chip, load),
        dense=longer(chip, load.rows * context * dense, dense_bytes),
        sparse_bytes=key_bytes + chosen_bytes,
        dense_bytes=dense_bytes,
    )


def longer(chip: Chip, bundles: float, num_bytes: float) -> float:
    return max(bundles / chip.clock_hz, num_bytes / chip.hbm_bytes_per_s) * 1e6


def score_bundles(schedule: Schedule, context: int) -> float:
    """Return the bundles of a row: blocks of keys, and for each page a start and a wait."""
    blocks = [loop.bundles for loop in schedule.loops if loop.depth == 2]
    pages = [loop.bundles for loop in schedule.loops if loop.depth == 3]
    return context / BLOCK_KEYS * sum(blocks) + context / PAGE_SIZE * sum(pages)


def choice_bundles(schedule: Schedule, context: int) -> float:
    """Return the bundles of a row: passes over its scores, and the places of each group."""
    groups = max(1, context // LANES**2)
    bundles, passed = 0.0, 0
    for loop in schedule.loops:
        times = 1.0
        if loop.depth > 1:
            is_digit = groups == 1 or passed == 1
            times = DIGITS if is_digit else DIGITS * groups if loop.depth == 3 else groups
            passed += loop.depth == 2
        bundles += times * loop.bundles
    return bundles


def exchange(chip: Chip, load: Load) -> float:
    """Return microseconds to send queries to the chips of their rows, and results back."""
    if load.tp == 1:
        return 0.0
    seconds = 0.0
    for size in (latent_row_size(RANK, ROPE_DIM), RANK):
        num_bytes = load.rows * load.heads // load.tp * size * 2
        kind = ("all-to-all", "", num_bytes, load.tp, 1, True)
        seconds += collective_time(Collective(*kind), chip)
    return seconds * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chips", nargs="+", choices=CHIPS, default=["v6e", "tpu7x"])
    parser.add_argument("--contexts", nargs="+", type=int, default=[4096, 32768, 131072])
    parser.add_argument("--rows", type=int, default=64, help="of a rank")
    parser.add_argument("--tp", type=int, default=8, help="chips of a rank")
    parser.add_argument("--heads", type=int, default=128, help="of the rank")
    parser.add_argument("--index-heads", type=int, default=64)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    names = ("scores", "choice", "gather", "attend", "other", "exchange")
    print(f"| chip | context | {' | '.join(names)} | sparse | reusing | dense | bytes |")
    print("|---" * (len(names) + 6) + "|")
    found = []
    for chip in options.chips:
        for context in options.contexts:
            sizes = options.rows, options.tp, options.heads, options.index_heads, context
            cost = measure(chip, Load(*sizes))
            found.append({"chip": chip, "context": context, **cost._asdict()})
            parts = [getattr(cost, name) for name in names]
            parts += [cost.sparse, cost.reusing, cost.dense]
            numbers = " | ".join(f"{part:.0f}" for part in parts)
            share = math.floor(1000 * cost.sparse_bytes / cost.dense_bytes + 0.5) / 1000
            print(f"| {chip} | {context:,} | {numbers} | {share} |", flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
