#!/usr/bin/env python
"""Choose the attention kernels' block sizes for each chip from static cost, and print the tables.

    python -m benchmarks.kernels.tune [--kernel decode prefill] [--chips v5e v6e v5p tpu7x]

Decode: for rows of several lengths, a block takes the longest of its bundles, its bytes at the
chip's memory bandwidth, and half of the round-trip latency, as two blocks are in flight. The table
goes into `sgl_jax/kernels/attention/tpu/tuned.py`, with the model's cycles.

Prefill: the formula's sizes, with twice as many queries, and with twice as many heads; half of
either is slower (docs/inside/kernels.md), and so are twice as many keys. The cost is the bundles of
the loops over keys for rows of several lengths, with the blocks on the diagonal and the rest of a
row, per 10**9 operations after the causal mask. A choice replaces the formula's only if it is 2 %
better and compiles soon. Lines with sizes that differ from the formula's go into the same file,
each with bundles per 10**9 operations: of the loop without masks, of the rows, and of the rows with
the formula's sizes. All tried sizes are printed as comments.
"""

import argparse
import itertools
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.kernels.attention_kernels import CHUNK, CONTEXT, OPTIONS, ROWS, step_rows
from benchmarks.kernels.compiled_kernel import Kernel, Shape, compile_for, hot_loop, per
from benchmarks.kernels.schedule import Loop, Schedule
from sgl_jax.kernels.attention.batch import AttentionBatch
from sgl_jax.kernels.attention.tpu.decode import decode_attention
from sgl_jax.kernels.attention.tpu.prefill import prefill_attention
from sgl_jax.kernels.attention.tpu.tuned import (
    MAX_BLOCK_BYTES,
    DecodeBlocks,
    PrefillBlocks,
    Sizes,
    blocks_of,
    default_sizes,
)
from sgl_jax.planner.topology import CHIPS, Chip

HEAD_DIM, PAGE_SIZE, GROUP = 128, 128, 4
KV_HEADS = (1, 2, 4, 8)  # on a chip
ROW_LENGTHS = (200, 700, 1500, 4000)
LATENCY_S = 1e-6  # of a transfer, an assumption
CHUNKS = ((200, 0), (700, 0), (2048, 0), (200, 2048), (2048, 2048))  # of a row; and KV before
MAX_COMPILE_S = 10  # with the time to write schedules
MIN_GAIN = 0.02


def arguments(kv_heads: int, tokens: int) -> list[Shape]:
    """Return shapes of an attention kernel's arguments: queries, the cache, its layer, the rows."""
    pages = 1 + ROWS * CONTEXT // PAGE_SIZE
    cache = ((2, pages, 2 * kv_heads, PAGE_SIZE, HEAD_DIM), jnp.bfloat16)
    q = ((tokens, GROUP * kv_heads, HEAD_DIM), jnp.bfloat16)
    return [q, cache, ((), jnp.int32), *step_rows(PAGE_SIZE)]


def decode_kernel(kv_heads: int, blocks: DecodeBlocks) -> Kernel:
    def decode(q, cache, layer, *rows):
        batch = AttentionBatch.build(*rows, ROWS)
        return decode_attention(q, cache, layer, batch, OPTIONS, blocks=blocks)

    shapes = arguments(kv_heads, ROWS)
    return Kernel("decode", decode, shapes, 0, "KV token", per(1), "")


def row_cycles(
    schedule: Schedule, blocks: DecodeBlocks, length: int, bytes_: int, chip: Chip
) -> float:
    """Return estimated cycles of a row of `length` keys; K and V take `bytes_` bytes per key."""
    block = hot_loop(schedule).bundles
    part = max(
        (loop for loop in schedule.loops if loop.depth == 3), key=lambda loop: loop.units["MXU"]
    ).bundles
    row = max((loop for loop in schedule.loops if loop.depth == 1), key=lambda x: x.bundles).bundles
    whole, rest = divmod(length, blocks.block_keys)
    parts = -(-rest // blocks.part_keys)

    def at_least(bundles: float, keys: int) -> float:
        transfer = keys * bytes_ / chip.hbm_bytes_per_s * chip.clock_hz
        return max(bundles, transfer, (transfer + LATENCY_S * chip.clock_hz) / 2)

    return row + whole * at_least(block, blocks.block_keys) + at_least(parts * part, rest)


def best_blocks(chip_name: str, kv_heads: int) -> tuple[DecodeBlocks, float]:
    """Return the sizes with the fewest mean cycles per key over ROW_LENGTHS, and those cycles."""
    chip, bytes_ = CHIPS[chip_name], 2 * kv_heads * HEAD_DIM * 2
    found = []
    for block, part in itertools.product((512, 1024, 2048), (128, 256, 512)):
        blocks = DecodeBlocks(block, part)
        if block * bytes_ > MAX_BLOCK_BYTES:
            continue
        _, compiled = compile_for(chip_name, partial(decode_kernel, kv_heads, blocks))
        cycles = [
            row_cycles(compiled.schedule, blocks, length, bytes_, chip) / length
            for length in ROW_LENGTHS
        ]
        found.append((sum(cycles) / len(cycles), blocks))
    least, blocks = min(found)
    return blocks, least


def prefill_kernel(kv_heads: int, blocks: PrefillBlocks) -> Kernel:
    def prefill(q, cache, layer, *rows):
        batch = AttentionBatch.build(*rows, CHUNK)
        return prefill_attention(q, cache, layer, batch, OPTIONS, blocks=blocks)

    shapes = arguments(kv_heads, CHUNK)
    return Kernel("prefill", prefill, shapes, 0, "GFLOP", per(1), "")


def around_bundles(schedule: Schedule, loop: Loop, turns: int) -> int:
    """Return bundles per turn of the loop around `loop`; the compiler removes a single turn's."""
    if turns == 1:
        return 0
    before = schedule.loops[: schedule.loops.index(loop)]
    return next(outer for outer in reversed(before) if outer.depth == loop.depth - 1).bundles


class KeyLoops(NamedTuple):
    """Bundles of meeting a block of keys, or a part of one where masks are needed."""

    whole: int  # by a whole block of queries
    few: int  # by a few of them

    @classmethod
    def of(cls, schedule: Schedule, whole: Loop, turns: int, end: Loop | None) -> "KeyLoops":
        """Count the loop over heads `whole` and the loop for few queries between it and `end`."""
        index = schedule.loops.index(whole)
        stop = None if end is None else schedule.loops.index(end)
        few = max(schedule.loops[index + 1 : stop], key=lambda loop: loop.units["MXU"])
        around = around_bundles(schedule, whole, turns)
        return cls(turns * whole.bundles + around, turns * few.bundles + around)

    def cost(self, queries: int, blocks: PrefillBlocks) -> int:
        """Return the bundles for `queries` queries of a block."""
        if queries > blocks.queries // 2:
            return self.whole
        return -(-queries // blocks.few_queries) * self.few


def prefill_costs(schedule: Schedule, kv_heads: int, blocks: PrefillBlocks) -> tuple[float, float]:
    """Return bundles per GFLOP: of a block of keys that all queries see, and of CHUNKS together.

    In CHUNKS, each length has enough rows for the same number of tokens.
    """
    hot = hot_loop(schedule)
    with_masks = next(loop for loop in schedule.hot_loops if loop is not hot)
    clear = KeyLoops.of(schedule, hot, kv_heads // blocks.heads, with_masks)
    masked = KeyLoops.of(schedule, with_masks, kv_heads // blocks.masked_heads(kv_heads), None)
    gflop = 4 * kv_heads * GROUP * HEAD_DIM / 1e9  # of a query and a key
    bundles = pairs = 0.0
    for tokens, before in CHUNKS:
        num_rows = CHUNK / tokens
        pairs += num_rows * sum(range(before + 1, before + tokens + 1))
        for done in range(0, tokens, blocks.queries):
            queries, position = min(blocks.queries, tokens - done), before + done
            num_clear = (position + 1) // blocks.keys
            seen = position + queries - num_clear * blocks.keys
            num_parts = -(-seen // blocks.part_keys)
            bundles += num_rows * num_clear * clear.cost(queries, blocks)
            bundles += num_rows * num_parts * masked.cost(queries, blocks)
    return clear.whole / (blocks.queries * blocks.keys * gflop), bundles / (pairs * gflop)


def prefill_candidates(kv_heads: int) -> list[Sizes]:
    """Return the formula's sizes, and those with twice the queries or twice the heads."""
    formula = default_sizes(kv_heads, HEAD_DIM, jnp.dtype(jnp.bfloat16))
    tried = (
        formula,
        formula._replace(rows=2 * formula.rows),
        formula._replace(heads=2 * formula.heads),
    )
    return [sizes for sizes in tried if kv_heads % sizes.heads == 0]


def best_prefill(chip_name: str, kv_heads: int) -> str:
    found: list[tuple[float, float, Sizes]] = []
    for sizes in prefill_candidates(kv_heads):
        blocks = blocks_of(sizes, GROUP, PAGE_SIZE, CHUNK)
        try:
            _, compiled = compile_for(chip_name, partial(prefill_kernel, kv_heads, blocks))
        except jax.errors.JaxRuntimeError as error:  # vector memory does not suffice
            print(f"    # {sizes}: {str(error).splitlines()[0]}", flush=True)
            continue
        hot, rows = prefill_costs(compiled.schedule, kv_heads, blocks)
        print(f"    # {sizes}: {hot:,.0f}, {rows:,.0f}, {compiled.compile_s:.1f} s", flush=True)
        if compiled.compile_s < MAX_COMPILE_S or not found:
            found.append((rows, hot, sizes))
    formula = found[0]
    best = min(found)
    if best[0] > (1 - MIN_GAIN) * formula[0]:
        best = formula
    rows, hot, sizes = best
    return f"Sizes{tuple(sizes)},  # {hot:,.0f}, {rows:,.0f} ({formula[0]:,.0f})"


def best_decode(chip_name: str, kv_heads: int) -> str:
    blocks, cycles = best_blocks(chip_name, kv_heads)
    return f"DecodeBlocks({blocks.block_keys}, {blocks.part_keys}),  # {cycles:.2f}"


BEST = {"decode": best_decode, "prefill": best_prefill}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kernel", nargs="+", choices=BEST, default=list(BEST))
    parser.add_argument("--chips", nargs="+", choices=CHIPS, default=list(CHIPS))
    parser.add_argument("--kv-heads", nargs="+", type=int, default=KV_HEADS, help="on a chip")
    arguments = parser.parse_args()
    for kernel, chip, kv_heads in itertools.product(
        arguments.kernel, arguments.chips, arguments.kv_heads
    ):
        line = BEST[kernel](chip, kv_heads)
        print(f'    ("{CHIPS[chip].device_kind}", {kv_heads}): {line}', flush=True)


if __name__ == "__main__":
    main()
