"""Floats in files, quantized while they are read: a value is the nearest one, by a scale that fits
the greatest magnitude of the numbers that share it.
"""

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from sgl_jax.checkpoint.stored.reader import FLOATS, Expected
from sgl_jax.core.quantization import GREATEST
from sgl_jax.layers.sources import Index, MatrixPart, Shape, Tensors
from sgl_jax.models.quantization import Rule

_TYPES = {"int8": np.int8, "int4": ml_dtypes.int4, "fp8": ml_dtypes.float8_e4m3fn}


class AtLoadReader:
    """See `Reader`. Only the scales of matrices that have one for each output are kept."""

    def __init__(self, rule: Rule) -> None:
        self._weight = rule.scheme.weight
        self._sizes: dict[str, int] = {}  # inputs of each tensor
        self._scales: dict[tuple[str, tuple[Any, ...]], NDArray[np.float32]] = {}

    def tensors(self, weight: str, part: MatrixPart, shape: Shape) -> Mapping[str, Expected]:
        if part.kind == "values":
            self._sizes[weight] = shape[-1]
            return {weight: Expected((shape,), FLOATS)}
        shapes = () if part.group is None else ((*shape[:-1], shape[-1] * part.group),)
        return {weight: Expected(shapes, FLOATS)}

    def read(self, files: Tensors, weight: str, part: MatrixPart, index: Index) -> NDArray[Any]:
        *outer, inputs = index
        size = self._sizes[weight] if part.group is None else part.group
        if part.kind == "scales":
            wide = slice(inputs.start * size, inputs.stop * size)
            return self._scales_of(files, weight, part, tuple(outer), wide, size)
        dtype = _TYPES[self._weight]
        whole = slice(0, size) if part.group is None else inputs
        scales = self._scales_of(files, weight, part, tuple(outer), whole, size)
        floats = _floats(files, weight, (*outer, inputs))
        group = inputs.stop - inputs.start if part.group is None else part.group
        scaled = floats.reshape(*floats.shape[:-1], -1, group) / scales[..., None]
        if self._weight != "fp8":
            scaled = np.round(scaled)
        return scaled.reshape(floats.shape).astype(dtype)

    def _scales_of(
        self, files: Tensors, weight: str, part: MatrixPart, outer: Index, inputs: slice, size: int
    ) -> NDArray[np.float32]:
        """Scales [*experts, out, groups] of groups of `size` inputs."""
        key = (weight, tuple((own.start, own.stop, own.step) for own in outer))
        if part.group is None and key in self._scales:
            return self._scales[key]
        floats = _floats(files, weight, (*outer, inputs))
        by_group = np.abs(floats.reshape(*floats.shape[:-1], -1, size))
        scales: NDArray[np.float32] = by_group.max(axis=-1) / np.float32(GREATEST[self._weight])
        scales[scales == 0] = 1
        if part.group is None:
            self._scales[key] = scales
        return scales


def _floats(files: Tensors, weight: str, index: Index) -> NDArray[np.float32]:
    return np.asarray(files.read(weight, index), np.float32)
