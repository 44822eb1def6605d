"""The interface of readers of quantized matrices, and the reading of scales in blocks.

A reader makes the parts of a matrix as if they were tensors (`layers.sources.MatrixPart`): values
[*experts, out, in], scales and zero points [*experts, out, groups], the order of inputs [in], the
scale of inputs [1].
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from sgl_jax.layers.sources import Index, MatrixPart, Shape, Tensors

FLOATS = frozenset({"F32", "F16", "BF16"})


class Expected(NamedTuple):
    """The shapes and types that a tensor in the files may have."""

    shapes: tuple[Shape, ...]  # one of these; none: another part has the shape
    types: frozenset[str]  # and one of these, as safetensors names them


class Reader(Protocol):
    """Reads the parts of matrices from tensors of one packing."""

    def tensors(self, weight: str, part: MatrixPart, shape: Shape) -> Mapping[str, Expected]:
        """The tensors that make a part.

        Args:
            weight: the name that the matrix would have as floats, "....weight" of most.
            part: which part.
            shape: the part's.
        """
        ...

    def read(self, files: Tensors, weight: str, part: MatrixPart, index: Index) -> NDArray[Any]:
        """The part's slice `index`. Raises ValueError, which names it, for a tensor whose contents
        do not fit the scheme."""
        ...


def beside(weight: str, name: str) -> str:
    """The tensor `name` of the same module."""
    return weight.removesuffix("weight") + name


def positions(index: slice, size: int = 1) -> NDArray[np.intp]:
    """The stored blocks of `size` that the slice's positions lie in."""
    return np.arange(index.start, index.stop, index.step or 1) // size


def read_positions(
    files: Tensors, name: str, outer: Index, *axes: NDArray[np.intp]
) -> NDArray[Any]:
    """Elements of a tensor at any positions along its last axes, in rising order or not; only the
    range that holds them is read."""
    ranges = tuple(slice(int(axis.min()), int(axis.max()) + 1) for axis in axes)
    block = files.read(name, (*outer, *ranges))
    for number, (axis, read) in enumerate(zip(axes, ranges, strict=True), len(outer)):
        block = np.take(block, axis - read.start, axis=number)
    return block
