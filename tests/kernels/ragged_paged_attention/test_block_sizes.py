"""How much the decode kernel computes on at once."""

import pytest

from sgl_jax.kernels.ragged_paged_attention import block_sizes
from sgl_jax.kernels.ragged_paged_attention.block_sizes import (
    MAX_BLOCK_BYTES,
    DecodeBlocks,
    decode_blocks,
)


def test_a_chip_that_was_tuned_for_has_sizes_of_its_own(monkeypatch):
    monkeypatch.setattr(block_sizes, "device_kind", lambda: "some TPU")
    tuned = {("some TPU", 4): DecodeBlocks(512, 64)}
    monkeypatch.setattr(block_sizes, "_DECODE", tuned)
    assert decode_blocks(4, token_bytes=2048) == DecodeBlocks(512, 64)
    assert decode_blocks(3, token_bytes=1536) == block_sizes._DEFAULT


@pytest.mark.parametrize(("kind", "kv_heads"), [*block_sizes._DECODE, ("unknown", 8)])
@pytest.mark.parametrize("head_bytes", [512, 1024, 2048])
def test_a_block_fits_its_buffer_and_holds_whole_parts(kind, kv_heads, head_bytes, monkeypatch):
    """K and V of a head take 512 bytes in bfloat16 with a head_dim of 128, 2048 at most."""
    monkeypatch.setattr(block_sizes, "device_kind", lambda: kind)
    blocks = decode_blocks(kv_heads, kv_heads * head_bytes)
    assert blocks.block_keys * kv_heads * head_bytes <= MAX_BLOCK_BYTES
    assert blocks.block_keys % blocks.part_keys == 0
