#!/usr/bin/env python
"""Static costs of the TPU kernels, ours beside jax's own, without a TPU.

    python -m benchmarks.kernels.cost [--chips v5e v6e] [--only decode prefill-128] [--json FILE]

Every kernel is compiled by the TPU's own compiler (libtpu): attention for Llama-3.1-8B, 32 query
and 8 KV heads of 128, bfloat16, with a cache of bfloat16 or of 8 bits; the grouped product for
Qwen3-30B-A3B's 128 experts, their inner width split over four chips; gated delta nets for
Qwen3-Next-80B-A3B, whole or split over eight chips. The costs come from the schedule (see
`schedule.py`): bundles of the hot loop for each token of KV in decode, for 10**9 floating point
operations in prefill, for each head of a token that is normalised and rotated, for each run of
tokens in the write, for each visit of a group to a tile in the grouped product, for each token of
the gated delta rule's decode and of its convolution.
"""

import argparse
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.kernels.schedule import Loop, Schedule, read_schedules, request_dumps

DUMPS = Path(tempfile.mkdtemp(prefix="kernel_cost"))
request_dumps(DUMPS)  # before anything loads libtpu
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from jax.experimental.pallas.ops.tpu import splash_attention as splash  # noqa: E402
from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402

from sgl_jax.core.recurrence import conv_state_shape  # noqa: E402
from sgl_jax.kernels.attention.batch import AttentionBatch, ScoreOptions  # noqa: E402
from sgl_jax.kernels.attention.cache_dtype import EIGHT_BITS  # noqa: E402
from sgl_jax.kernels.attention.tpu.decode import decode_attention  # noqa: E402
from sgl_jax.kernels.attention.tpu.prefill import prefill_attention  # noqa: E402
from sgl_jax.kernels.attention.tpu.tuned import decode_blocks, prefill_blocks  # noqa: E402
from sgl_jax.kernels.attention.tpu.write import write_kv  # noqa: E402
from sgl_jax.kernels.gated_delta.batch import CHUNK_TOKENS, DeltaInputs, StateBatch  # noqa: E402
from sgl_jax.kernels.gated_delta.tpu.conv import BLOCK_TOKENS, causal_conv  # noqa: E402
from sgl_jax.kernels.gated_delta.tpu.decode import decode_gated_delta  # noqa: E402
from sgl_jax.kernels.gated_delta.tpu.prefill import VALUE_HEADS, prefill_gated_delta  # noqa: E402
from sgl_jax.kernels.grouped_matmul.matrices import GroupMatrices  # noqa: E402
from sgl_jax.kernels.grouped_matmul.tpu import choose_tiles, tpu_grouped_matmul  # noqa: E402
from sgl_jax.kernels.qkv_heads import TOKENS_AT_ONCE, HeadNorm, rotated_heads  # noqa: E402
from sgl_jax.kernels.tpu_chip import tile_slots  # noqa: E402
from sgl_jax.planner.topology import (  # noqa: E402
    CHIPS,
    Topology,
    topology_mesh,
)

Q_HEADS, KV_HEADS, HEAD_DIM, DTYPE = 32, 8, 128, jnp.bfloat16
ROWS, CONTEXT, CHUNK = 64, 4096, 2048
OPTIONS = ScoreOptions(HEAD_DIM**-0.5)
DELTA_KEY_HEADS, DELTA_VALUE_HEADS = 16, 32
EXPERTS, TOP_K, HIDDEN, INNER = 128, 8, 2048, 192


class Kernel(NamedTuple):
    """A kernel at one shape."""

    name: str
    function: Callable[..., Any]
    shapes: list[tuple[tuple[int, ...], Any]]  # of its arguments, with their dtypes
    donated: int | None
    unit: str  # for which bundles are counted
    cost: Callable[[Schedule], tuple[float, Loop]]  # bundles per unit, and the loop they are of
    dma: str  # contents of one DMA


class Cost(NamedTuple):
    """The figures read off a schedule."""

    kernel: str
    chip: str
    bundles: float
    unit: str
    spills: int  # in the hot loop
    vmem_mib: float | None  # scratch, without the grid's own buffers
    temp_mib: float
    dma: str
    compile_s: float


def hot_loop(schedule: Schedule) -> Loop:
    """The cheapest of the loops that use the matrix unit most: the one without masks."""
    most = schedule.hot_loops[0].units["MXU"]
    loops = [loop for loop in schedule.hot_loops if loop.units["MXU"] > 0.9 * most]
    return min(loops, key=lambda loop: loop.bundles)


def per(amount: float) -> Callable[[Schedule], tuple[float, Loop]]:
    """Bundles of the hot loop for each of `amount` units that one turn of it does."""

    def cost(schedule: Schedule) -> tuple[float, Loop]:
        loop = hot_loop(schedule)
        return loop.bundles / amount, loop

    return cost


def longest_loop(schedule: Schedule) -> tuple[float, Loop]:
    """Bundles of the longest loop, for each of its turns."""
    loop = max(schedule.loops, key=lambda loop: loop.bundles)
    return loop.bundles, loop


def per_token_of_blocks(schedule: Schedule) -> tuple[float, Loop]:
    """Bundles of a loop over tokens, and a token's part of the surrounding grid's bundles."""
    outer, inner = (
        max((loop for loop in schedule.loops if loop.depth == depth), key=lambda loop: loop.bundles)
        for depth in (1, 2)
    )
    return inner.bundles + outer.bundles / BLOCK_TOKENS, inner


def per_innermost(amount: float) -> Callable[[Schedule], tuple[float, Loop]]:
    """Bundles of the innermost loop for each of `amount` units."""

    def cost(schedule: Schedule) -> tuple[float, Loop]:
        loop = max(schedule.loops, key=lambda loop: loop.depth)
        return loop.bundles / amount, loop

    return cost


def per_run(schedule: Schedule) -> tuple[float, Loop]:
    """The write's loops that have one turn a run: finding it, and changing its tile."""
    depth = max(loop.depth for loop in schedule.loops)
    innermost = [loop for loop in schedule.loops if loop.depth == depth]
    changing = max(innermost, key=lambda loop: loop.dmas)
    finding = max(
        (loop for loop in innermost if not loop.dmas),
        key=lambda loop: loop.bundles,
    )
    return changing.bundles + finding.bundles, changing


def page_dma(heads: int, page_size: int, dtype: Any = DTYPE) -> str:
    return f"{heads * page_size * HEAD_DIM * jnp.dtype(dtype).itemsize // 1024} KiB"


def shape_name(page_size: int, dtype: Any) -> str:
    return f"page {page_size}" + (", fp8 cache" if dtype == EIGHT_BITS else "")


Shape = tuple[tuple[int, ...], Any]


def step_rows(page_size: int) -> list[Shape]:
    """Shapes of page table, KV starts, query lengths and number of decode rows."""
    rows = ((ROWS,), jnp.int32)
    return [((ROWS, CONTEXT // page_size), jnp.int32), rows, rows, ((), jnp.int32)]


def cache_shape(page_size: int, dtype: Any = DTYPE) -> Shape:
    return (2, 1 + ROWS * CONTEXT // page_size, 2 * KV_HEADS, page_size, HEAD_DIM), dtype


def our_decode(page_size: int, dtype: Any = DTYPE) -> Kernel:
    rows, cache = step_rows(page_size), cache_shape(page_size, dtype)
    blocks = decode_blocks(KV_HEADS, 2 * KV_HEADS * HEAD_DIM * jnp.dtype(dtype).itemsize)

    def decode(q, cache, layer, *rows):
        batch = AttentionBatch.build(*rows, ROWS)
        return decode_attention(q, cache, layer, batch, OPTIONS)

    q = ((ROWS, Q_HEADS, HEAD_DIM), DTYPE)
    keys = max(blocks.block_keys, page_size)
    return Kernel(
        f"decode, {shape_name(page_size, dtype)}",
        decode,
        [q, cache, ((), jnp.int32), *rows],
        0,
        "KV token",
        per(keys),
        page_dma(2 * KV_HEADS, page_size, dtype),
    )


def our_prefill(page_size: int, dtype: Any = DTYPE) -> Kernel:
    rows, cache = step_rows(page_size), cache_shape(page_size, dtype)
    blocks = prefill_blocks(KV_HEADS, Q_HEADS // KV_HEADS, HEAD_DIM, page_size, DTYPE, CHUNK)

    def prefill(q, cache, layer, *rows):
        batch = AttentionBatch.build(*rows, CHUNK)
        return prefill_attention(q, cache, layer, batch, OPTIONS)

    q = ((CHUNK, Q_HEADS, HEAD_DIM), DTYPE)
    q_heads = blocks.heads * Q_HEADS // KV_HEADS
    flops = 4 * q_heads * blocks.queries * blocks.keys * HEAD_DIM
    return Kernel(
        f"prefill, {shape_name(page_size, dtype)}",
        prefill,
        [q, cache, ((), jnp.int32), *rows],
        0,
        "GFLOP",
        per(flops / 1e9),
        page_dma(2 * KV_HEADS, page_size, dtype),
    )


def our_write(tokens: int, dtype: Any = DTYPE) -> Kernel:
    rows, cache, tile = step_rows(128), cache_shape(128, dtype), tile_slots(dtype)

    def write(k, v, cache, layer, *rows):
        return write_kv(k, v, cache, layer, AttentionBatch.build(*rows, tokens))

    kv = ((tokens, KV_HEADS, HEAD_DIM), DTYPE)
    return Kernel(
        f"write, {tokens} tokens" + (", fp8 cache" if dtype == EIGHT_BITS else ""),
        write,
        [kv, kv, cache, ((), jnp.int32), *rows],
        2,
        f"run of 1 to {tile} tokens",
        per_run,
        page_dma(2 * KV_HEADS, tile, dtype),
    )


def our_heads(tokens: int, q_heads: int, kv_heads: int, normalised: bool) -> Kernel:
    """Q, K and V of heads of 128."""
    heads = q_heads + 2 * kv_heads

    def rotate(qkv, cos, sin, *weights):
        norms = [HeadNorm(weight, 1e-6) for weight in weights] or [None, None]
        sizes = {"group": q_heads // kv_heads, "head_dim": HEAD_DIM}
        return rotated_heads(qkv, cos, sin, *norms, **sizes)

    half, weight = ((tokens, HEAD_DIM // 2), jnp.float32), ((HEAD_DIM,), DTYPE)
    at_once = min(TOKENS_AT_ONCE, tokens)
    return Kernel(
        f"heads, {q_heads} and {kv_heads}" + (", normalised" if normalised else ""),
        rotate,
        [((tokens, heads * HEAD_DIM), DTYPE), half, half, *[weight] * (2 * normalised)],
        None,
        "head of a token",
        per_innermost(at_once * heads),
        "by the grid",
    )


def our_grouped_product(tokens: int, inwards: bool) -> Kernel:
    """Gate or up of a layer, stored as [out, in], or down, stored as [in, out]."""
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


def state_shapes(tokens: int, tp: int) -> list[Shape]:
    """Arguments of the gated delta rule on a chip of tp: q, k, v, gates, states, layer, and
    the rows."""
    keys, values = DELTA_KEY_HEADS // tp, DELTA_VALUE_HEADS // tp
    gates = ((tokens, values), jnp.float32)
    rows = ((ROWS,), jnp.int32)
    return [
        *[((tokens, keys, HEAD_DIM), DTYPE)] * 2,
        ((tokens, values, HEAD_DIM), DTYPE),
        *[gates] * 2,
        ((2, 4 * ROWS, values, HEAD_DIM, HEAD_DIM), jnp.float32),
        ((), jnp.int32),
        *[rows] * 2,
        ((ROWS, 3), jnp.int32),
        *[rows] * 2,
        ((), jnp.int32),
    ]


def our_delta_decode(tp: int) -> Kernel:
    """Qwen3-Next-80B-A3B's heads on a chip of tp."""

    def decode(*arguments):
        tokens, arrays, rows = DeltaInputs(*arguments[:5]), arguments[5:7], arguments[7:]
        return decode_gated_delta(tokens, *arrays, StateBatch.build(*rows, ROWS))

    state_kib = DELTA_VALUE_HEADS // tp * HEAD_DIM * HEAD_DIM * 4 // 1024
    return Kernel(
        f"gated delta decode, {DELTA_VALUE_HEADS // tp} value heads",
        decode,
        state_shapes(ROWS, tp),
        5,
        "token",
        longest_loop,
        f"{state_kib} KiB",
    )


def delta_flops() -> float:
    """Needed for a value head's chunk: products with the state, of keys and queries with keys, with
    the inverse, with the changes, and a third of the inverse's whole matrix."""
    with_state = 3 * CHUNK_TOKENS * HEAD_DIM**2
    within = 2 * CHUNK_TOKENS**2 * HEAD_DIM
    of_keys = within * DELTA_KEY_HEADS / DELTA_VALUE_HEADS
    return 2 * (with_state + within + of_keys + CHUNK_TOKENS**3 / 3)


def our_delta_prefill(tp: int) -> Kernel:
    """The same heads; of a chunk's loops the one with the matrix unit's work."""
    heads = min(VALUE_HEADS, DELTA_VALUE_HEADS // tp)

    def prefill(*arguments):
        tokens, arrays, rows = DeltaInputs(*arguments[:5]), arguments[5:7], arguments[7:]
        return prefill_gated_delta(tokens, *arrays, StateBatch.build(*rows, CHUNK))

    return Kernel(
        f"gated delta prefill, {DELTA_VALUE_HEADS // tp} value heads",
        prefill,
        state_shapes(CHUNK, tp),
        5,
        "GFLOP",
        per(heads * delta_flops() / 1e9),
        f"{DELTA_VALUE_HEADS // tp * CHUNK_TOKENS * HEAD_DIM * 2 // 1024} KiB",
    )


def our_conv(tp: int) -> Kernel:
    """The same heads' convolution, width 4."""
    channels = (2 * DELTA_KEY_HEADS + DELTA_VALUE_HEADS) // tp * HEAD_DIM
    state, rows = conv_state_shape(4, channels), state_shapes(CHUNK, tp)[6:]

    def convolve(*arguments):
        arrays, rows = arguments[:4], arguments[4:]
        return causal_conv(*arrays, StateBatch.build(*rows, CHUNK))

    return Kernel(
        f"convolution, {channels:,} channels",
        convolve,
        [
            ((CHUNK, channels), DTYPE),
            ((4, channels), DTYPE),
            ((2, 4 * ROWS, *state), DTYPE),
            *rows,
        ],
        2,
        "token",
        per_token_of_blocks,
        f"{state[0] * state[1] * 2 // 1024} KiB",
    )


def jax_decode(page_size: int) -> Kernel:
    """jax's paged attention visits KV heads one by one, 512 keys at a time."""
    pages = CONTEXT // page_size
    block_pages = 512 // page_size

    def decode(q, k, v, lengths, table):
        return paged_attention(q, k, v, lengths, table, pages_per_compute_block=block_pages)

    cache = ((KV_HEADS, 1 + ROWS * pages, page_size, HEAD_DIM), DTYPE)
    q = ((ROWS, Q_HEADS, HEAD_DIM), DTYPE)
    return Kernel(
        f"jax paged_attention, page {page_size}",
        decode,
        [q, cache, cache, ((ROWS,), jnp.int32), ((ROWS, pages), jnp.int32)],
        None,
        "KV token",
        per(512 / KV_HEADS),
        page_dma(1, page_size),
    )


def jax_prefill(block: int) -> Kernel:
    """jax's splash attention: causal, one sequence, no pages."""

    def prefill(q, k, v):
        mask = splash.MultiHeadMask([splash.CausalMask((CHUNK, CHUNK))] * Q_HEADS)
        sizes = splash.BlockSizes(block_q=block, block_kv=block, block_kv_compute=block)
        return splash.make_splash_mha(mask, block_sizes=sizes, head_shards=1, q_seq_shards=1)(
            q, k, v
        )

    kv = ((KV_HEADS, CHUNK, HEAD_DIM), DTYPE)
    return Kernel(
        f"jax splash, blocks of {block}",
        prefill,
        [((Q_HEADS, CHUNK, HEAD_DIM), DTYPE), kv, kv],
        None,
        "GFLOP",
        per(4 * block * block * HEAD_DIM / 1e9),
        "by the grid",
    )


KERNELS: dict[str, Callable[[], Kernel]] = {
    "decode-128": lambda: our_decode(128),
    "decode-64": lambda: our_decode(64),
    "decode-16": lambda: our_decode(16),
    "decode-128-fp8": lambda: our_decode(128, EIGHT_BITS),
    "jax-decode-128": lambda: jax_decode(128),
    "jax-decode-16": lambda: jax_decode(16),
    "prefill-128": lambda: our_prefill(128),
    "prefill-16": lambda: our_prefill(16),
    "prefill-128-fp8": lambda: our_prefill(128, EIGHT_BITS),
    "jax-prefill-512": lambda: jax_prefill(512),
    "jax-prefill-1024": lambda: jax_prefill(1024),
    "heads-8-1": lambda: our_heads(CHUNK, 8, 1, False),
    "heads-8-1-normalised": lambda: our_heads(CHUNK, 8, 1, True),
    "heads-32-8": lambda: our_heads(CHUNK, 32, 8, False),
    "heads-32-8-normalised": lambda: our_heads(CHUNK, 32, 8, True),
    "write-64": lambda: our_write(64),
    "write-2048": lambda: our_write(2048),
    "write-2048-fp8": lambda: our_write(2048, EIGHT_BITS),
    "delta-decode-1": lambda: our_delta_decode(1),
    "delta-decode-8": lambda: our_delta_decode(8),
    "delta-prefill-1": lambda: our_delta_prefill(1),
    "delta-prefill-8": lambda: our_delta_prefill(8),
    "conv-1": lambda: our_conv(1),
    "conv-8": lambda: our_conv(8),
    "grouped-64-inwards": lambda: our_grouped_product(64, True),
    "grouped-64-outwards": lambda: our_grouped_product(64, False),
    "grouped-2048-inwards": lambda: our_grouped_product(CHUNK, True),
    "grouped-2048-outwards": lambda: our_grouped_product(CHUNK, False),
}


class Compiled(NamedTuple):
    """A kernel's program for one chip."""

    schedule: Schedule
    vmem_bytes: int | None
    temp_bytes: int
    compile_s: float


def compile_for(chip: str, make: Callable[[], Kernel]) -> tuple[Kernel, Compiled]:
    """Compile a kernel for one chip of a kind, and read its schedule."""
    shutil.rmtree(DUMPS, ignore_errors=True)
    DUMPS.mkdir()
    mesh = topology_mesh(Topology.all_of(chip)[0], 1, 1)
    whole = NamedSharding(mesh, PartitionSpec())
    with jax.set_mesh(mesh):
        kernel = make()
        structs = [jax.ShapeDtypeStruct(s, dtype, sharding=whole) for s, dtype in kernel.shapes]
        donated = () if kernel.donated is None else (kernel.donated,)
        lowered = jax.jit(kernel.function, donate_argnums=donated).lower(*structs)
    start = time.process_time()
    compiled = lowered.compile()
    compile_s = time.process_time() - start
    lines = (compiled.as_text() or "").splitlines()
    # The last one: a plan of visits precedes a grouped product.
    call = [line for line in lines if '"tpu_custom_call"' in line][-1]
    name = re.findall(r"%([A-Za-z_]\w*)", call)[0]
    schedule = next(s for s in read_schedules(DUMPS) if s.kernel == name)
    vmem = re.search(r'"used_scoped_memory_configs":\[\{[^}]*"size":"(\d+)"', call)
    memory = compiled.memory_analysis()
    assert memory is not None, "libtpu reports the memory of what it compiles"
    return kernel, Compiled(
        schedule, int(vmem.group(1)) if vmem else None, memory.temp_size_in_bytes, compile_s
    )


def measure(make: Callable[[], Kernel], chip: str) -> Cost:
    """The costs of a kernel on a chip."""
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
    shutil.rmtree(DUMPS, ignore_errors=True)


if __name__ == "__main__":
    main()
