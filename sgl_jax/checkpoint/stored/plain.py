"""Matrices of 8 bits, with a tensor of values and one of scales.

compressed-tensors writes them as "int-quantized" and "float-quantized", transformers and DeepSeek
as "fp8", with scales for blocks of outputs and inputs.
"""

from collections.abc import Mapping
from typing import Any

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


class PlainReader:
    """A `Reader` of 8-bit values and their scales."""

    def __init__(self, rule: Rule) -> None:
        self._is_int = rule.scheme.weight == "int8"
        self._scales, self._input_scale = rule.stored.scales, rule.stored.input_scale
        self._group = rule.scheme.group_size
        self._block = rule.stored.block

    def tensors(self, weight: str, part: MatrixPart, shape: Shape) -> Mapping[str, Expected]:
        if part.kind == "values":
            return {weight: Expected((shape,), frozenset({"I8" if self._is_int else "F8_E4M3"}))}
        if part.kind == "input_scale":
            return {beside(weight, self._input_scale): Expected(((1,), ()), FLOATS)}
        name = beside(weight, self._scales)
        *outer, outputs, groups = shape
        if self._block is not None or self._group is not None:
            rows, inputs = self._block or (1, self._group or 1)
            size = groups * (part.group or 1)
            blocks = (*outer, -(-outputs // rows), -(-size // inputs))
            return {name: Expected((blocks,), FLOATS)}
        by_output, whole = (*outer, outputs), tuple(outer)
        shapes = ((*by_output, 1), by_output, (*whole, 1, 1), (*whole, 1), whole)
        return {name: Expected(shapes, FLOATS)}

    def read(self, files: Files, weight: str, part: MatrixPart, index: Index) -> NDArray[Any]:
        if part.kind == "values":
            return files.read(weight, index)
        if part.kind == "input_scale":
            return _whole(files, beside(weight, self._input_scale)).reshape(1)
        name = beside(weight, self._scales)
        *outer, outputs, groups = index
        if self._block is None and self._group is None:
            return self._per_output(files, name, index)
        rows, inputs = self._block or (1, self._group or 1)
        first_inputs = positions(groups) * (part.group or 1)
        return read_positions(
            files, name, tuple(outer), positions(outputs, rows), first_inputs // inputs
        )

    def _per_output(self, files: Files, name: str, index: Index) -> NDArray[Any]:
        """Return scales [*experts, out, 1], stored for each output or for the whole matrix."""
        *outer, outputs, _ = index
        stored = _whole(files, name)
        stored = stored.reshape(*stored.shape[: len(outer)], -1)[tuple(outer)]
        if stored.shape[-1] == 1:
            count = len(positions(outputs))
            stored = np.broadcast_to(stored, (*stored.shape[:-1], count))
        else:
            stored = stored[..., outputs]
        return stored[..., None]


def _whole(files: Files, name: str) -> NDArray[Any]:
    return files.read(name, ())
