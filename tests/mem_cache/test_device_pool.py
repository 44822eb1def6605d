"""The KV pool: its bytes, its shape, and where its parts lie."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from sgl_jax.core.layer_configs import GatedDeltaConfig, StateSpaceConfig
from sgl_jax.mem_cache.device_pool import (
    KVPoolLayout,
    StatePoolLayout,
    kv_absmax,
    kv_pool_shape,
    make_zeros,
    state_pool_shapes,
)

LAYOUT = KVPoolLayout(
    num_layers=3, num_kv_heads=4, page_size=8, head_dim=16, dtype=jnp.dtype("bfloat16")
)


def test_a_page_counts_keys_and_values_of_all_layers_and_heads():
    assert LAYOUT.page_bytes == 3 * 2 * 4 * 8 * 16 * 2


def test_each_device_holds_its_ranks_pages_and_its_share_of_the_heads():
    mesh = Mesh(np.array(jax.devices("cpu")[:4]).reshape(2, 2), ("data", "tensor"))
    pool = make_zeros(kv_pool_shape(LAYOUT, num_pages=5, mesh=mesh))
    assert pool.shape == (3, 10, 8, 8, 16)
    assert pool.nbytes == 10 * LAYOUT.page_bytes  # type: ignore[attr-defined]
    assert {shard.data.shape for shard in pool.addressable_shards} == {(3, 5, 4, 8, 16)}  # type: ignore[attr-defined]
    assert not np.asarray(pool, np.float32).any()


def test_keys_and_values_of_64_share_a_row_of_128():
    """A TPU would pad rows of 64 to 128, and hold half as many tokens."""
    layout = LAYOUT._replace(head_dim=64)
    mesh = Mesh(np.array(jax.devices("cpu")[:2]).reshape(1, 2), ("data", "tensor"))
    pool = make_zeros(kv_pool_shape(layout, num_pages=5, mesh=mesh))
    assert pool.shape == (3, 5, 4, 8, 128)
    assert pool.nbytes == 5 * layout.page_bytes  # type: ignore[attr-defined]
    assert {shard.data.shape for shard in pool.addressable_shards} == {(3, 5, 2, 8, 128)}  # type: ignore[attr-defined]


@pytest.mark.parametrize("head_dim", [16, 64])
def test_the_greatest_k_and_v_of_each_head_are_found_wherever_chips_keep_them(head_dim):
    layout = LAYOUT._replace(head_dim=head_dim, dtype=jnp.dtype("float32"))
    mesh = Mesh(np.array(jax.devices("cpu")[:4]).reshape(2, 2), ("data", "tensor"))
    pool = np.zeros(kv_pool_shape(layout, num_pages=5, mesh=mesh).shape, np.float32)
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


STATES = StatePoolLayout(
    3, GatedDeltaConfig(4, 8, 16, 24, 4), jnp.dtype("bfloat16"), jnp.dtype("float32")
)


def test_a_slot_counts_the_states_of_all_layers_and_heads():
    assert STATES.slot_bytes == 3 * (3 * (4 * 2 * 16 + 8 * 24) * 2 + 8 * 16 * 24 * 4)


def test_a_slot_of_a_large_model_takes_what_thousands_of_tokens_do():
    qwen3_next = STATES._replace(num_layers=36, recurrence=GatedDeltaConfig(16, 32, 128, 128, 4))
    assert qwen3_next.slot_bytes / 24_576 == pytest.approx(3_144)


def test_heads_of_a_state_space_model_fill_rows_of_128_side_by_side():
    one_group = STATES._replace(recurrence=StateSpaceConfig(1, 48, 128, 64, 4))
    assert one_group.slot_shapes(tp_size=1).recurrent == (24, 128, 128)
    assert one_group.slot_bytes == 3 * (3 * (48 * 64 + 2 * 128) * 2 + 48 * 64 * 128 * 4)
    # Each chip has its heads' values, and all keys and queries.
    assert one_group.slot_shapes(tp_size=2).conv == (2 * 3 * (12 + 2), 128)
    odd = STATES._replace(recurrence=StateSpaceConfig(16, 48, 128, 64, 4))
    assert odd.slot_shapes(tp_size=8).recurrent == (48, 128, 64)
    assert odd.slot_shapes(tp_size=8).conv == (8 * 3 * (3 + 2 * 2), 128)


def test_inputs_of_a_convolution_lie_in_rows_of_128_if_those_of_a_chip_fill_them():
    layout = STATES._replace(recurrence=GatedDeltaConfig(16, 32, 128, 128, 4))
    assert layout.slot_shapes(tp_size=1).conv == (3 * 64, 128)
    assert layout.slot_shapes(tp_size=8).conv == (8 * 3 * 8, 128)


def test_each_device_holds_its_ranks_slots_and_its_share_of_the_heads():
    mesh = Mesh(np.array(jax.devices("cpu")[:4]).reshape(2, 2), ("data", "tensor"))
    pools = make_zeros(state_pool_shapes(STATES, num_slots=5, mesh=mesh))
    assert sum(pool.nbytes for pool in pools) == 10 * STATES.slot_bytes
    assert (pools.conv.shape, pools.recurrent.shape) == ((3, 10, 6, 160), (3, 10, 8, 16, 24))
    shapes = [{shard.data.shape for shard in pool.addressable_shards} for pool in pools]
    assert shapes == [{(3, 5, 3, 160)}, {(3, 5, 4, 16, 24)}]
    assert (pools.conv.dtype, pools.recurrent.dtype) == (jnp.bfloat16, jnp.float32)
    assert not any(np.asarray(pool, np.float32).any() for pool in pools)


def test_a_state_is_copied_in_all_layers_and_leaves_other_slots_alone():
    mesh = Mesh(np.array(jax.devices("cpu")[:1]).reshape(1, 1), ("data", "tensor"))
    pools = make_zeros(state_pool_shapes(STATES, num_slots=5, mesh=mesh))
    pools = jax.tree.map(lambda x: jnp.arange(x.size, dtype=x.dtype).reshape(x.shape), pools)
    copied = jax.jit(type(pools).copied)(pools, jnp.int32(3), jnp.int32(1))
    for before, after in zip(pools, copied, strict=True):
        expected = np.array(before)
        expected[:, 1] = expected[:, 3]
        np.testing.assert_array_equal(after, expected)
