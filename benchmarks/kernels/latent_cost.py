#!/usr/bin/env python
"""Latent attention on TPU by its schedules, beside other engines' kernels; needs no TPU.

    python -m benchmarks.kernels.latent_cost [--chips v5e v6e v5p tpu7x] [--heads 16 128]
        [--contexts 4096 65536] [--sglang-jax DIR] [--tpu-inference DIR] [--json FILE]

Decode: bundles for each token of context, in the loop over blocks of keys and of whole rows, with
the work done once a row and the block that it ends in. A row is estimated to take the longer of its
bundles, one a cycle, and the transfer of its rows of 640 numbers. MBU is the share of that time
that the transfer takes, MFU the share that products of 576 and 512 numbers for each head take at
the chip's peak; the time is that of `--contexts`' longest. Prefill: bundles of the loop over keys
that all queries see, for 10**9 of these operations.

Other engines' kernels are compiled out of their checkouts for the same shapes. Branches not taken
for most blocks count in all of them.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

# Before jax: it has the compiler write its schedules.
from benchmarks.kernels.compiled_kernel import compile_for  # isort: skip
from benchmarks.kernels.latent_kernels import (
    PEERS,
    RANK,
    ROPE_DIM,
    ROW_SIZE,
    DecodeCost,
    our_decode_cost,
    our_prefill,
    peer_decode_cost,
)
from sgl_jax.planner.topology import CHIPS


def costs(chip: str, heads: int, checkouts: dict[str, Path]) -> Iterator[tuple[str, DecodeCost]]:
    """The kernels of decode by name."""
    yield "ours", our_decode_cost(chip, heads)
    for name, checkout in checkouts.items():
        yield name, peer_decode_cost(PEERS[name], checkout, chip, heads)


def figures(chip_name: str, heads: int, cost: DecodeCost, contexts: list[int]) -> dict[str, float]:
    """The numbers of a line."""
    chip = CHIPS[chip_name]
    transfer = 2 * ROW_SIZE / chip.hbm_bytes_per_s * chip.clock_hz
    products = chip.matrix_seconds(2 * heads * (RANK + ROPE_DIM + RANK)) * chip.clock_hz
    rows = {f"{context} tokens": cost.per_token(context) for context in contexts}
    taken = max(transfer, rows[f"{max(contexts)} tokens"])
    return {
        "block": cost.per_key,
        **rows,
        "memory": transfer,
        "peak": products,
        "MBU": transfer / taken,
        "MFU": products / taken,
        "matrix": cost.hot.units["MXU"] / cost.hot.bundles,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chips", nargs="+", choices=CHIPS, default=list(CHIPS))
    parser.add_argument("--heads", nargs="+", type=int, default=[16, 128], help="on a chip")
    parser.add_argument("--contexts", nargs="+", type=int, default=[4096, 65536], help="tokens")
    parser.add_argument("--no-prefill", action="store_true", help="leave prefill out")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    for name in PEERS:
        parser.add_argument(f"--{name}", type=Path, metavar="DIR", help="its checkout")
    options = parser.parse_args()
    given = vars(options)
    checkouts = {name: given[name.replace("-", "_")] for name in PEERS}
    checkouts = {name: checkout for name, checkout in checkouts.items() if checkout}
    found = []
    lengths = " | ".join(f"{context:,} tokens" for context in options.contexts)
    print(f"| heads | chip | decode | block | {lengths} | memory | peak | MBU | MFU | matrix |")
    print("|---" * (9 + len(options.contexts)) + "|")
    for heads in options.heads:
        for chip in options.chips:
            for name, cost in costs(chip, heads, checkouts):
                line = figures(chip, heads, cost, options.contexts)
                found.append({"heads": heads, "chip": chip, "kernel": name, **line})
                numbers = " | ".join(
                    f"{value:.0%}" if key in ("MBU", "MFU") else f"{value:.2f}"
                    for key, value in line.items()
                )
                print(f"| {heads} | {chip} | {name} | {numbers} |", flush=True)
    if not options.no_prefill:
        print(
            "\n| heads | chip | prefill, bundles a GFLOP | matrix | spills |\n|---|---|---|---|---|"
        )
        for heads in options.heads:
            for chip in options.chips:
                kernel, compiled = compile_for(chip, lambda heads=heads: our_prefill(heads))
                bundles, loop = kernel.cost(compiled.schedule)
                matrix = loop.units["MXU"] / loop.bundles
                found.append(
                    {"heads": heads, "chip": chip, "kernel": kernel.name, "GFLOP": bundles}
                )
                print(
                    f"| {heads} | {chip} | {bundles:,.0f} | {matrix:.2f} | {loop.spills:,} |",
                    flush=True,
                )
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
