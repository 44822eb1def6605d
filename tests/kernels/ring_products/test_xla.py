"""Products over a ring, by XLA, are those of the whole arrays."""

import jax
import jax.numpy as jnp
import pytest

from sgl_jax.kernels.ring_products.interface import XLA_RING_PRODUCTS, ring_products_implementation
from sgl_jax.kernels.ring_products.tpu.gather import tpu_gather_multiply
from tests.kernels.ring_products.problems import Program, check, draw, on_ring


@pytest.mark.parametrize("is_quantized", [False, True])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("chips", [2, 4])
def test_agrees_with_float64(chips, dtype, is_quantized):
    program = Program(chips, 5, 24, 40, is_quantized, dtype)
    problem = draw(program, 0)
    check(program, problem, jax.jit(on_ring(program, *XLA_RING_PRODUCTS[:2]))(problem))


@pytest.mark.parametrize("activation", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_quantized_activations_agree_with_float64(dtype, activation):
    program = Program(2, 16, 64, 96, is_quantized=True, dtype=dtype, activation=activation)
    problem = draw(program, 0)
    check(program, problem, jax.jit(on_ring(program, *XLA_RING_PRODUCTS[:2]))(problem))


def test_each_platform_has_its_own():
    assert ring_products_implementation("cpu") is XLA_RING_PRODUCTS
    assert ring_products_implementation("gpu") is XLA_RING_PRODUCTS
    assert ring_products_implementation("tpu").gather_multiply is tpu_gather_multiply
    simulated = ring_products_implementation("cpu", simulate=True)
    assert simulated.gather_multiply.__wrapped__ is tpu_gather_multiply  # type: ignore[attr-defined]
