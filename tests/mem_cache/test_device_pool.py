"""The KV pool: its bytes, its shape, and where its parts lie."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from sgl_jax.mem_cache.device_pool import KVPoolLayout, kv_absmax, make_kv_pool

LAYOUT = KVPoolLayout(
    num_layers=3, num_kv_heads=4, page_size=8, head_dim=16, dtype=jnp.dtype("bfloat16")
)


def test_a_page_counts_keys_and_values_of_all_layers_and_heads():
    assert LAYOUT.page_bytes == 3 * 2 * 4 * 8 * 16 * 2


def test_each_device_holds_its_ranks_pages_and_its_share_of_the_heads():
    mesh = Mesh(np.array(jax.devices("cpu")[:4]).reshape(2, 2), ("data", "tensor"))
    pool = make_kv_pool(LAYOUT, num_pages=5, mesh=mesh)
    assert pool.shape == (3, 10, 8, 8, 16)
    assert pool.nbytes == 10 * LAYOUT.page_bytes
    assert {shard.data.shape for shard in pool.addressable_shards} == {(3, 5, 4, 8, 16)}
    assert not np.asarray(pool, np.float32).any()


def test_keys_and_values_of_64_share_a_row_of_128():
    """A TPU would pad rows of 64 to 128, and hold half as many tokens."""
    layout = LAYOUT._replace(head_dim=64)
    mesh = Mesh(np.array(jax.devices("cpu")[:2]).reshape(1, 2), ("data", "tensor"))
    pool = make_kv_pool(layout, num_pages=5, mesh=mesh)
    assert pool.shape == (3, 5, 4, 8, 128)
    assert pool.nbytes == 5 * layout.page_bytes
    assert {shard.data.shape for shard in pool.addressable_shards} == {(3, 5, 2, 8, 128)}


@pytest.mark.parametrize("head_dim", [16, 64])
def test_the_greatest_k_and_v_of_each_head_are_found_wherever_chips_keep_them(head_dim):
    layout = LAYOUT._replace(head_dim=head_dim, dtype=jnp.dtype("float32"))
    mesh = Mesh(np.array(jax.devices("cpu")[:4]).reshape(2, 2), ("data", "tensor"))
    pool = np.zeros(make_kv_pool(layout, num_pages=5, mesh=mesh).shape, np.float32)
    pool[:, [0, 5]] = np.nan  # the null pages, of which nothing is read
    expected = np.arange(1, 2 * 3 * 4 + 1, dtype=np.float32).reshape(2, 3, 4)
    for kind, layer, head in np.ndindex(expected.shape):
        if head_dim == 64:
            slot, lane = head, 64 * kind + 7
        else:  # each chip has two heads: their K, then their V
            slot, lane = 4 * (head // 2) + 2 * kind + head % 2, 7
        pool[layer, 1 + head, slot, 3, lane] = -expected[kind, layer, head]
        pool[layer, 6, slot, 2, lane] = 0.5
    np.testing.assert_array_equal(kv_absmax(jnp.asarray(pool), layout, mesh), expected)
