"""Parameters whose columns are dealt out to chips by head, wherever their tensors keep a head."""

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from sgl_jax.layers.sources import Index, Shape, Tensors


@dataclass(frozen=True)
class HeadRows:
    """Each head's rows in a tensor [num_rows, ...]: `size` rows from first + head * stride on."""

    name: str
    num_rows: int
    first: int
    stride: int
    size: int


@dataclass(frozen=True)
class ByHead:
    """Columns by head, [*inputs, num_heads * width]: each head's rows of all parts, side by side.

    Stored as tensors [rows, *inputs]. Parts of the parameter hold whole heads.
    """

    parts: tuple[HeadRows, ...]
    num_heads: int
    inputs: Shape

    @property
    def shape(self) -> Shape:
        return (*self.inputs, self.num_heads * self.width)

    @property
    def plain_shape(self) -> Shape:
        return self.shape

    @property
    def width(self) -> int:
        """Columns of a head."""
        return sum(part.size for part in self.parts)

    def tensors(self, prefix: str = "") -> dict[str, Shape]:
        return {prefix + part.name: (part.num_rows, *self.inputs) for part in self.parts}

    def fill(self, out: NDArray[Any], index: Index, tensors: Tensors, prefix: str = "") -> None:
        *inputs, columns = index
        assert columns.start % self.width == columns.stop % self.width == 0
        heads = range(columns.start // self.width, columns.stop // self.width)

        def read(part: HeadRows) -> NDArray[Any]:
            """[heads, part.size, *inputs]"""
            start, stop = (part.first + head * part.stride for head in (heads[0], heads[-1]))
            rows = tensors.read(prefix + part.name, (slice(start, stop + part.size), *inputs))
            firsts = range(0, len(heads) * part.stride, part.stride)
            return np.stack([rows[first : first + part.size] for first in firsts])

        by_head = np.concatenate([read(part) for part in self.parts], axis=1)
        out[...] = np.moveaxis(by_head.reshape(-1, *by_head.shape[2:]), 0, -1)

    def fit(self, plain: jax.Array) -> jax.Array:
        return plain
