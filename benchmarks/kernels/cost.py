#!/usr/bin/env python
"""Static costs of the TPU kernels, next to those of jax's kernels, without a TPU.

    python -m benchmarks.kernels.cost [--chips v5e v6e] [--only decode prefill-128] [--json FILE]

The TPU compiler (libtpu) compiles every kernel:

- attention for Llama-3.1-8B, 32 query and 8 KV heads of 128, bfloat16, with a cache of bfloat16 or
  of 8 bits
- the grouped product for Qwen3-30B-A3B's 128 experts, with their inner width split over four chips
- gated delta nets for Qwen3-Next-80B-A3B, and by channel for Kimi-Linear-48B-A3B, whole or split
  over eight chips

The costs are bundles of the schedule (see `schedule.py`):

- decode: bundles of the hot loop per token of KV
- prefill: bundles per 10**9 floating point operations
- normalised and rotated heads: bundles per head of a token
- KV write: bundles per run of tokens
- grouped product: bundles per visit of a group to a tile
- decode of the gated delta rule, and its convolution: bundles per token
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

# Before jax: it has the compiler write its schedules.
from benchmarks.kernels.compiled_kernel import Kernel, compile_for, per  # isort: skip
import jax.numpy as jnp

from benchmarks.kernels.attention_kernels import ATTENTION_KERNELS, CHUNK, DTYPE
from benchmarks.kernels.recurrence_kernels import RECURRENCE_KERNELS
from sgl_jax.kernels.grouped_matmul.interface import GroupMatrices
from sgl_jax.kernels.grouped_matmul.tpu import choose_tiles, tpu_grouped_matmul
from sgl_jax.planner.topology import CHIPS

EXPERTS, TOP_K, HIDDEN, INNER = 128, 8, 2048, 192


class Cost(NamedTuple):
    kernel: str
    chip: str
    bundles: float
    unit: str
    spills: int  # in the hot loop
    vmem_mib: float | None  # scratch, without the grid's buffers
    temp_mib: float
    dma: str
    compile_s: float


def our_grouped_product(tokens: int, inwards: bool) -> Kernel:
    """Return the grouped product of gate or up, stored [out, in], or of down, stored [in, out]."""
    lines = tokens * TOP_K
    inputs, outputs = (HIDDEN, INNER) if inwards else (INNER, HIDDEN)
    tile = choose_tiles(lines, EXPERTS, inputs, outputs, jnp.dtype(DTYPE).itemsize).lines

    def multiply(lines, matrices, layer, sizes):
        return tpu_grouped_matmul(lines, GroupMatrices(matrices), layer, sizes, transposed=inwards)

    return Kernel(
        f"grouped product {'in' if inwards else 'out'}wards, {tokens} tokens",
        multiply,
        [
            ((lines, inputs), DTYPE),
            ((2, EXPERTS, INNER, HIDDEN), DTYPE),
            ((), jnp.int32),
            ((EXPERTS,), jnp.int32),
        ],
        None,
        f"visit to {tile} lines",
        per(1),
        f"{INNER * HIDDEN * 2 // 1024} KiB",
    )


KERNELS: dict[str, Callable[[], Kernel]] = {
    **ATTENTION_KERNELS,
    **RECURRENCE_KERNELS,
    "grouped-64-inwards": lambda: our_grouped_product(64, True),
    "grouped-64-outwards": lambda: our_grouped_product(64, False),
    "grouped-2048-inwards": lambda: our_grouped_product(CHUNK, True),
    "grouped-2048-outwards": lambda: our_grouped_product(CHUNK, False),
}


def measure(make: Callable[[], Kernel], chip: str) -> Cost:
    kernel, compiled = compile_for(chip, make)
    bundles, loop = kernel.cost(compiled.schedule)
    return Cost(
        kernel.name,
        chip,
        bundles,
        kernel.unit,
        loop.spills,
        None if compiled.vmem_bytes is None else compiled.vmem_bytes / 2**20,
        compiled.temp_bytes / 2**20,
        kernel.dma,
        compiled.compile_s,
    )


HEADER = (
    "| kernel | chip | bundles | for each | spills | VMEM MiB | temp MiB | one DMA | compile s |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


def row(cost: Cost) -> str:
    bundles = f"{cost.bundles:,.2f}" if cost.bundles < 50 else f"{cost.bundles:,.0f}"
    vmem = "-" if cost.vmem_mib is None else f"{cost.vmem_mib:.1f}"
    return (
        f"| {cost.kernel} | {cost.chip} | {bundles} | {cost.unit} | {cost.spills:,} "
        f"| {vmem} | {cost.temp_mib:.1f} | {cost.dma} | {cost.compile_s:.1f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chips", nargs="+", choices=CHIPS, default=["v5e", "v6e"])
    parser.add_argument("--only", nargs="+", default=[""], help="kernels whose name begins so")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    print(HEADER)
    costs = []
    for name, make in KERNELS.items():
        if name.startswith(tuple(arguments.only)):
            for chip in arguments.chips:
                costs.append(measure(make, chip))
                print(row(costs[-1]), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps([cost._asdict() for cost in costs], indent=1))


if __name__ == "__main__":
    main()
