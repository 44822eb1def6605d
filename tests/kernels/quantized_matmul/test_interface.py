"""Products with quantized matrices, by XLA and on a CPU, are those of their numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sgl_jax.core.layer_configs import Scheme
from sgl_jax.kernels.quantized_matmul import xla
from sgl_jax.kernels.quantized_matmul.xla import cpu_quantized_matmul, xla_quantized_matmul
from tests.kernels.quantized_matmul.problems import LAYER, draw, expected

SCHEMES = [
    Scheme("int8"),
    Scheme("fp8"),
    Scheme("int4", 32),
    Scheme("int8", 64),
    Scheme("fp8", 128),
    Scheme("int4", 32, has_zero_points=True),
    Scheme("int4", has_zero_points=True),
    Scheme("mxfp4", 32),
    Scheme("int8", activation="int8"),
    Scheme("fp8", activation="fp8"),
    Scheme("int8", activation="int8", has_input_scale=True),
    Scheme("fp8", activation="fp8", has_input_scale=True),
]


@pytest.mark.parametrize("multiply", [xla_quantized_matmul, cpu_quantized_matmul])
@pytest.mark.parametrize(
    ("scheme", "inputs"),
    [
        (scheme, inputs)
        for scheme in SCHEMES
        for inputs in (256, 384, 320)
        if inputs % (scheme.group_size or 1) == 0
    ],
    ids=lambda own: own.name if isinstance(own, Scheme) else str(own),
)
def test_agrees_with_float64(scheme, inputs, multiply, monkeypatch):
    # So that a CPU takes several blocks of 64 inputs, or of a group.
    monkeypatch.setattr(xla, "_CPU_NUMBERS", 64 * 24)
    monkeypatch.setattr(xla, "_CPU_LEAST_INPUTS", 1)
    arrays = draw(scheme, inputs, outputs=24)
    x = np.random.default_rng(1).normal(size=(5, inputs)).astype(np.float32)
    x[2] = 0  # a padding token
    run = jax.jit(multiply, static_argnums=3)
    found = run(x, jax.tree.map(jnp.asarray, arrays), jnp.int32(LAYER), scheme)
    wanted = expected(x, scheme, arrays)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("multiply", [xla_quantized_matmul, cpu_quantized_matmul])
def test_the_result_has_the_type_of_the_activations(multiply):
    scheme = Scheme("int4", 32, has_zero_points=True)
    arrays = draw(scheme, inputs=256, outputs=24)
    x = np.random.default_rng(1).normal(size=(5, 256)).astype(jnp.bfloat16)
    found = multiply(x, jax.tree.map(jnp.asarray, arrays), jnp.int32(LAYER), scheme)
    wanted = expected(x.astype(np.float64), scheme, arrays)
    assert found.dtype == jnp.bfloat16
    error = np.abs(np.asarray(found, np.float64) - wanted).max()
    assert error < 0.02 * np.abs(wanted).max()
