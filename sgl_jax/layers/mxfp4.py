"""Experts' matrices in MXFP4, the 4-bit format of the Open Compute Project, read as numbers.

Along a row 32 numbers make a block: 16 bytes with two numbers each, the first in the lower half,
and one byte of scale, a power of two. A number is a sign, two bits of exponent and one of
mantissa. (OCP Microscaling Formats specification, version 1.0.)
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sgl_jax.layers.sources import Index, Shape, Source, Tensors

BLOCK = 32  # numbers
BLOCKS_SUFFIX, SCALES_SUFFIX = "_blocks", "_scales"  # of the names of the two tensors of bytes

_MAGNITUDES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
_NUMBERS = np.concatenate([_MAGNITUDES, -_MAGNITUDES])
_PAIRS = np.stack([np.tile(_NUMBERS, 16), np.repeat(_NUMBERS, 16)], axis=1)  # of each byte
_SCALES = np.append(np.ldexp(np.float32(1), np.arange(255) - 127), np.float32(np.nan))


@dataclass(frozen=True)
class Mxfp4(Source):
    """A matrix for each expert, stored as [experts, rows, columns]; blocks lie along columns."""

    name: str
    dims: Shape  # of the parameter: as stored, or [experts, columns, rows]
    transposed: bool = False

    @property
    def shape(self) -> Shape:
        return self.dims

    def tensors(self, prefix: str = "") -> dict[str, Shape]:
        experts, *matrix = self.dims
        rows, columns = matrix[::-1] if self.transposed else matrix
        scales = (experts, rows, columns // BLOCK)
        return {
            prefix + self.name + BLOCKS_SUFFIX: (*scales, BLOCK // 2),
            prefix + self.name + SCALES_SUFFIX: scales,
        }

    def fill(self, out: NDArray[Any], index: Index, tensors: Tensors, prefix: str = "") -> None:
        """An expert at a time: a layer of 128 takes gigabytes."""
        experts, *matrix = index
        rows, columns = matrix[::-1] if self.transposed else matrix
        blocks = slice(columns.start // BLOCK, -(-columns.stop // BLOCK))
        first = blocks.start * BLOCK
        within = slice(columns.start - first, columns.stop - first, columns.step)
        for place, expert in enumerate(range(experts.start, experts.stop)):
            own = (slice(expert, expert + 1), rows, blocks)
            bytes_index = (*own, slice(0, BLOCK // 2))
            packed = tensors.read(prefix + self.name + BLOCKS_SUFFIX, bytes_index)[0]
            scales = tensors.read(prefix + self.name + SCALES_SUFFIX, own)[0]
            numbers = unpacked(packed, scales)[:, within]
            out[place] = numbers.T if self.transposed else numbers


def unpacked(blocks: NDArray[Any], scales: NDArray[Any]) -> NDArray[np.float32]:
    """Numbers [rows, 32 * n] of blocks uint8 [rows, n, 16] and scales uint8 [rows, n].

    A scale of 255 stands for NaN.
    """
    numbers = _PAIRS[blocks] * _SCALES[scales][..., None, None]
    rows: NDArray[np.float32] = numbers.reshape(len(blocks), -1)
    return rows
