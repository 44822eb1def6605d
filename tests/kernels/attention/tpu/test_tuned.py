"""How much decode and prefill compute on at once."""

import jax.numpy as jnp
import pytest

from sgl_jax.kernels.attention.tpu import tuned
from sgl_jax.kernels.attention.tpu.tuned import (
    MAX_BLOCK_BYTES,
    DecodeBlocks,
    PrefillBlocks,
    Sizes,
    blocks_of,
    decode_blocks,
    default_sizes,
    prefill_blocks,
)

BF16, F32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)


def test_prefill_of_a_tuned_chip_has_sizes_of_its_own(monkeypatch):
    monkeypatch.setattr(tuned, "device_kind", lambda: "some TPU")
    monkeypatch.setattr(tuned, "_PREFILL", {("some TPU", 4): Sizes(2048, 1024, 4)})
    blocks = prefill_blocks(4, 4, 128, 128, BF16, 4096)
    assert blocks == PrefillBlocks(512, 32, 1024, 256, heads=4)
    # Other heads, and more memory for each of them, are not what was tuned.
    for kv_heads, head_dim, dtype in ((2, 128, BF16), (4, 256, BF16), (4, 128, F32)):
        blocks = prefill_blocks(kv_heads, 4, head_dim, 128, dtype, 4096)
        assert blocks == blocks_of(default_sizes(kv_heads, head_dim, dtype), 4, 128, 4096)


@pytest.mark.parametrize(("kind", "kv_heads"), [*tuned._PREFILL, ("unknown", 8), ("unknown", 3)])
@pytest.mark.parametrize("group", [1, 4, 7, 16])
@pytest.mark.parametrize("page_size", [16, 256])
def test_blocks_are_whole_parts_and_whole_pages(kind, kv_heads, group, page_size, monkeypatch):
    monkeypatch.setattr(tuned, "device_kind", lambda: kind)
    for num_tokens in (1, 64, 2048):
        blocks = prefill_blocks(kv_heads, group, 128, page_size, BF16, num_tokens)
        assert blocks.queries % blocks.few_queries == 0
        assert blocks.few_queries % 16 == 0
        assert blocks.keys % blocks.part_keys == 0
        assert blocks.part_keys % page_size == 0
        assert kv_heads % blocks.heads == 0


def test_a_small_step_has_no_larger_block_than_it_needs():
    assert prefill_blocks(8, 4, 128, 16, BF16, 40).queries == 64


def test_decode_of_a_tuned_chip_has_sizes_of_its_own(monkeypatch):
    monkeypatch.setattr(tuned, "device_kind", lambda: "some TPU")
    monkeypatch.setattr(tuned, "_DECODE", {("some TPU", 4): DecodeBlocks(512, 64)})
    assert decode_blocks(4, token_bytes=2048) == DecodeBlocks(512, 64)
    assert decode_blocks(3, token_bytes=1536) == tuned._DEFAULT


@pytest.mark.parametrize(("kind", "kv_heads"), [*tuned._DECODE, ("unknown", 8)])
@pytest.mark.parametrize("head_bytes", [512, 1024, 2048])
def test_a_block_fits_its_buffer_and_holds_whole_parts(kind, kv_heads, head_bytes, monkeypatch):
    """K and V of a head take 512 bytes in bfloat16 with a head_dim of 128, 2048 at most."""
    monkeypatch.setattr(tuned, "device_kind", lambda: kind)
    blocks = decode_blocks(kv_heads, kv_heads * head_bytes)
    assert blocks.block_keys * kv_heads * head_bytes <= MAX_BLOCK_BYTES
    assert blocks.block_keys % blocks.part_keys == 0
