"""How much KV the decode kernel computes on at once, for each generation of TPU.

Large blocks cost fewer instructions for each key, and keep more bytes in flight; small parts waste
less where a row ends. The table comes from `scripts/tune_kernel.py`, which weighs both by the
compiler's schedules, without a TPU.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from sgl_jax.kernels.tpu_chip import device_kind

MAX_BLOCK_BYTES = 4 << 20  # of one of the kernel's two buffers


class DecodeBlocks(NamedTuple):
    """Sizes of the decode kernel, in keys; a page is the least."""

    block_keys: int  # of one DMA buffer, of which there are two
    part_keys: int  # of a part of a block where masks are needed


_DEFAULT = DecodeBlocks(1024, 256)
# By device kind, and KV heads on a chip.
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
    """Sizes for the chip that is compiled for, of which a token's K and V take `token_bytes`."""
    blocks = _DECODE.get((device_kind(), kv_heads), _DEFAULT)
    while blocks.block_keys * token_bytes > MAX_BLOCK_BYTES and blocks.block_keys > 256:
        blocks = DecodeBlocks(blocks.block_keys // 2, blocks.part_keys)
    return DecodeBlocks(blocks.block_keys, min(blocks.part_keys, blocks.block_keys))
