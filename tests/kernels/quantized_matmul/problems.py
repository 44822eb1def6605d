"""Quantized products: drawn, and judged by float64."""

import ml_dtypes
import numpy as np

from sgl_jax.core.layer_configs import GREATEST
from sgl_jax.kernels.quantized_matmul.numbers import QuantizedArrays

LAYERS, LAYER = 2, 1
TYPES = {
    "int8": np.int8,
    "int4": ml_dtypes.int4,
    "fp8": ml_dtypes.float8_e4m3fn,
    "mxfp4": ml_dtypes.int4,
}
MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def draw(scheme, inputs, outputs, seed=0):
    """Matrices of all layers; those of other layers are as good, so reading one would show."""
    rng = np.random.default_rng(seed)
    limit = 7 if scheme.weight in ("int4", "mxfp4") else 100
    values = rng.integers(-limit, limit + 1, (LAYERS, inputs, outputs)).astype(TYPES[scheme.weight])
    groups = 1 if scheme.group_size is None else inputs // scheme.group_size
    shape = (LAYERS, groups, outputs)
    scales = rng.uniform(0.5, 1.5, shape).astype(np.float32) / limit
    if scheme.weight == "mxfp4":
        scales = rng.integers(120, 130, shape).astype(np.uint8)
    zero_points = input_scale = None
    if scheme.has_zero_points:
        zero_points = rng.integers(-7, 8, shape).astype(TYPES[scheme.weight])
    if scheme.has_input_scale:
        input_scale = np.full(1, 0.03, np.float32)
    return QuantizedArrays(values, scales, zero_points, input_scale)


def numbers(scheme, arrays, layer=LAYER):
    """The matrix in float64."""
    values = arrays.values[layer].astype(np.float64)
    if scheme.weight == "mxfp4":
        values = np.sign(values) * MAGNITUDES[np.abs(values).astype(int)]
    repeats = len(values) // arrays.scales.shape[1]
    scales = arrays.scales[layer].astype(np.float64)
    if scheme.weight == "mxfp4":
        scales = 2.0 ** (scales - 127)
    if arrays.zero_points is not None:
        values = values - np.repeat(arrays.zero_points[layer].astype(np.float64), repeats, axis=0)
    return values * np.repeat(scales, repeats, axis=0)


def rounded(x, activation, scale=None):
    """Activations as the scheme rounds them, in float64."""
    greatest = GREATEST[activation]
    if scale is None:
        scale = np.abs(x).max(axis=1, keepdims=True).astype(np.float32) / np.float32(greatest)
        scale[scale == 0] = 1
    scaled = np.clip(x.astype(np.float32) / scale, -greatest, greatest)
    if activation == "int8":
        scaled = np.round(scaled)
    return scaled.astype(TYPES[activation]).astype(np.float64) * scale


def expected(x, scheme, arrays):
    if scheme.activation is not None:
        x = rounded(x, scheme.activation, arrays.input_scale)
    return x.astype(np.float64) @ numbers(scheme, arrays)
