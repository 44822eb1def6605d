"""The gated feed-forward layer, its inner width split over the tensor axis."""

import jax
from flax import nnx
from jax.typing import DTypeLike

from sgl_jax.layers.layer_weights import project
from sgl_jax.layers.mesh_axes import TENSOR_AXIS, sum_over_tensor
from sgl_jax.layers.parameter import parameter


class GatedMLP(nnx.Module):
    """down(silu(gate(x)) * up(x)) (arXiv 2002.05202)."""

    def __init__(self, hidden_size: int, intermediate_size: int, dtype: DTypeLike) -> None:
        self.gate = parameter((hidden_size, intermediate_size), dtype, None, TENSOR_AXIS)
        self.up = parameter((hidden_size, intermediate_size), dtype, None, TENSOR_AXIS)
        self.down = parameter((intermediate_size, hidden_size), dtype, TENSOR_AXIS)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x and the result: [T, hidden]."""
        inner = jax.nn.silu(project(x, self.gate)) * project(x, self.up)
        return sum_over_tensor(project(inner, self.down))
