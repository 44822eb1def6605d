"""How much the prefill kernel computes on at once.

By the compiler's schedules one choice is as good as any for all generations of TPU: a thousand
queries of a KV head stream past each weight that the matrix unit loads, and two heads' arithmetic
overlaps with each other's matmuls.
"""

from typing import NamedTuple

import jax.numpy as jnp


class PrefillBlocks(NamedTuple):
    """Sizes of the prefill kernel."""

    queries: int  # tokens of a row, a multiple of 16
    few_queries: int  # as above, where a row has less than half of `queries` left; divides it
    keys: int  # a multiple of 128 and of the page size
    part_keys: int  # as above, where masks are needed; divides it
    heads: int  # KV heads whose instructions may overlap; divides the number of KV heads


def prefill_blocks(
    kv_heads: int, group: int, head_dim: int, page_size: int, dtype: jnp.dtype, num_tokens: int
) -> PrefillBlocks:
    """Blocks for `group` queries of each KV head, a cache of `dtype`, a step of `num_tokens`."""
    is_wide = jnp.dtype(dtype).itemsize > 2  # takes several passes through the matrix unit
    few = max(16, 128 // group // 16 * 16)
    # Queries that a matmul streams past its weights: of each head, as memory allows.
    all_rows = (4096 if is_wide else 8192) * 128 // max(head_dim, 128)
    rows = min(512 if is_wide else 1024, all_rows // kv_heads)
    queries = max(2, rows // group // few) * few
    return PrefillBlocks(
        queries=min(queries, -(-num_tokens // few) * few),
        few_queries=few,
        keys=max(512, page_size),
        part_keys=max(256, page_size),
        heads=2 if kv_heads % 2 == 0 and not is_wide else 1,
    )
