"""The gated feed-forward layer, with its inner width split over the tensor axis."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import jax
from flax import nnx

from sgl_jax.layers.linear import Linear

Activation = Callable[[jax.Array], jax.Array]
# Keys: names in config files; this gelu is the tanh approximation.
ACTIVATIONS: Mapping[str, Activation] = MappingProxyType(
    {"silu": jax.nn.silu, "gelu_pytorch_tanh": jax.nn.gelu}
)


class GatedMLP(nnx.Module):
    """down(activation(gate(x)) * up(x)) (arXiv 2002.05202)."""

    def __init__(self, gate: Linear, up: Linear, down: Linear, activation: Activation) -> None:
        """Declare the layer; `gate` and `up` are split by their outputs, `down` by its inputs."""
        self.gate = gate
        self.up = up
        self.down = down
        self.activation = activation

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map x [T, hidden] to the result [T, hidden]; `down` decides each chip's part of it."""
        return self.down(self._inner(x))

    def own_part(self, x: jax.Array) -> jax.Array:
        """Return this chip's part of the result; the chips' parts sum to the result."""
        return self.down.product(self._inner(x))

    def _inner(self, x: jax.Array) -> jax.Array:
        return self.activation(self.gate(x)) * self.up(x)
