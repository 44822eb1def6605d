"""Attention kernels of this package and of jax for Llama-3.1-8B.

32 query and 8 KV heads of 128, bfloat16, with a cache of bfloat16 or of 8 bits.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention

from benchmarks.kernels.compiled_kernel import Kernel, Shape, per, per_innermost
from benchmarks.kernels.schedule import Loop, Schedule
from sgl_jax.kernels.attention.batch import AttentionBatch, ScoreOptions
from sgl_jax.kernels.attention.cache_dtype import EIGHT_BITS
from sgl_jax.kernels.attention.tpu.decode import decode_attention
from sgl_jax.kernels.attention.tpu.prefill import prefill_attention
from sgl_jax.kernels.attention.tpu.tuned import decode_blocks, invariant_blocks, prefill_blocks
from sgl_jax.kernels.attention.tpu.write import write_kv
from sgl_jax.kernels.qkv_heads import TOKENS_AT_ONCE, HeadNorm, rotated_heads
from sgl_jax.kernels.tpu_chip import tile_slots

Q_HEADS, KV_HEADS, HEAD_DIM, DTYPE = 32, 8, 128, jnp.bfloat16
ROWS, CONTEXT, CHUNK = 64, 4096, 2048
OPTIONS = ScoreOptions(HEAD_DIM**-0.5)


def per_run(schedule: Schedule) -> tuple[float, Loop]:
    """Return bundles per run of the KV write, and its loop that changes a tile.

    Two loops have one turn per run and count: finding the run, and changing its tile.
    """
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


def step_rows(page_size: int) -> list[Shape]:
    """Return shapes of page table, KV starts, query lengths and number of decode rows."""
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


def our_invariant(page_size: int) -> Kernel:
    """Return the kernel that computes all rows with `--enable-deterministic-inference`."""
    rows, cache = step_rows(page_size), cache_shape(page_size)
    blocks = invariant_blocks(KV_HEADS, Q_HEADS // KV_HEADS, HEAD_DIM, page_size, DTYPE)

    def attend(q, cache, layer, *rows):
        batch = AttentionBatch.build(*rows, CHUNK)
        return prefill_attention(q, cache, layer, batch, OPTIONS, blocks=blocks)

    turns = KV_HEADS // blocks.masked_heads(KV_HEADS)
    return Kernel(
        f"deterministic, {shape_name(page_size, DTYPE)}",
        attend,
        [((CHUNK, Q_HEADS, HEAD_DIM), DTYPE), cache, ((), jnp.int32), *rows],
        0,
        f"KV token, {blocks.few_queries} queries",
        per(blocks.part_keys / turns),
        page_dma(2 * KV_HEADS, page_size),
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
    """Return the kernel that computes Q, K and V with heads of 128."""
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


def jax_decode(page_size: int) -> Kernel:
    """Return jax's paged attention, which visits KV heads one by one, 512 keys at a time."""
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
    """Return jax's splash attention: causal, one sequence, no pages."""

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


ATTENTION_KERNELS: dict[str, Callable[[], Kernel]] = {
    "deterministic-128": lambda: our_invariant(128),
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
}
