"""The gated feed-forward layer, its inner width split over the tensor axis."""

import jax
from flax import nnx

from sgl_jax.layers.linear import Linear


class GatedMLP(nnx.Module):
    """down(silu(gate(x)) * up(x)) (arXiv 2002.05202)."""

    def __init__(self, gate: Linear, up: Linear, down: Linear) -> None:
        """`gate` and `up` are split by their outputs, `down` by its inputs."""
        self.gate = gate
        self.up = up
        self.down = down

    def __call__(self, x: jax.Array) -> jax.Array:
        """x and the result: [T, hidden]."""
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))
