"""Block sizes of latent attention on TPU, by the compiler's schedules (docs/inside/kernels.md)."""

import jax.numpy as jnp

from sgl_jax.kernels.attention.tpu.tuned import DecodeBlocks, PrefillBlocks
from sgl_jax.kernels.latent_attention.latents import UpProjections
from sgl_jax.kernels.tpu_chip import LANES

DECODE_BLOCKS = DecodeBlocks(block_keys=2048, part_keys=512)
PREFILL_ROWS = 4096  # rows of absorbed queries in a block: tokens, times heads
PART_ROWS = 1024  # most of these rows to stream past each weight of the matrix unit together
# Steps of this many tokens prefill in the expanded form.
EXPANDED_TOKENS = 1024
EXPANDED_QUERIES = 1024  # queries of a row that share computed keys and values
EXPANDED_HEADS = 8  # most heads with queries and results in vector memory together


def is_expanded(num_tokens: int, up: UpProjections) -> bool:
    """Return True if a step is long enough for the expanded form, and parts fill rows of lanes."""
    sizes = up.keys.shape[1], up.rank, up.values.shape[2]
    return num_tokens >= EXPANDED_TOKENS and all(size % LANES == 0 for size in sizes)


def latent_prefill_blocks(
    heads: int, page_size: int, dtype: jnp.dtype, num_tokens: int
) -> PrefillBlocks:
    """Return blocks for a step of `num_tokens` with `heads` absorbed queries of `dtype` each."""
    # Float32 takes several passes through the matrix unit, and more memory.
    shrink = 2 if jnp.dtype(dtype).itemsize > 2 else 1
    few = max(16, LANES // heads // 16 * 16)
    queries = max(2, PREFILL_ROWS // shrink // heads // few) * few
    queries = min(queries, -(-num_tokens // few) * few)
    least = queries * heads * shrink / PART_ROWS
    parts = min(n for n in range(1, heads + 1) if heads % n == 0 and n >= min(least, heads))
    return PrefillBlocks(queries, few, max(512, page_size), max(256, page_size), 1, parts)


def expanded_prefill_blocks(heads: int, page_size: int, num_tokens: int) -> PrefillBlocks:
    few = EXPANDED_QUERIES // 2
    queries = min(EXPANDED_QUERIES, -(-num_tokens // few) * few)
    return PrefillBlocks(queries, few, max(512, page_size), max(256, page_size), 1, heads)
