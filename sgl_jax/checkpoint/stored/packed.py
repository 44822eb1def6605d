"""Matrices of 4 bits, eight values in a word: compressed-tensors, AWQ and GPTQ.

All three store a value without its sign, 0 to 15, with 8 for 0 if the scheme is symmetric; as int4,
8 is subtracted from both values and zero points. They differ in the axis along which values are
packed, and AWQ in their order in a word.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from sgl_jax.checkpoint.stored.reader import (
    FLOATS,
    Expected,
    Files,
    beside,
    positions,
    read_positions,
)
from sgl_jax.layers.tensor_keys import Index, MatrixPart, Shape
from sgl_jax.models.quantization import Rule

_BITS, _PER_WORD, _ZERO = 4, 8, 8
_WORDS = frozenset({"I32"})
_ONES = np.uint32(0x11111111)  # a word of ones
_LOST = np.uint32(0xFF000000)  # the last two values are 15


class _Layout(NamedTuple):
    """The tensors of a packing; zero points are packed along outputs."""

    values: str
    scales: str
    zero_points: str
    order: str
    inputs_first: bool  # tensors are [in, out], else [out, in]
    packs_outputs: bool  # values are packed along outputs, else along inputs
    places: tuple[int, ...] = tuple(range(_PER_WORD))  # of values in a word, lowest bits first


_OF_GPTQ = _Layout("qweight", "scales", "qzeros", "g_idx", inputs_first=True, packs_outputs=False)
_LAYOUTS: Mapping[str, _Layout] = {
    "compressed": _Layout(
        *("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx"),
        inputs_first=False,
        packs_outputs=False,
    ),
    "awq": _OF_GPTQ._replace(packs_outputs=True, places=(0, 4, 1, 5, 2, 6, 3, 7)),
    "gptq": _OF_GPTQ,
}


class PackedReader:
    """A `Reader` of "pack-quantized" of compressed-tensors, of AWQ ("gemm"), and of GPTQ."""

    def __init__(self, rule: Rule) -> None:
        self._layout = _LAYOUTS[rule.stored.packing]
        self._group = rule.scheme.group_size
        self._has_order = rule.scheme.has_input_order
        self._has_less_one = rule.stored.zero_points_less_one
        # Symmetric files of AWQ and GPTQ also have zero points.
        self._checks_zero_points = self._layout.inputs_first and not rule.scheme.has_zero_points

    def tensors(self, weight: str, part: MatrixPart, shape: Shape) -> Mapping[str, Expected]:
        names = self._layout
        if part.kind == "order":
            return {beside(weight, names.order): Expected((shape,), _WORDS)}
        *experts, outputs, inputs = shape

        def expected(name: str, rows: int, columns: int, types: frozenset[str]) -> dict[str, Any]:
            own = (columns, rows) if self._layout.inputs_first else (rows, columns)
            return {beside(weight, name): Expected(((*experts, *own),), types)}

        if part.kind == "values":
            if self._layout.packs_outputs:
                return expected(names.values, _words_of(outputs), inputs, _WORDS)
            return expected(names.values, outputs, _words_of(inputs), _WORDS)
        groups = _num_stored_groups(inputs, part, self._group)
        zeros = expected(names.zero_points, _words_of(outputs), groups, _WORDS)
        if part.kind == "zero_points":
            return zeros
        scales = expected(names.scales, outputs, groups, FLOATS)
        return scales | zeros if self._checks_zero_points else scales

    def read(self, files: Files, weight: str, part: MatrixPart, index: Index) -> NDArray[Any]:
        layout = self._layout
        values, scales, zero_points, order = (beside(weight, name) for name in layout[:4])
        if part.kind == "order":
            return _order(files, order, self._group)[index]
        rows = positions(index[0])
        if part.kind == "values":
            inputs = positions(index[1])
            if self._has_order:
                inputs = _order(files, order, self._group)[inputs]
            return self._unpacked(files, values, rows, inputs, layout.packs_outputs)
        groups = _stored_groups(index[1], part, self._group)
        if part.kind == "zero_points" or self._checks_zero_points:
            decode = partial(_plus_one, zero_points) if self._has_less_one else np.asarray
            zeros = self._unpacked(files, zero_points, rows, groups, True, decode)
            if part.kind == "zero_points":
                return zeros
            if (zeros != 0).any():
                raise ValueError(
                    f"{zero_points} has zero points other than 8, but the config is symmetric"
                )
        if layout.inputs_first:
            return read_positions(files, scales, (), groups, rows).T
        return read_positions(files, scales, (), rows, groups)

    def _unpacked(
        self,
        files: Files,
        name: str,
        rows: NDArray[np.intp],
        columns: NDArray[np.intp],
        packs_rows: bool,
        decode: Callable[[NDArray[Any]], NDArray[Any]] = np.asarray,
    ) -> NDArray[Any]:
        """Return int4 [rows, columns] of a tensor with words `decode(stored)` along an axis."""
        at, axis = [rows, columns], 0 if packs_rows else 1
        own = at[axis]
        first = own.min() // _PER_WORD
        at[axis] = np.arange(first, own.max() // _PER_WORD + 1)
        if self._layout.inputs_first:
            words = read_positions(files, name, (), *at[::-1]).T
        else:
            words = read_positions(files, name, (), *at)
        by_word = np.moveaxis(np.asarray(decode(words)).view(np.uint32), axis, -1)
        shifts = np.array(self._layout.places, np.uint32) * _BITS
        values = (by_word[..., None] >> shifts) & np.uint32(2**_BITS - 1)
        flat = values.reshape(len(by_word), -1)[:, own - first * _PER_WORD].astype(np.int32)
        return np.moveaxis(flat - _ZERO, -1, axis).astype(ml_dtypes.int4)


def _words_of(size: int) -> int:
    return -(-size // _PER_WORD)


def _plus_one(name: str, stored: NDArray[Any]) -> NDArray[np.uint32]:
    """Return words of GPTQ's zero points, which are stored minus one.

    GPTQModel subtracts from whole words, so that a zero point of 0 borrows from its neighbour.
    AutoGPTQ instead sets its bits and all above them, and the zero points there are lost.
    Raises ValueError for such words, by their last two zero points: in a word of GPTQModel's these
    would be 0 and 1.
    """
    words = stored.view(np.uint32)
    if (words >= _LOST).any():
        raise ValueError(f"{name} has zero points of 0 that have overwritten others")
    return words + _ONES  # modulo 2^32


def _num_stored_groups(groups: int, part: MatrixPart, stored: int | None) -> int:
    """Return the number of stored groups that cover `groups` groups of the part."""
    return groups if stored is None else -(-groups * (part.group or 1) // stored)


def _stored_groups(groups: slice, part: MatrixPart, stored: int | None) -> NDArray[np.intp]:
    """Return the stored group of each of the slice's groups."""
    if stored is None:
        return positions(groups)
    return positions(groups) * (part.group or 1) // stored


def _order(files: Files, name: str, group: int | None) -> NDArray[np.intp]:
    """Return the inputs sorted by group. Raise ValueError if groups have different sizes."""
    owner = files.read(name, ())
    sizes = np.bincount(owner) if len(owner) and owner.min() >= 0 else np.zeros(0, np.int64)
    if group is None or len(sizes) * group != len(owner) or (sizes != group).any():
        raise ValueError(f"{name} does not deal its inputs into groups of {group}")
    return np.argsort(owner, kind="stable")
