"""Floats in files, quantized while they are read.

A value is rounded to the nearest; its scale fits the greatest magnitude of the numbers that share
it.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from sgl_jax.checkpoint.stored.reader import FLOATS, Expected, Files
from sgl_jax.core.layer_configs import GREATEST
from sgl_jax.layers.tensor_keys import Index, MatrixPart, Shape
from sgl_jax.models.quantization import Rule

_TYPES = {"int8": np.int8, "int4": ml_dtypes.int4, "fp8": ml_dtypes.float8_e4m3fn}
_BLOCK_NUMBERS = 2**20


class AtLoadReader:
    """A `Reader` of floats. It only keeps the scales of matrices with one scale for each output."""

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

    def read(self, files: Files, weight: str, part: MatrixPart, index: Index) -> NDArray[Any]:
        *outer, inputs = index
        size = self._sizes[weight] if part.group is None else part.group
        if part.kind == "scales":
            wide = slice(inputs.start * size, inputs.stop * size)
            return self._scales_of(files, weight, part, (*outer, wide), size)
        whole = slice(0, size) if part.group is None else inputs
        scales = self._scales_of(files, weight, part, (*outer, whole), size)
        values = np.empty(_shape(index), _TYPES[self._weight])
        group = inputs.stop - inputs.start if part.group is None else part.group
        for own, floats in _blocks(files, weight, index):
            scaled = floats.reshape(*floats.shape[:-1], -1, group)
            scaled /= scales[own][..., None]
            if self._weight != "fp8":
                np.round(scaled, out=scaled)
            values[own] = floats
        return values

    def _scales_of(
        self, files: Files, weight: str, part: MatrixPart, index: Index, size: int
    ) -> NDArray[np.float32]:
        """Return scales [*experts, out, groups] of groups of `size` inputs."""
        key = (weight, tuple((own.start, own.stop, own.step) for own in index[:-1]))
        if part.group is None and key in self._scales:
            return self._scales[key]
        *outer, inputs = _shape(index)
        scales = np.empty((*outer, inputs // size), np.float32)
        for own, floats in _blocks(files, weight, index):
            by_group = floats.reshape(*floats.shape[:-1], -1, size)
            np.maximum(by_group.max(axis=-1), -by_group.min(axis=-1), out=scales[own])
        scales /= np.float32(GREATEST[self._weight])
        scales[scales == 0] = 1
        if part.group is None:
            self._scales[key] = scales
        return scales


def _shape(index: Index) -> tuple[int, ...]:
    return tuple(len(range(own.start, own.stop, own.step or 1)) for own in index)


def _blocks(files: Files, weight: str, index: Index) -> Iterator[tuple[slice, NDArray[np.float32]]]:
    """Yield the indices and numbers of blocks of a tensor's slice along its first axis.

    A block has at most `_BLOCK_NUMBERS`, or one index. A whole tensor in float32 would take at
    least twice its bytes.
    """
    first, *rest = index
    places = range(first.start, first.stop, first.step or 1)
    size = max(_BLOCK_NUMBERS // math.prod(_shape(tuple(rest))), 1)
    for start in range(0, len(places), size):
        own = places[start : start + size]
        block = slice(own.start, own.stop, own.step)
        yield (
            slice(start, start + len(own)),
            np.array(files.read(weight, (block, *rest)), np.float32),
        )
