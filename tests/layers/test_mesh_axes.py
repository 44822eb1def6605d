"""Sums and shares of arrays over the chips of a rank."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from sgl_jax.layers.mesh_axes import join_shares, own_share, scatter_sum, sum_over_tensor
from tests.support.long import long_half


@pytest.mark.parametrize(("num_chips", "num_rows"), long_half([1, 2, 4], [1, 3, 8]))
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
