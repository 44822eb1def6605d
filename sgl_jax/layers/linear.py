"""Linear layers and the feed-forward layer of them.

Matrices are declared, split, stored and multiplied only here. A matrix is [in, out], the shape of
its source. `layer_weights` has the layout in memory.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from sgl_jax.kernels.grouped_matmul.interface import GroupedMatmul, GroupMatrices
from sgl_jax.kernels.row_blocks import row_multiply, row_wise
from sgl_jax.layers.layer_weights import use_stacks, use_weight
from sgl_jax.layers.mesh_axes import TENSOR_AXIS, MeshAxes, scatter_sum, sum_over_tensor
from sgl_jax.layers.parameter import parameter
from sgl_jax.layers.quantized_matrix import Quantized, QuantizedExperts, QuantizedMatrix
from sgl_jax.layers.sources import Source

# The side of a matrix that the chips of a rank share: each has all inputs and some of the outputs,
# or some inputs, and then the results of all chips are summed.
Split = Literal["inputs", "outputs", "neither"]


class Linear(nnx.Module):
    """x times a matrix, plus a bias if there is one."""

    def __init__(
        self,
        weight: Source,
        dtype: DTypeLike,
        split: Split = "neither",
        bias: Source | None = None,
        quantized: Quantized | None = None,
        *,
        scatters: bool = False,
    ) -> None:
        """Declare the map. If it `scatters` and splits inputs, a chip gets a share of the sums."""
        by_input = TENSOR_AXIS if split == "inputs" else None
        by_output = TENSOR_AXIS if split == "outputs" else None
        self.weight: nnx.Param[Any] | QuantizedMatrix
        if quantized is None:
            self.weight = parameter(weight, dtype, by_input, by_output)
        else:
            self.weight = QuantizedMatrix(weight, dtype, by_input, by_output, quantized)
        self.bias = None if bias is None else parameter(bias, dtype, by_output)
        self.split = split
        self.scatters = scatters

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map x [T, in] to [T, out], or to this chip's columns if the outputs are split.

        If it `scatters`, the result is this chip's share of the tokens, see `own_share`.
        """
        out = self.product(x)
        if self.split == "inputs":
            out = scatter_sum(out) if self.scatters else sum_over_tensor(out)
        return out if self.bias is None else out + self.bias[...]

    def product(self, x: jax.Array) -> jax.Array:
        """Multiply x with this chip's part of the matrix, without the bias."""
        if isinstance(self.weight, QuantizedMatrix):
            return self.weight.product(x)
        return _product(x, self.weight)


def _product(x: jax.Array, weight: nnx.Param[Any], *, casts: bool = False) -> jax.Array:
    """Multiply x [rows, in] with the current layer's matrix [in, out], row-wise.

    If it `casts`, x may have another dtype than the matrix.
    """

    def of_rows(rows: jax.Array) -> jax.Array:
        def multiply(matrix: jax.Array) -> jax.Array:
            return jnp.matmul(rows.astype(matrix.dtype) if casts else rows, matrix)

        return use_weight(weight, multiply)

    if (multiply_rows := row_multiply()) is None:
        result: jax.Array = row_wise(of_rows, x)
        return result

    def by_kernel(stack: jax.Array, layer: jax.Array) -> jax.Array:
        own = x.astype(stack.dtype)
        return multiply_rows(own, stack, layer, transposed=False, dtype=own.dtype)

    return use_stacks((weight,), by_kernel)


class ExpertLinear(nnx.Module):
    """A matrix for each expert: [experts, out, in] if `transposed`, else [experts, in, out].

    The axis before the last is split over the tensor axis, or the experts over `expert_axes`, whole
    experts to each chip. If not `transposed`, results only sum this chip's inputs or experts: the
    caller sums them over the chips, and then adds their biases, which each chip has.
    """

    def __init__(
        self,
        weight: Source,
        dtype: DTypeLike,
        multiply: GroupedMatmul,
        *,
        transposed: bool,
        bias: Source | None = None,
        expert_axes: MeshAxes = None,
        quantized: Quantized | None = None,
    ) -> None:
        """Declare the matrices; `bias` is [experts, out]."""
        by_width = None if expert_axes else TENSOR_AXIS
        self.weight: nnx.Param[Any] | QuantizedExperts
        if quantized is None:
            self.weight = parameter(
                weight, dtype, expert_axes, by_width, read="experts", by_expert=True
            )
        else:
            self.weight = QuantizedExperts(weight, dtype, expert_axes, by_width, quantized)
        bias_axes = (expert_axes, by_width) if transposed else (None, None)
        self.bias = (
            None if bias is None else parameter(bias, dtype, *bias_axes, by_expert=transposed)
        )
        self.expert_axes = expert_axes
        self.row_size = weight.shape[-1]
        self.multiply = multiply
        self.transposed = transposed

    def __call__(self, lines: jax.Array, group_sizes: jax.Array) -> jax.Array:
        """Map lines [n, in], group_sizes[e] of them for this chip's expert e, to [n, out].

        Results are arbitrary after the last group.
        """
        if isinstance(self.weight, QuantizedExperts):
            own = self.weight
            return own.product(self.multiply, lines, group_sizes, transposed=self.transposed)

        def multiply(values: jax.Array, layer: jax.Array) -> jax.Array:
            matrices = GroupMatrices(values)
            return self.multiply(lines, matrices, layer, group_sizes, transposed=self.transposed)

        return use_stacks((self.weight,), multiply)

    def biases(self, shares: jax.Array) -> jax.Array:
        """Return each line's experts' biases, [n, out], times its shares of them, [n, experts].

        This is a product, since a TPU is slow at gathering rows.
        """
        assert self.bias is not None
        return _product(shares, self.bias, casts=True)


Activation = Callable[[jax.Array], jax.Array]


def relu_squared(x: jax.Array) -> jax.Array:
    """Return max(x, 0)^2 (arXiv 2109.08668)."""
    return jnp.square(jax.nn.relu(x))


# Keys: names in config files; this gelu is the tanh approximation.
ACTIVATIONS: Mapping[str, Activation] = MappingProxyType(
    {"silu": jax.nn.silu, "gelu_pytorch_tanh": jax.nn.gelu, "relu2": relu_squared}
)


class GatedMLP(nnx.Module):
    """down(activation(gate(x)) * up(x)) (arXiv 2002.05202), or down(activation(up(x)))."""

    def __init__(
        self, gate: Linear | None, up: Linear, down: Linear, activation: Activation
    ) -> None:
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
        if self.gate is None:
            return self.activation(self.up(x))
        return self.activation(self.gate(x)) * self.up(x)
