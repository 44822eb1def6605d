"""Sums and shares of arrays over the chips of a rank."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from sgl_jax.kernels.row_blocks import RowBlocks, invariant_rows
from sgl_jax.layers.mesh_axes import join_shares, own_share, scatter_sum, sum_over_tensor
from tests.support.long import long


@pytest.mark.parametrize("num_chips", [4, *long(1, 2)])
@pytest.mark.parametrize("num_rows", [1, 3, 8])
def test_a_scattered_sum_is_each_chips_share_of_the_sum(num_chips, num_rows):
    mesh = Mesh(np.array(jax.devices()[:num_chips]).reshape(1, -1), ("data", "tensor"))
    parts = jnp.arange(num_chips * num_rows * 8.0).reshape(num_chips * num_rows, 8)

    def run(part):
        share = scatter_sum(part)
        return share, own_share(sum_over_tensor(part)), join_shares(share, num_rows)

    specs = P("tensor"), P("tensor"), P()
    call = jax.shard_map(run, mesh=mesh, in_specs=P("tensor"), out_specs=specs, check_vma=False)
    share, expected, joined = call(parts)
    np.testing.assert_array_equal(share, expected)
    np.testing.assert_array_equal(joined, parts.reshape(num_chips, num_rows, 8).sum(0))


@pytest.mark.parametrize("columns", [8, 7])
def test_chips_are_added_in_their_order_at_every_place_if_rows_are_invariant(columns):
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(1, -1), ("data", "tensor"))
    of_chips = np.float32([2.0**24, 1.0, 1.0, -(2.0**24)])  # another order gives another sum
    expected = ((of_chips[0] + of_chips[1]) + of_chips[2]) + of_chips[3]
    assert expected != of_chips.sum(dtype=np.float64)
    parts = np.broadcast_to(of_chips[:, None, None], (4, 6, columns)).reshape(-1, columns)
    call = jax.shard_map(
        sum_over_tensor, mesh=mesh, in_specs=P("tensor"), out_specs=P(), check_vma=False
    )
    with invariant_rows(RowBlocks()):
        program = jax.jit(call).lower(parts).compile()
    assert "all-reduce" not in program.as_text()
    np.testing.assert_array_equal(program(parts), np.full((6, columns), expected))
