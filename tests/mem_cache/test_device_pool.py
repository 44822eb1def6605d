"""The KV pool: its bytes, its shape, and where its parts lie."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from sgl_jax.mem_cache.device_pool import KVPoolLayout, make_kv_pool

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
