"""The matrices of a grouped product: floats or quantized."""

from typing import NamedTuple

import jax
from jax.typing import DTypeLike

from sgl_jax.core.quantization import WeightFormat
from sgl_jax.kernels.quantized_matmul.numbers import dequantized


class GroupMatrices(NamedTuple):
    """One chip's part of a matrix for each group and layer, as floats or quantized.

    A matrix is stored as [k, m] or, for `transposed` products, as [m, k]. Its scales have one entry
    per group of inputs along k.
    """

    values: jax.Array  # [layers, groups, k, m]
    scales: jax.Array | None = None  # [layers, groups, groups of inputs, m]; None: floats
    zero_points: jax.Array | None = None  # same shape as scales
    weight: WeightFormat | None = None  # None: floats

    @property
    def scales_outputs(self) -> bool:
        """Return True if each output has one scale for all inputs; it can multiply the result."""
        if self.scales is None or self.zero_points is not None:
            return False
        pairs = zip(self.scales.shape, self.values.shape, strict=True)
        return [own for own, size in pairs if own != size] == [1]

    def numbers(
        self, layer: jax.Array, group: jax.Array | slice, dtype: DTypeLike, *, transposed: bool
    ) -> jax.Array:
        """Return one matrix as numbers of `dtype`, or all of a layer if `group` is a slice."""
        if self.weight is None or self.scales is None:
            return self.values[layer, group]

        def own(part: jax.Array) -> jax.Array:
            part = part[layer, group]
            return part.swapaxes(-2, -1) if transposed else part

        zero_points = None if self.zero_points is None else own(self.zero_points)
        numbers = dequantized(own(self.values), own(self.scales), zero_points, self.weight, dtype)
        return numbers.swapaxes(-2, -1) if transposed else numbers
