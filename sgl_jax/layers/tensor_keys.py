"""Names of the tensors of a checkpoint, and of parts of its quantized matrices."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Shape = tuple[int, ...]
Index = tuple[slice, ...]  # one slice per axis, with start and stop; only `Slice` uses steps

PartKind = Literal["values", "scales", "zero_points", "order", "input_scale"]


class MatrixPart(NamedTuple):
    """One of the arrays of a quantized matrix.

    Readers of formats (`checkpoint.stored`) compute it from the tensors of a checkpoint.
    """

    kind: PartKind
    group: int | None = None  # adjacent inputs that share a scale; None: all inputs
    by_input: bool = False  # a tensor of all experts' matrices has a row for each input

    def inputs(self, size: int) -> int:
        """Return the part's size along the `size` inputs of a matrix."""
        if self.kind == "values":
            return size
        if self.group is None:
            return 1
        assert size % self.group == 0, (size, self.group)
        return size // self.group


class TensorKey(NamedTuple):
    """A tensor of a checkpoint, or a part of the quantized matrix with this name as floats."""

    name: str
    part: MatrixPart | None = None


# For each axis of a parameter, int32 [size]: the index on one chip of each index, or -1 for padding
# and for repeated copies.
Places = tuple[NDArray[np.int32], ...]
Has = Callable[[TensorKey, Shape], bool]  # True if a checkpoint has such a tensor of this shape


class Tensors(Protocol):
    """The tensors of a checkpoint."""

    def read(self, key: TensorKey, index: Index) -> NDArray[Any]:
        """Return the slice `index` of a tensor in its stored dtype."""
        ...
