"""Experts' matrices in MXFP4, the 4-bit format of the Open Compute Project.

Along inputs 32 numbers make a block: 16 bytes with two numbers each, the first in the lower half,
and one byte of scale, a power of two. A number is a sign, two bits of exponent and one of
mantissa: an index in a list of eight magnitudes. (OCP Microscaling Formats specification, version
1.0.)
"""

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from sgl_jax.checkpoint.stored.reader import Expected, Files, positions, read_positions
from sgl_jax.core.layer_configs import MXFP4_GROUP
from sgl_jax.layers.tensor_keys import Index, MatrixPart, Shape
from sgl_jax.models.quantization import Rule

_BYTES = frozenset({"U8"})
_PER_BYTE = 2
# The value (`kernels.quantized_matmul.numbers`) of each number: its index, with its sign.
_VALUES = np.array([*range(8), *(-place for place in range(8))], np.int8)
_PAIRS = np.stack([np.tile(_VALUES, 16), np.repeat(_VALUES, 16)], axis=1)  # by byte
_NOT_A_NUMBER = 255


class Mxfp4Reader:
    """A `Reader` of tensors [experts, out, blocks, 16] and [experts, out, blocks]."""

    def __init__(self, rule: Rule) -> None:
        assert rule.scheme.group_size == MXFP4_GROUP

    def tensors(self, weight: str, part: MatrixPart, shape: Shape) -> Mapping[str, Expected]:
        if part.kind == "values":
            blocks = (*shape[:-1], -(-shape[-1] // MXFP4_GROUP), MXFP4_GROUP // _PER_BYTE)
            return {weight + "_blocks": Expected((blocks,), _BYTES)}
        scales = (*shape[:-1], -(-shape[-1] * (part.group or 1) // MXFP4_GROUP))
        return {weight + "_scales": Expected((scales,), _BYTES)}

    def read(self, files: Files, weight: str, part: MatrixPart, index: Index) -> NDArray[Any]:
        *outer, inputs = index
        if part.kind == "values":
            return np.stack(
                [_values(files, weight + "_blocks", one, inputs) for one in _each(outer)]
            )
        name = weight + "_scales"
        blocks = positions(inputs) * (part.group or 1) // MXFP4_GROUP
        scales = read_positions(files, name, tuple(outer), blocks)
        if (scales == _NOT_A_NUMBER).any():
            raise ValueError(f"{name} holds scales that are no finite numbers")
        return scales


def _each(outer: list[slice]) -> list[Index]:
    """Return one index per expert: the bytes and numbers of all of a layer take gigabytes."""
    experts, rows = outer
    return [(slice(one, one + 1), rows) for one in range(experts.start, experts.stop)]


def _values(files: Files, name: str, outer: Index, inputs: slice) -> NDArray[Any]:
    """Return values [rows, inputs] of one expert."""
    first = inputs.start // MXFP4_GROUP
    blocks = slice(first, -(-inputs.stop // MXFP4_GROUP))
    packed = files.read(name, (*outer, blocks, slice(0, MXFP4_GROUP // _PER_BYTE)))[0]
    values = _PAIRS[packed].reshape(len(packed), -1)
    own: NDArray[Any] = values[:, positions(inputs) - first * MXFP4_GROUP].astype(ml_dtypes.int4)
    return own
