"""Block sizes of latent attention on TPU, by the compiler's schedules (docs/inside/kernels.md)."""

import jax.numpy as jnp

from sgl_jax.kernels.attention.tpu.tuned import DecodeBlocks, PrefillBlocks

DECODE_BLOCKS = DecodeBlocks(block_keys=2048, part_keys=512)
PREFILL_ROWS = 4096  # of queries: tokens, times heads
PART_ROWS = 1024  # of these, which pass each weight of the matrix unit together


def latent_prefill_blocks(
    heads: int, page_size: int, dtype: jnp.dtype, num_tokens: int
) -> PrefillBlocks:
    """Blocks for a step of `num_tokens` whose queries of `heads` are of `dtype`."""
    # Float32 takes several passes through the matrix unit, and more memory.
    shrink = 2 if jnp.dtype(dtype).itemsize > 2 else 1
    few = max(16, 128 // heads // 16 * 16)
    queries = max(2, PREFILL_ROWS // shrink // heads // few) * few
    queries = min(queries, -(-num_tokens // few) * few)
    most = max(1, queries * heads * shrink // PART_ROWS)
    parts = max(n for n in range(1, most + 1) if heads % n == 0)
    return PrefillBlocks(queries, few, max(512, page_size), max(256, page_size), 1, parts)
