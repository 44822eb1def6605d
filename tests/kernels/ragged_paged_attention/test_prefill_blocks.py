"""How much the prefill kernel computes on at once."""

import jax.numpy as jnp
import pytest

from sgl_jax.kernels.ragged_paged_attention import prefill_blocks as module
from sgl_jax.kernels.ragged_paged_attention.prefill_blocks import (
    PrefillBlocks,
    Sizes,
    blocks_of,
    default_sizes,
    prefill_blocks,
)

BF16, F32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)


def test_a_chip_that_was_tuned_for_has_sizes_of_its_own(monkeypatch):
    monkeypatch.setattr(module, "device_kind", lambda: "some TPU")
    monkeypatch.setattr(module, "_PREFILL", {("some TPU", 4): Sizes(2048, 1024, 4)})
    tuned = prefill_blocks(4, 4, 128, 128, BF16, 4096)
    assert tuned == PrefillBlocks(512, 32, 1024, 256, heads=4)
    # Other heads, and more memory for each of them, are not what was tuned.
    for kv_heads, head_dim, dtype in ((2, 128, BF16), (4, 256, BF16), (4, 128, F32)):
        blocks = prefill_blocks(kv_heads, 4, head_dim, 128, dtype, 4096)
        assert blocks == blocks_of(default_sizes(kv_heads, head_dim, dtype), 4, 128, 4096)


@pytest.mark.parametrize(("kind", "kv_heads"), [*module._PREFILL, ("unknown", 8), ("unknown", 3)])
@pytest.mark.parametrize("group", [1, 4, 7, 16])
@pytest.mark.parametrize("page_size", [16, 256])
def test_blocks_are_whole_parts_and_whole_pages(kind, kv_heads, group, page_size, monkeypatch):
    monkeypatch.setattr(module, "device_kind", lambda: kind)
    for num_tokens in (1, 64, 2048):
        blocks = prefill_blocks(kv_heads, group, 128, page_size, BF16, num_tokens)
        assert blocks.queries % blocks.few_queries == 0
        assert blocks.few_queries % 16 == 0
        assert blocks.keys % blocks.part_keys == 0
        assert blocks.part_keys % page_size == 0
        assert kv_heads % blocks.heads == 0


def test_a_small_step_has_no_larger_block_than_it_needs():
    assert prefill_blocks(8, 4, 128, 16, BF16, 40).queries == 64
