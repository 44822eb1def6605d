"""Blocks of tokens, and their shares on the chips of a rank."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from sgl_jax.layers.mesh_axes import scatter_sum
from sgl_jax.layers.token_blocks import block_sizes, join_blocks, split_blocks


@pytest.mark.parametrize(
    ("num_tokens", "num_chips", "sizes"),
    [
        (2048, 8, (512, 512, 512, 512)),
        (2176, 8, (640, 512, 512, 512)),
        (2048, 4, (512, 512, 512, 512)),
        (64, 2, (32, 32)),
        (64, 4, (64,)),
    ],
)
def test_a_chips_share_of_each_block_is_whole_tiles(num_tokens, num_chips, sizes):
    assert block_sizes(num_tokens, num_chips) == sizes
    assert sum(sizes) == num_tokens
    assert all(size % (16 * num_chips) == 0 for size in sizes)


@pytest.mark.parametrize("num_tokens", [2049, 2056, 100, 8])
def test_tokens_that_cannot_be_dealt_out_have_no_blocks(num_tokens):
    assert block_sizes(num_tokens, 8) == ()


def test_blocks_are_the_rows_in_their_order():
    x = jnp.arange(96.0).reshape(48, 2)
    blocks = split_blocks(x, (32, 16))
    assert [len(block) for block in blocks] == [32, 16]
    np.testing.assert_array_equal(join_blocks(blocks), x)


@pytest.mark.parametrize("num_chips", [1, 2, 4])
def test_each_chip_has_its_rows_of_the_sum(num_chips):
    mesh = Mesh(np.array(jax.devices()[:num_chips]).reshape(1, -1), ("data", "tensor"))
    parts = jnp.arange(num_chips * 8.0 * 3).reshape(num_chips * 8, 3)
    run = jax.shard_map(
        scatter_sum, mesh=mesh, in_specs=P("tensor"), out_specs=P("tensor"), check_vma=False
    )
    np.testing.assert_array_equal(run(parts), parts.reshape(num_chips, 8, 3).sum(0))
