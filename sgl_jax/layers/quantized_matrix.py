"""The parameters of quantized matrices, and their products with activations."""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from numpy.typing import NDArray

from sgl_jax.core.layer_configs import Scheme
from sgl_jax.kernels.grouped_matmul.interface import GroupedMatmul, GroupMatrices
from sgl_jax.kernels.quantized_matmul.numbers import (
    QuantizedArrays,
    QuantizedMatmul,
    scale_dtype,
    value_dtype,
)
from sgl_jax.kernels.row_blocks import row_wise
from sgl_jax.layers.layer_weights import use_stacks, use_weight
from sgl_jax.layers.mesh_axes import TENSOR_AXIS, MeshAxes, concatenate_over
from sgl_jax.layers.parameter import Read, parameter
from sgl_jax.layers.sources import Source, Swapped, swapped
from sgl_jax.layers.tensor_keys import Index, MatrixPart, PartKind, Shape, TensorKey, Tensors

_LEAST_GROUP = 8


class Quantized(NamedTuple):
    """A matrix's scheme, and the choices of its mesh and platform."""

    scheme: Scheme
    multiply: QuantizedMatmul
    num_chips: int  # number of chips that share a matrix


class QuantizedMatrix(nnx.Module):
    """A matrix [in, out] as values, scales, and the other arrays of its scheme.

    With an order of inputs, row i of the matrix multiplies input order[i], so that the rows of a
    group are adjacent, which they are not in GPTQ's activation order (arXiv 2210.17323).
    """

    def __init__(
        self,
        source: Source,
        dtype: DTypeLike,
        by_input: str | None,
        by_output: str | None,
        quantized: Quantized,
    ) -> None:
        """Declare the arrays; `by_input` and `by_output` are the mesh axes of inputs and outputs.

        Raises ValueError if a chip's inputs have no whole groups.
        """
        scheme = quantized.scheme
        group = _fitting_group(scheme, source, quantized.num_chips if by_input else 1)
        own = _Parts.declare(source, scheme, dtype, group, (by_input, by_output))
        self.values, self.scales, self.zero_points = own
        order = _shared(source, "order", source.shape[source.input_axis])
        self.order = (
            parameter(order, jnp.int32, by_input, initial="order")
            if scheme.has_input_order
            else None
        )
        input_scale = replace(_shared(source, "input_scale", 1), is_greatest=True)
        self.input_scale = (
            parameter(input_scale, jnp.float32, initial="ones") if scheme.has_input_scale else None
        )
        self.scheme = scheme
        self.multiply = quantized.multiply
        self.is_split_by_input = by_input is not None

    def product(self, x: jax.Array) -> jax.Array:
        """Multiply x [T, in] with this chip's part of the matrix: [T, out] in the dtype of x."""
        if self.order is not None:
            if self.is_split_by_input:
                x = concatenate_over(TENSOR_AXIS, x, axis=1)
            x = use_weight(self.order, partial(jnp.take, x, axis=1))
        input_scale = None if self.input_scale is None else self.input_scale[...]

        def multiply(
            values: jax.Array, scales: jax.Array, zero_points: jax.Array | None, layer: jax.Array
        ) -> jax.Array:
            matrices = QuantizedArrays(values, scales, zero_points, input_scale)

            def product(rows: jax.Array) -> jax.Array:
                return self.multiply(rows, matrices, layer, self.scheme)

            result: jax.Array = row_wise(product, x)
            return result

        return use_stacks((self.values, self.scales, self.zero_points), multiply)


class QuantizedExperts(nnx.Module):
    """A matrix for each expert, as values, scales and zero points; activations stay floats."""

    def __init__(
        self,
        source: Source,
        dtype: DTypeLike,
        by_expert: MeshAxes,
        by_width: str | None,
        quantized: Quantized,
    ) -> None:
        """Declare `source`, [experts, width, inputs] or [experts, width, outputs], its width split.

        Raises ValueError if a chip's inputs have no whole groups, or if the scheme has an order of
        inputs, which differs from expert to expert.
        """
        scheme = quantized.scheme
        if scheme.has_input_order:
            name = next(iter(source.tensors())).name
            raise ValueError(f"{name}: experts in activation order are not supported")
        is_input = source.input_axis == 1
        group = _fitting_group(scheme, source, quantized.num_chips if is_input and by_width else 1)
        axes = (by_expert, by_width, None)
        own = _Parts.declare(source, scheme, dtype, group, axes, read="experts")
        self.values, self.scales, self.zero_points = own
        self.weight = scheme.weight

    def product(
        self, multiply: GroupedMatmul, lines: jax.Array, group_sizes: jax.Array, *, transposed: bool
    ) -> jax.Array:
        """Multiply with `multiply`; see `GroupedMatmul`."""

        def use(
            values: jax.Array, scales: jax.Array, zero_points: jax.Array | None, layer: jax.Array
        ) -> jax.Array:
            matrices = GroupMatrices(values, scales, zero_points, self.weight)
            return multiply(lines, matrices, layer, group_sizes, transposed=transposed)

        return use_stacks((self.values, self.scales, self.zero_points), use)


class _Parts(NamedTuple):
    values: nnx.Param[Any]
    scales: nnx.Param[Any]
    zero_points: nnx.Param[Any] | None

    @classmethod
    def declare(
        cls,
        source: Source,
        scheme: Scheme,
        dtype: DTypeLike,
        group: int | None,
        axes: tuple[MeshAxes, ...],
        read: Read = "all",
    ) -> "_Parts":
        """Declare the parts of `source`, split over mesh `axes`; `group` inputs share a scale.

        Scales and zero points of matrices [experts, out, in] are [experts, groups, out]: a TPU pads
        the last axis to 128 entries, and few groups would be mostly padding.
        """
        by_group = list(axes)
        if group is None:
            by_group[source.input_axis] = None
        values, scales, zero_points = (
            source.quantized(MatrixPart(kind, group))
            for kind in ("values", "scales", "zero_points")
        )
        if source.input_axis == 2:
            scales, zero_points = Swapped(scales), Swapped(zero_points)
            by_group = list(swapped(tuple(by_group)))
        declare = partial(parameter, read=read, by_expert=read == "experts")
        of_values = value_dtype(scheme.weight)
        of_scales = scale_dtype(scheme.weight, dtype, in_groups=group is not None)
        return cls(
            declare(values, of_values, *axes, initial="values"),
            declare(scales, of_scales, *by_group, initial="scales"),
            declare(zero_points, of_values, *by_group, initial="zeros")
            if scheme.has_zero_points
            else None,
        )


@dataclass(frozen=True)
class Shared(Source):
    """A vector that several tensors have in common, such as the order of inputs of q, k and v.

    With `is_greatest`, it is their element-wise maximum; else they must be equal.
    """

    names: tuple[str, ...]
    dims: Shape
    part: MatrixPart
    is_greatest: bool = False

    @property
    def shape(self) -> Shape:
        return self.dims

    def tensors(self, prefix: str = "") -> dict[TensorKey, Shape]:
        return {TensorKey(prefix + name, self.part): self.dims for name in self.names}

    def fill(self, out: NDArray[Any], index: Index, tensors: Tensors, prefix: str = "") -> None:
        """Raise ValueError, with their names, if tensors that must be equal are not."""
        first, *others = self.tensors(prefix)
        out[...] = tensors.read(first, index)
        for other in others:
            found = tensors.read(other, index)
            if self.is_greatest:
                np.maximum(out, found, out=out)
            elif not np.array_equal(found, out):
                both = f"{first.name} and {other.name} make one matrix"
                raise ValueError(f"{both}: they need the same {self.part.kind}")


def _shared(source: Source, kind: PartKind, size: int) -> Shared:
    return Shared(tuple(key.name for key in source.tensors()), (size,), MatrixPart(kind))


def _fitting_group(scheme: Scheme, source: Source, num_chips: int) -> int | None:
    """Return the number of inputs that share a stored scale; None if all do.

    The inputs of each of `num_chips` chips are whole groups. If the scheme's groups do not divide
    them, each part of a group gets a separate scale. Raises ValueError, which names the first
    tensor of `source`, if such parts are too small.
    """
    if scheme.group_size is None:
        return None
    inputs = source.shape[source.input_axis] // num_chips
    group = math.gcd(scheme.group_size, inputs)
    if group < min(_LEAST_GROUP, scheme.group_size):
        name = next(iter(source.tensors())).name
        raise ValueError(
            f"{name} is quantized in groups of {scheme.group_size} inputs, which a chip's {inputs} "
            f"inputs cannot be cut into; choose another tp_size"
        )
    return group
