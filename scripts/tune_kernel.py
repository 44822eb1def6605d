#!/usr/bin/env python
"""Choose the decode kernel's block sizes for each chip from static cost, and print the table.

    python scripts/tune_kernel.py [--chips v5e v6e v5p tpu7x]

For rows of several lengths, a block takes the longest of: its bundles; its bytes at the chip's
memory bandwidth; and half of the way there and back, as two blocks are in flight. What is printed
goes into `sgl_jax/kernels/ragged_paged_attention/block_sizes.py`, beside the model's cycles.
"""

import argparse
import itertools

import jax.numpy as jnp
import kernel_cost
from kernel_cost import Kernel, compile_for, hot_loop, step_rows

from sgl_jax.aot.chips import CHIPS, Chip
from sgl_jax.bench.kernel_schedule import Schedule
from sgl_jax.kernels.ragged_paged_attention.batch import AttentionBatch
from sgl_jax.kernels.ragged_paged_attention.block_sizes import MAX_BLOCK_BYTES, DecodeBlocks
from sgl_jax.kernels.ragged_paged_attention.tpu_decode.call import decode_attention

HEAD_DIM, PAGE_SIZE = 128, 128
KV_HEADS = (1, 2, 4, 8)  # on a chip, each with a group of 4 queries
ROW_LENGTHS = (200, 700, 1500, 4000)
LATENCY_S = 1e-6  # of a transfer, an assumption


def decode_kernel(kv_heads: int, blocks: DecodeBlocks) -> Kernel:
    def decode(q, cache, layer, *rows):
        batch = AttentionBatch.build(*rows, kernel_cost.ROWS)
        return decode_attention(q, cache, layer, batch, scale=HEAD_DIM**-0.5, blocks=blocks)

    pages = 1 + kernel_cost.ROWS * kernel_cost.CONTEXT // PAGE_SIZE
    cache = ((2, pages, 2 * kv_heads, PAGE_SIZE, HEAD_DIM), jnp.bfloat16)
    q = ((kernel_cost.ROWS, 4 * kv_heads, HEAD_DIM), jnp.bfloat16)
    shapes = [q, cache, ((), jnp.int32), *step_rows(PAGE_SIZE)]
    return Kernel("decode", decode, shapes, 0, "KV token", kernel_cost.per(1), "")


def row_cycles(schedule: Schedule, blocks: DecodeBlocks, length: int, bytes_: int, chip: Chip):
    """Estimated cycles of a row of `length` keys whose K and V take `bytes_` a key."""
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
    """The sizes of the least mean cycles a key over ROW_LENGTHS, and those cycles."""
    chip, bytes_ = CHIPS[chip_name], 2 * kv_heads * HEAD_DIM * 2
    found = []
    for block, part in itertools.product((512, 1024, 2048), (128, 256, 512)):
        blocks = DecodeBlocks(block, part)
        if block * bytes_ > MAX_BLOCK_BYTES:
            continue
        _, compiled = compile_for(chip_name, lambda blocks=blocks: decode_kernel(kv_heads, blocks))
        cycles = [
            row_cycles(compiled.schedule, blocks, length, bytes_, chip) / length
            for length in ROW_LENGTHS
        ]
        found.append((sum(cycles) / len(cycles), blocks))
    cycles, blocks = min(found)
    return blocks, cycles


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chips", nargs="+", choices=CHIPS, default=list(CHIPS))
    for chip in parser.parse_args().chips:
        for kv_heads in KV_HEADS:
            blocks, cycles = best_blocks(chip, kv_heads)
            sizes = f"DecodeBlocks({blocks.block_keys}, {blocks.part_keys})"
            print(
                f'    ("{CHIPS[chip].device_kind}", {kv_heads}): {sizes},  # {cycles:.2f}',
                flush=True,
            )


if __name__ == "__main__":
    main()
