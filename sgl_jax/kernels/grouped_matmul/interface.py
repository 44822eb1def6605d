"""The grouped matmul of mixtures of experts, and its implementations in XLA."""

from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from sgl_jax.core.layer_configs import WeightFormat
from sgl_jax.kernels.quantized_matmul.numbers import dequantized

BLOCK_LINES = 32  # lines in a block of a CPU's loops, which only visit lines and groups in use


class GroupMatrices(NamedTuple):
    """One chip's part of a matrix for each group and layer, as floats or quantized.

    A matrix is stored as [k, m] or, for `transposed` products, as [m, k]; its scales are the same
    for both.
    """

    values: jax.Array  # [layers, groups, k, m]
    scales: jax.Array | None = None  # [layers, groups, groups of inputs, m]; None: floats
    zero_points: jax.Array | None = None  # same shape as scales
    weight: WeightFormat | None = None  # None: floats

    @property
    def scales_outputs(self) -> bool:
        """Return True if each output has one scale for all inputs; it can multiply the result."""
        return self.scales is not None and self.zero_points is None and self.scales.shape[2] == 1

    def numbers(
        self, layer: jax.Array, group: jax.Array | slice, dtype: DTypeLike, *, transposed: bool
    ) -> jax.Array:
        """Return one matrix as numbers of `dtype`, or all of a layer if `group` is a slice."""
        if self.weight is None or self.scales is None:
            return self.values[layer, group]

        values, scales = self.values[layer, group], self.scales[layer, group]
        zero_points = None if self.zero_points is None else self.zero_points[layer, group]
        if not transposed:
            return dequantized(values, scales, zero_points, self.weight, dtype)
        values = values.swapaxes(-2, -1)
        return dequantized(values, scales, zero_points, self.weight, dtype).swapaxes(-2, -1)


class GroupedMatmul(Protocol):
    """Multiply consecutive groups of lines with one matrix per group of the current layer."""

    def __call__(
        self,
        lines: jax.Array,
        matrices: GroupMatrices,
        layer: jax.Array,
        group_sizes: jax.Array,
        *,
        transposed: bool,
    ) -> jax.Array:
        """Multiply with the shapes of one chip.

        Args:
            lines: [n, k], the first group_sizes[0] lines of the first group, and so on.
            matrices: the matrices of all layers.
            layer: int32 [], the layer's index in the matrices.
            group_sizes: int32 [groups], with a sum of at most n.
            transposed: whether matrices are stored as [out, in].

        Returns:
            [n, m] in the dtype of `lines`; arbitrary for lines after the last group.
        """
        ...


def blocked_grouped_matmul(
    lines: jax.Array,
    matrices: GroupMatrices,
    layer: jax.Array,
    group_sizes: jax.Array,
    *,
    transposed: bool,
) -> jax.Array:
    """Implement `GroupedMatmul` for a CPU, with loops over the groups and lines in use.

    XLA's ragged product would multiply every line with every matrix there.
    A block overruns the end of its group. This is harmless: groups are processed in ascending
    order, and later groups overwrite these lines.
    """
    num_lines = lines.shape[0]
    starts = jnp.cumsum(group_sizes) - group_sizes
    padded = jnp.pad(lines, ((0, BLOCK_LINES), (0, 0)))
    contracted = ((1,), (1 if transposed else 0,))

    def group(index: jax.Array, out: jax.Array) -> jax.Array:
        def block(number: jax.Array, out: jax.Array) -> jax.Array:
            start = starts[index] + number * BLOCK_LINES
            some = lax.dynamic_slice_in_dim(padded, start, BLOCK_LINES)
            matrix = matrices.numbers(layer, index, lines.dtype, transposed=transposed)
            product = lax.dot_general(some, matrix, (contracted, ((), ())))
            return lax.dynamic_update_slice_in_dim(out, product, start, axis=0)

        return lax.fori_loop(0, -(-group_sizes[index] // BLOCK_LINES), block, out)

    shape = matrices.values.shape
    out = jnp.zeros((num_lines + BLOCK_LINES, shape[2 if transposed else 3]), lines.dtype)
    return lax.fori_loop(0, shape[1], group, out)[:num_lines]


def ragged_grouped_matmul(
    lines: jax.Array,
    matrices: GroupMatrices,
    layer: jax.Array,
    group_sizes: jax.Array,
    *,
    transposed: bool,
) -> jax.Array:
    """Implement `GroupedMatmul` with XLA's ragged product."""
    own = matrices.numbers(layer, slice(None), lines.dtype, transposed=transposed)
    contracted = ((1,), (2 if transposed else 1,))
    dimensions = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(contracted, ((), ())),
        lhs_ragged_dimensions=(0,),
        rhs_group_dimensions=(0,),
    )
    return lax.ragged_dot_general(lines, own, group_sizes, dimensions)
