"""The gated feed-forward layer, its inner width split over the tensor axis."""

import jax
from flax import nnx
from jax.typing import DTypeLike

from sgl_jax.layers.mesh_axes import TENSOR_AXIS, sum_over_tensor
from sgl_jax.layers.parameter import parameter


class GatedMLP(nnx.Module):
    """down(silu(gate(x)) * up(x)) (arXiv 2002.05202), gate and up in one product."""

    def __init__(self, hidden_size: int, intermediate_size: int, dtype: DTypeLike) -> None:
        self.gate_up = parameter(
            (hidden_size, 2, intermediate_size), dtype, None, None, TENSOR_AXIS
        )
        self.down = parameter((intermediate_size, hidden_size), dtype, TENSOR_AXIS)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x and the result: [T, hidden]."""
        hidden_size, _, width = self.gate_up.shape
        gate_up = x @ self.gate_up[...].reshape(hidden_size, 2 * width)
        inner = jax.nn.silu(gate_up[:, :width]) * gate_up[:, width:]
        return sum_over_tensor(inner @ self.down[...])
