"""Values and scales stand for numbers; activations become values of a format and a scale."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from sgl_jax.core.layer_configs import Scheme
from sgl_jax.kernels.quantized_matmul.numbers import (
    as_numbers,
    as_scales,
    dequantized,
    quantize_activations,
    scale_dtype,
    value_dtype,
)
from tests.kernels.quantized_matmul.problems import LAYER, draw, numbers, rounded


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_each_value_of_mxfp4_stands_for_its_number(dtype):
    places = np.arange(-7, 8).astype(ml_dtypes.int4)
    one = as_scales(jnp.uint8(127), jnp.float32)
    found = as_numbers(jnp.asarray(places), "mxfp4", dtype).astype(jnp.float32) * one
    positive = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    np.testing.assert_array_equal(found, [*(-own for own in positive[:0:-1]), *positive])


@pytest.mark.parametrize(
    "scheme",
    [
        Scheme("int8"),
        Scheme("fp8", 32),
        Scheme("int4", 16, has_zero_points=True),
        Scheme("mxfp4", 32),
    ],
    ids=lambda own: own.name,
)
def test_matrices_become_their_numbers(scheme):
    arrays = draw(scheme, inputs=64, outputs=24)
    given = (None if own is None else jnp.asarray(own)[LAYER] for own in arrays[:3])
    found = dequantized(*given, scheme.weight, jnp.float32)
    np.testing.assert_allclose(found, numbers(scheme, arrays), rtol=1e-6)


@pytest.mark.parametrize("activation", ["int8", "fp8"])
@pytest.mark.parametrize("scale", [None, 0.01], ids=["dynamic", "static"])
def test_activations_are_rounded_and_cut_to_the_greatest(activation, scale):
    x = np.random.default_rng(0).normal(size=(6, 40)).astype(np.float32) * 4
    x[1] = 0
    given = None if scale is None else jnp.full(1, scale, jnp.float32)
    values, scales = quantize_activations(jnp.asarray(x), activation, given)
    assert values.dtype == value_dtype(activation)
    assert scales.shape == ((6, 1) if scale is None else (1,))
    found = np.asarray(values, np.float64) * np.asarray(scales, np.float64)
    wanted = rounded(x, activation, None if scale is None else np.full(1, scale, np.float32))
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    assert np.isfinite(found).all()


def test_scales_have_the_models_type_only_in_groups():
    assert scale_dtype("int8", jnp.bfloat16, in_groups=False) == jnp.float32
    assert scale_dtype("int4", jnp.bfloat16, in_groups=True) == jnp.bfloat16
    assert scale_dtype("mxfp4", jnp.bfloat16, in_groups=True) == jnp.uint8
