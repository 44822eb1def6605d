"""The interface of readers of quantized matrices, and the reading of scales in blocks.

A reader returns the parts of a matrix as if they were tensors (`layers.sources.MatrixPart`): values
[*experts, out, in], scales and zero points [*experts, out, groups], the order of inputs [in], the
scale of inputs [1].
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from sgl_jax.layers.tensor_keys import Index, MatrixPart, Shape

FLOATS = frozenset({"F32", "F16", "BF16"})


class Files(Protocol):
    """The tensors in files."""

    def read(self, name: str, index: Index) -> NDArray[Any]:
        """Return the slice `index` of a tensor in its stored dtype."""
        ...


class Expected(NamedTuple):
    """The allowed shapes and dtypes of a tensor in the files."""

    shapes: tuple[Shape, ...]  # one of these; empty: another part has the shape
    types: frozenset[str]  # one of these, by safetensors' names


class Reader(Protocol):
    """Reads the parts of matrices from tensors of one packing."""

    def tensors(self, weight: str, part: MatrixPart, shape: Shape) -> Mapping[str, Expected]:
        """Return the tensors that make a part.

        `weight` is the name of the matrix as floats, mostly "....weight"; `shape` is the part's.
        """
        ...

    def read(self, files: Files, weight: str, part: MatrixPart, index: Index) -> NDArray[Any]:
        """Return the part's slice `index`. Raise ValueError if a tensor does not fit the scheme."""
        ...


def beside(weight: str, name: str) -> str:
    """Return the name of the tensor `name` of the same module.

    The tensors of all experts, such as "experts.down_proj", have names without "weight".
    """
    if weight.endswith("weight"):
        return weight.removesuffix("weight") + name
    return f"{weight}_{name.removeprefix('weight_')}"


def positions(index: slice, size: int = 1) -> NDArray[np.intp]:
    """Return the stored block of `size` for each of the slice's positions."""
    return np.arange(index.start, index.stop, index.step or 1) // size


def read_positions(files: Files, name: str, outer: Index, *axes: NDArray[np.intp]) -> NDArray[Any]:
    """Read elements at any positions along a tensor's last axes; only their range is read."""
    ranges = tuple(slice(int(axis.min()), int(axis.max()) + 1) for axis in axes)
    block = files.read(name, (*outer, *ranges))
    for number, (axis, read) in enumerate(zip(axes, ranges, strict=True), len(outer)):
        block = np.take(block, axis - read.start, axis=number)
    return block
