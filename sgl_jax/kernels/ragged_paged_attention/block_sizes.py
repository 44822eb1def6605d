"""How much KV a TPU kernel computes on at once."""

from typing import NamedTuple

import jax.numpy as jnp

VMEM_LIMIT_BYTES = 48 << 20  # of the 64 MiB or more that a chip has


class DecodeBlocks(NamedTuple):
    """Sizes of the decode kernel, in keys."""

    block_keys: int  # of one DMA buffer, of which there are two
    part_keys: int  # of a part of a block where masks are needed


def decode_blocks(cache_shape: tuple[int, ...], dtype: jnp.dtype) -> DecodeBlocks:
    """Sizes for a cache [layers, pages, 2 * kv_heads, page_size, head_dim]."""
    return DecodeBlocks(1024, 256)
