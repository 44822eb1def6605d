#!/usr/bin/env python
"""Costs of latent attention on TPU from schedules, next to other engines' kernels; needs no TPU.

    python -m benchmarks.kernels.latent_cost [--chips v5e v6e v5p tpu7x] [--heads 16 128]
        [--contexts 4096 65536] [--prefill] [--sglang-jax DIR] [--tpu-inference DIR] [--json FILE]

Decode: bundles per token of context, in the loop over blocks of keys and of whole rows, with the
work done once per row and the block in which it ends. A row is estimated to take the longer of its
bundles, one per cycle, and the transfer of its rows of 640 numbers. MBU is the share of that time
that the transfer takes, MFU the share that products of 576 and 512 numbers for each head take at
the chip's peak. The time is that of the longest of `--contexts`.

Prefill: bundles of the loop over keys that all queries see, and of a chunk of 2,048 tokens that
ends at a context, per 10**9 of these operations, whichever form computes them.

Other engines' kernels are compiled from their checkouts for the same shapes. Branches that most
blocks do not take count in all of them.
"""

import argparse
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Before jax: it has the compiler write its schedules.
from benchmarks.kernels.compiled_kernel import compile_for, hot_loop  # isort: skip
from benchmarks.kernels.latent_kernels import (
    PEERS,
    RANK,
    ROPE_DIM,
    ROW_SIZE,
    DecodeCost,
    PrefillForm,
    our_decode_cost,
    peer_decode_cost,
)
from sgl_jax.planner.topology import CHIPS


def costs(chip: str, heads: int, checkouts: dict[str, Path]) -> Iterator[tuple[str, DecodeCost]]:
    """Yield name and cost of each decode kernel."""
    yield "ours", our_decode_cost(chip, heads)
    for name, checkout in checkouts.items():
        yield name, peer_decode_cost(PEERS[name], checkout, chip, heads)


def figures(chip_name: str, heads: int, cost: DecodeCost, contexts: list[int]) -> dict[str, float]:
    """Return the figures of a line: bundles or cycles per token, and shares of the peaks."""
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


def prefill_figures(chip: str, form: PrefillForm, contexts: list[int]) -> dict[str, float]:
    """Return a line's figures: bundles per 10**9 operations, matrix unit's share, and spills."""
    _, compiled = compile_for(chip, form.kernel)
    loop, blocks = hot_loop(compiled.schedule), form.blocks
    pairs = blocks.queries * blocks.keys * form.heads // blocks.parts * blocks.heads
    return {
        "loop": loop.bundles / (2 * pairs * (RANK + ROPE_DIM + RANK) / 1e9),
        **{
            f"{context} tokens": form.chunk_bundles(compiled.schedule, context)
            for context in contexts
        },
        "matrix": loop.units["MXU"] / loop.bundles,
        "spills": loop.spills,
    }


def decode_lines(
    heads: list[int], chips: list[str], contexts: list[int], checkouts: dict[str, Path]
) -> list[dict[str, Any]]:
    """Print the table of decode; return its numbers."""
    found = []
    lengths = " | ".join(f"{context:,} tokens" for context in contexts)
    print(f"| heads | chip | decode | block | {lengths} | memory | peak | MBU | MFU | matrix |")
    print("|---" * (9 + len(contexts)) + "|")
    for number, chip in itertools.product(heads, chips):
        for name, cost in costs(chip, number, checkouts):
            line = figures(chip, number, cost, contexts)
            found.append({"heads": number, "chip": chip, "kernel": name, **line})
            numbers = " | ".join(
                f"{value:.0%}" if key in ("MBU", "MFU") else f"{value:.2f}"
                for key, value in line.items()
            )
            print(f"| {number} | {chip} | {name} | {numbers} |", flush=True)
    return found


def prefill_lines(
    heads: list[int], chips: list[str], contexts: list[int], _: dict[str, Path]
) -> list[dict[str, Any]]:
    """Print the table of prefill's forms; return its numbers."""
    found = []
    lengths = " | ".join(f"{context:,} tokens" for context in contexts)
    print(f"| heads | chip | prefill | loop | {lengths} | matrix | spills |")
    print("|---" * (6 + len(contexts)) + "|")
    for number, chip in itertools.product(heads, chips):
        for name, form in (
            ("absorbed", PrefillForm.absorbed(number)),
            ("expanded", PrefillForm.of_expanded(number)),
        ):
            line = prefill_figures(chip, form, contexts)
            found.append({"heads": number, "chip": chip, "form": name, **line})
            numbers = " | ".join(
                f"{value:.2f}" if key == "matrix" else f"{value:,.0f}"
                for key, value in line.items()
            )
            print(f"| {number} | {chip} | {name} | {numbers} |", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chips", nargs="+", choices=CHIPS, default=list(CHIPS))
    parser.add_argument("--heads", nargs="+", type=int, default=[16, 128], help="on a chip")
    parser.add_argument("--contexts", nargs="+", type=int, default=[4096, 65536], help="tokens")
    parser.add_argument("--prefill", action="store_true", help="prefill in both forms, not decode")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    for name in PEERS:
        parser.add_argument(f"--{name}", type=Path, metavar="DIR", help="its checkout")
    options = parser.parse_args()
    given = vars(options)
    checkouts = {name: given[name.replace("-", "_")] for name in PEERS}
    checkouts = {name: checkout for name, checkout in checkouts.items() if checkout}
    print_lines = prefill_lines if options.prefill else decode_lines
    found = print_lines(options.heads, options.chips, options.contexts, checkouts)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
