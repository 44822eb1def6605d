#!/usr/bin/env python
"""The cost of a decode row in a layer with a window and in one without; needs no TPU.

    python -m benchmarks.kernels.window_cost [--chips v5e v6e] [--context 32768]

The TPU compiler compiles the decode kernel for the shapes of gpt-oss and Gemma 3 27B, all heads on
one chip, as in `cost.py`. For a row of the context, averaged over all places in a page where it may
end, prints the tokens of KV that are read (the pages that the kernel lists), the bytes of their
DMAs, and the bundles: those done once per row, of each block of keys that needs no mask, and of
each part of keys that does. Bundles that clear the slots of a partial page are left out.
"""

import argparse
from typing import NamedTuple

# Before jax: it has the compiler write its schedules.
from benchmarks.kernels.compiled_kernel import Compiled, Kernel, compile_for, per  # isort: skip
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels.attention_kernels import DTYPE
from sgl_jax.kernels.attention.batch import AttentionBatch, ScoreOptions
from sgl_jax.kernels.attention.tpu.decode import decode_attention, row_pages
from sgl_jax.kernels.attention.tpu.shared import CacheSlots
from sgl_jax.kernels.attention.tpu.tuned import DecodeBlocks, decode_blocks
from sgl_jax.planner.topology import CHIPS

ROWS, LANES = 64, 128


class Layer(NamedTuple):
    """Attention of one layer, all of its heads."""

    model: str
    q_heads: int
    kv_heads: int
    head_dim: int
    window: int | None  # tokens
    has_sinks: bool

    @property
    def is_packed(self) -> bool:
        """Return whether K and V of a head share a row of lanes."""
        return self.head_dim < LANES

    @property
    def page_heads(self) -> int:
        """Return the rows of lanes that a token takes in the cache."""
        return self.kv_heads if self.is_packed else 2 * self.kv_heads


GPT_OSS = Layer("gpt-oss", 64, 8, 64, None, has_sinks=True)
GEMMA = Layer("Gemma 3 27B", 32, 16, 128, None, has_sinks=False)
LAYERS = (GPT_OSS, GPT_OSS._replace(window=128), GEMMA, GEMMA._replace(window=1024))


class RowWork(NamedTuple):
    pages: int
    clear_blocks: int  # blocks without masked keys
    parts: int  # parts with masked keys


def row_work(
    layer: Layer, blocks: DecodeBlocks, page_size: int, first: int, stop: int, length: int
) -> RowWork:
    """Return the work for a row of `length` tokens that reads pages [`first`, `stop`)."""
    block_pages, part_pages = blocks.block_keys // page_size, blocks.part_keys // page_size
    clear = parts = 0
    for page in range(first, stop, block_pages):
        is_seen = (page + block_pages) * page_size <= length
        if layer.window is not None:
            is_seen &= page * page_size >= length - layer.window
        clear += is_seen
        parts += 0 if is_seen else -(-min(block_pages, stop - page) // part_pages)
    return RowWork(stop - first, clear, parts)


def mean_work(layer: Layer, blocks: DecodeBlocks, page_size: int, context: int) -> np.ndarray:
    """Return `RowWork`'s fields, float64[3], averaged over rows that end anywhere in a page."""
    starts = jnp.arange(context - page_size, context, dtype=jnp.int32)  # the new token's position
    table = jnp.zeros((len(starts), context // page_size), jnp.int32)
    ones = jnp.ones_like(starts)
    batch = AttentionBatch.build(table, starts, ones, jnp.int32(len(starts)), len(starts))
    pages = row_pages(batch, page_size, ScoreOptions(1.0, layer.window))
    bounds = zip(
        np.asarray(pages.first), np.asarray(pages.stop), np.asarray(starts) + 1, strict=True
    )
    works = [row_work(layer, blocks, page_size, *map(int, each)) for each in bounds]
    return np.mean(works, axis=0)


def decode_kernel(layer: Layer, page_size: int, context: int) -> Kernel:
    """Return the decode kernel for a step of `ROWS` rows."""
    width = layer.page_heads * LANES * jnp.dtype(DTYPE).itemsize
    heads, pages = layer.page_heads, context // page_size

    def decode(q, cache, number, sinks, *rows):
        batch = AttentionBatch.build(*rows, ROWS)
        options = ScoreOptions(
            layer.head_dim**-0.5, layer.window, None, sinks if layer.has_sinks else None
        )
        return decode_attention(q, cache, number, batch, options, slots=CacheSlots(layer.is_packed))

    rows = ((ROWS,), jnp.int32)
    return Kernel(
        f"decode, {layer.model}",
        decode,
        [
            ((ROWS, layer.q_heads, LANES), DTYPE),
            ((2, 1 + pages, heads, page_size, LANES), DTYPE),
            ((), jnp.int32),
            ((layer.q_heads,), jnp.float32),
            *[((ROWS, pages), jnp.int32), rows, rows, ((), jnp.int32)],
        ],
        0,
        "row",
        per(decode_blocks(layer.kv_heads, width).block_keys),
        f"{width * page_size // 1024} KiB",
    )


def row_bundles(compiled: Compiled, work: np.ndarray) -> float:
    """Return bundles of a row: of its loops over rows, blocks, and parts of a masked block."""
    loops = compiled.schedule.loops
    row, block, part = (
        max((each for each in loops if each.depth == depth), key=lambda each: each.bundles)
        for depth in (1, 2, 3)
    )
    _, clear_blocks, parts = work.tolist()
    return row.bundles + clear_blocks * block.bundles + parts * part.bundles


def row(layer: Layer, chip: str, page_size: int, context: int) -> str:
    found: list[DecodeBlocks] = []

    def make() -> Kernel:  # under the chip's mesh, which decides the blocks
        width = layer.page_heads * LANES * jnp.dtype(DTYPE).itemsize
        found.append(decode_blocks(layer.kv_heads, width))
        return decode_kernel(layer, page_size, context)

    _, compiled = compile_for(chip, make)
    work = mean_work(layer, found[0], page_size, context)
    tokens, bundles = work[0] * page_size, row_bundles(compiled, work)
    mib = tokens * layer.page_heads * LANES * jnp.dtype(DTYPE).itemsize / 2**20
    window = "none" if layer.window is None else f"{layer.window:,}"
    return (
        f"| {layer.model} | {window} | {chip} | {tokens:,.0f} | {mib:,.2f} | {bundles:,.0f} "
        f"| {bundles / tokens:.2f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chips", nargs="+", choices=CHIPS, default=["v5e", "v6e"])
    parser.add_argument("--context", type=int, default=32_768, help="tokens (32768)")
    parser.add_argument("--page-size", type=int, default=128, help="tokens (128)")
    options = parser.parse_args()
    if options.context % options.page_size:
        parser.error("--context must be a multiple of --page-size")
    print(
        "| layer of | window | chip | KV tokens read | MiB of DMAs | bundles a row | a KV token |"
    )
    print("|---|---|---|---|---|---|---|")
    for layer in LAYERS:
        for chip in options.chips:
            print(row(layer, chip, options.page_size, options.context), flush=True)


if __name__ == "__main__":
    main()
