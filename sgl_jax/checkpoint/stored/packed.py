"""Matrices of 4 bits, eight values in a word: compressed-tensors, AWQ and GPTQ.

All three store a value without its sign, 0 to 15, with 8 for 0 if the scheme is symmetric; as int4,
8 is subtracted from both values and zero points. They differ in the axis along which values are
packed, and AWQ in their order in a word.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

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
from sgl_jax.layers.sources import Index, MatrixPart, Shape
from sgl_jax.models.quantization import Rule

_BITS, _PER_WORD, _ZERO = 4, 8, 8
_WORDS = frozenset({"I32"})
_IN_TURN = tuple(range(_PER_WORD))
# Each column's index in a word of AWQ, starting with the lowest bits.
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
_ONES = np.uint32(0x11111111)  # a word of ones
_LOST = np.uint32(0xFF000000)  # the last two values are 15


def _unpacked(
    words: NDArray[Any], axis: int, places: tuple[int, ...] = _IN_TURN
) -> NDArray[np.int32]:
    """Unpack int32 words along `axis` to values 0 to 15."""
    shifts = np.array(places, np.uint32) * _BITS
    by_word = np.moveaxis(np.asarray(words).view(np.uint32), axis, -1)
    values = (by_word[..., None] >> shifts) & np.uint32(2**_BITS - 1)
    flat = values.reshape(*by_word.shape[:-1], -1).astype(np.int32)
    return np.moveaxis(flat, -1, axis)


def _read_packed(
    files: Files,
    name: str,
    at: tuple[NDArray[np.intp], NDArray[np.intp]],
    axis: int,
    places: tuple[int, ...] = _IN_TURN,
    decode: Callable[[NDArray[Any]], NDArray[Any]] = np.asarray,
) -> NDArray[np.int32]:
    """Return values 0 to 15 at positions `at`, packed along `axis` in words `decode(stored)`."""
    own = at[axis]
    first = own.min() // _PER_WORD
    words = np.arange(first, own.max() // _PER_WORD + 1)
    stored = read_positions(files, name, (), *at[:axis], words, *at[axis + 1 :])
    found: NDArray[np.int32] = _unpacked(decode(stored), axis, places).take(
        own - first * _PER_WORD, axis=axis
    )
    return found


def _signed(values: NDArray[np.int32]) -> NDArray[Any]:
    return (values - _ZERO).astype(ml_dtypes.int4)


def _words_of(size: int) -> int:
    return -(-size // _PER_WORD)


class CompressedReader:
    """A `Reader` of "pack-quantized": values are packed along inputs, zero points along outputs."""

    def __init__(self, rule: Rule) -> None:
        self._group = rule.scheme.group_size
        self._has_order = rule.scheme.has_input_order

    def tensors(self, weight: str, part: MatrixPart, shape: Shape) -> Mapping[str, Expected]:
        if part.kind == "order":
            return {beside(weight, "weight_g_idx"): Expected((shape,), _WORDS)}
        *experts, outputs, inputs = shape
        if part.kind == "values":
            packed = Expected(((*experts, outputs, _words_of(inputs)),), _WORDS)
            return {beside(weight, "weight_packed"): packed}
        groups = _num_stored_groups(inputs, part, self._group)
        if part.kind == "scales":
            return {
                beside(weight, "weight_scale"): Expected(((*experts, outputs, groups),), FLOATS)
            }
        zeros = Expected(((*experts, _words_of(outputs), groups),), _WORDS)
        return {beside(weight, "weight_zero_point"): zeros}

    def read(self, files: Files, weight: str, part: MatrixPart, index: Index) -> NDArray[Any]:
        if part.kind == "order":
            return _order(files, beside(weight, "weight_g_idx"), self._group)[index]
        rows = positions(index[0])
        if part.kind == "values":
            inputs = positions(index[1])
            if self._has_order:
                inputs = _order(files, beside(weight, "weight_g_idx"), self._group)[inputs]
            return _signed(
                _read_packed(files, beside(weight, "weight_packed"), (rows, inputs), axis=1)
            )
        groups = _stored_groups(index[1], part, self._group)
        if part.kind == "scales":
            return read_positions(files, beside(weight, "weight_scale"), (), rows, groups)
        name = beside(weight, "weight_zero_point")
        return _signed(_read_packed(files, name, (rows, groups), axis=0))


class InputsFirstReader:
    """A `Reader` of AWQ ("gemm") and GPTQ: tensors are [in, out].

    AWQ packs values along outputs, GPTQ along inputs; both pack zero points along outputs.
    """

    def __init__(self, rule: Rule) -> None:
        self._group = rule.scheme.group_size
        self._has_order = rule.scheme.has_input_order
        self._has_zero_points = rule.scheme.has_zero_points
        self._is_awq = rule.stored.packing == "awq"
        self._places = _AWQ_PLACES if self._is_awq else _IN_TURN
        self._has_less_one = rule.stored.zero_points_less_one

    def tensors(self, weight: str, part: MatrixPart, shape: Shape) -> Mapping[str, Expected]:
        if part.kind == "order":
            return {beside(weight, "g_idx"): Expected((shape,), _WORDS)}
        *experts, outputs, inputs = shape
        if part.kind == "values":
            packed = (*experts, inputs, _words_of(outputs))
            if not self._is_awq:
                packed = (*experts, _words_of(inputs), outputs)
            return {beside(weight, "qweight"): Expected((packed,), _WORDS)}
        groups = _num_stored_groups(inputs, part, self._group)
        zeros = {
            beside(weight, "qzeros"): Expected(((*experts, groups, _words_of(outputs)),), _WORDS)
        }
        if part.kind == "zero_points":
            return zeros
        scales = {beside(weight, "scales"): Expected(((*experts, groups, outputs),), FLOATS)}
        # Symmetric files also have zero points.
        return scales if self._has_zero_points else scales | zeros

    def read(self, files: Files, weight: str, part: MatrixPart, index: Index) -> NDArray[Any]:
        if part.kind == "order":
            return _order(files, beside(weight, "g_idx"), self._group)[index]
        rows = positions(index[0])
        if part.kind == "values":
            inputs = positions(index[1])
            if self._has_order:
                inputs = _order(files, beside(weight, "g_idx"), self._group)[inputs]
            axis, name = (1 if self._is_awq else 0), beside(weight, "qweight")
            return _signed(_read_packed(files, name, (inputs, rows), axis, self._places).T)
        groups = _stored_groups(index[1], part, self._group)
        zeros = self._zero_points(files, beside(weight, "qzeros"), rows, groups)
        if part.kind == "zero_points":
            return zeros
        if not self._has_zero_points and (zeros != 0).any():
            name = beside(weight, "qzeros")
            raise ValueError(f"{name} has zero points other than 8, but the config is symmetric")
        return read_positions(files, beside(weight, "scales"), (), groups, rows).T

    def _zero_points(
        self, files: Files, name: str, rows: NDArray[np.intp], groups: NDArray[np.intp]
    ) -> NDArray[Any]:
        """Return zero points [rows, groups]."""
        decode = partial(_plus_one, name) if self._has_less_one else np.asarray
        return _signed(_read_packed(files, name, (groups, rows), 1, self._places, decode).T)


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
