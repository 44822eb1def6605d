"""Block sizes of decode and prefill, for each TPU generation.

Both tables come from `benchmarks/kernels/tune.py`, which compares the compiler's schedules without
a TPU.

Decode: large blocks cost fewer instructions for each key, and keep more bytes in flight; small
parts waste less where a row ends.

Prefill: a thousand queries of a KV head stream past each weight that the matrix unit loads, and two
heads' arithmetic overlaps with each other's matmuls. The script compares that with larger sizes:
it is hardly ever worse. Twice as many queries make the loop 7 to 13 % shorter on v6e and tpu7x, but
rows that do not fill such blocks lose more than that. Four heads gain at most 4 %, and take twice
as long to compile.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import jax.numpy as jnp

from sgl_jax.kernels.tpu_chip import LANES, device_kind

MAX_BLOCK_BYTES = 4 << 20  # limit for one of the kernel's two buffers
INVARIANT_QUERIES = 16  # tokens to compute at once, if results must not depend on the batch


class DecodeBlocks(NamedTuple):
    """Block sizes of the decode kernel, in keys; each is at least a page."""

    block_keys: int  # keys in one of the two DMA buffers
    part_keys: int  # keys in a part of a block that needs masks


_DEFAULT = DecodeBlocks(1024, 256)
# Keys: device kind, and KV heads on a chip.
_DECODE: Mapping[tuple[str, int], DecodeBlocks] = MappingProxyType(
    {
        ("TPU v5 lite", 1): DecodeBlocks(2048, 128),
        ("TPU v5 lite", 2): DecodeBlocks(2048, 128),
        ("TPU v5 lite", 4): DecodeBlocks(1024, 128),
        ("TPU v5 lite", 8): DecodeBlocks(1024, 128),
        ("TPU v6 lite", 1): DecodeBlocks(2048, 256),
        ("TPU v6 lite", 2): DecodeBlocks(2048, 128),
        ("TPU v6 lite", 4): DecodeBlocks(2048, 128),
        ("TPU v6 lite", 8): DecodeBlocks(1024, 256),
        ("TPU v5", 1): DecodeBlocks(2048, 256),
        ("TPU v5", 2): DecodeBlocks(2048, 256),
        ("TPU v5", 4): DecodeBlocks(2048, 256),
        ("TPU v5", 8): DecodeBlocks(1024, 256),
        ("TPU7x", 1): DecodeBlocks(2048, 256),
        ("TPU7x", 2): DecodeBlocks(2048, 256),
        ("TPU7x", 4): DecodeBlocks(2048, 256),
        ("TPU7x", 8): DecodeBlocks(1024, 256),
    }
)


def decode_blocks(kv_heads: int, token_bytes: int) -> DecodeBlocks:
    """Return the sizes for the target chip, where a token's K and V take `token_bytes` bytes."""
    blocks = _DECODE.get((device_kind(), kv_heads), _DEFAULT)
    while blocks.block_keys * token_bytes > MAX_BLOCK_BYTES and blocks.block_keys > 256:
        blocks = DecodeBlocks(blocks.block_keys // 2, blocks.part_keys)
    return DecodeBlocks(blocks.block_keys, min(blocks.part_keys, blocks.block_keys))


class PrefillBlocks(NamedTuple):
    """Sizes of the prefill kernel."""

    queries: int  # tokens of a row, a multiple of 16
    few_queries: int  # tokens of a block if less than half of `queries` is left; divides `queries`
    keys: int  # a multiple of 128 and of the page size
    part_keys: int  # keys in a part that needs masks; divides `keys`
    heads: int  # KV heads with overlapping instructions; divides the number of KV heads
    parts: int = 1  # parts of each KV head's queries, computed as if each had a KV head
    # All queries by the same instructions, `few_queries` at a time, and all keys in masked parts:
    # a query's result does not depend on its place or on other queries.
    is_invariant: bool = False

    def masked_heads(self, kv_heads: int) -> int:
        """Return `heads` for masked keys, with about as many instructions."""
        most = self.heads * (self.keys // self.part_keys)
        return max(n for n in range(1, most + 1) if kv_heads % n == 0)


class Sizes(NamedTuple):
    """The sizes from which blocks are derived, for groups of any size."""

    rows: int  # rows of a KV head's matrix of queries: tokens, times the queries of a head
    keys: int
    heads: int


# By device kind and KV heads on a chip: better sizes than the formula's, for bfloat16 and heads of
# up to 128.
_PREFILL: Mapping[tuple[str, int], Sizes] = MappingProxyType({("TPU v5", 4): Sizes(1024, 512, 4)})


def prefill_blocks(
    kv_heads: int, group: int, head_dim: int, page_size: int, dtype: jnp.dtype, num_tokens: int
) -> PrefillBlocks:
    """Return blocks for `group` queries per KV head, a cache of `dtype`, a step of `num_tokens`."""
    sizes = default_sizes(kv_heads, head_dim, dtype)
    if jnp.dtype(dtype) == jnp.bfloat16 and head_dim <= LANES:
        sizes = _PREFILL.get((device_kind(), kv_heads), sizes)
    return blocks_of(sizes, group, page_size, num_tokens)


def default_sizes(kv_heads: int, head_dim: int, dtype: jnp.dtype) -> Sizes:
    """Return the sizes for chips, dtypes and heads outside the table."""
    is_wide = jnp.dtype(dtype).itemsize > 2  # takes several passes through the matrix unit
    # Queries of each head that a matmul streams past its weights, as memory allows.
    all_rows = (4096 if is_wide else 8192) * LANES // max(head_dim, LANES)
    return Sizes(
        rows=min(512 if is_wide else 1024, all_rows // kv_heads),
        keys=512,
        heads=2 if kv_heads % 2 == 0 and not is_wide else 1,
    )


def invariant_blocks(
    kv_heads: int, group: int, head_dim: int, page_size: int, dtype: jnp.dtype
) -> PrefillBlocks:
    """Return blocks that serve decode and prefill rows of any step alike."""
    sizes, few = default_sizes(kv_heads, head_dim, dtype), INVARIANT_QUERIES
    queries = max(1, sizes.rows // group // few) * few
    keys = max(256, page_size)
    return PrefillBlocks(queries, few, keys, keys, sizes.heads, is_invariant=True)


def blocks_of(sizes: Sizes, group: int, page_size: int, num_tokens: int) -> PrefillBlocks:
    """Return blocks of these sizes, no larger than a step of `num_tokens` needs."""
    few = max(16, 128 // group // 16 * 16)
    queries = max(2, sizes.rows // group // few) * few
    return PrefillBlocks(
        queries=min(queries, -(-num_tokens // few) * few),
        few_queries=few,
        keys=max(sizes.keys, page_size),
        part_keys=max(256, page_size),
        heads=sizes.heads,
    )
