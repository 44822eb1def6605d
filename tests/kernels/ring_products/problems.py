"""A layer's products over a ring: drawn, run under `shard_map`, and judged by float64."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from sgl_jax.kernels.quantized_matmul.numbers import quantize_activations, value_dtype
from sgl_jax.kernels.ring_products.matrices import RingMatrix
from tests.kernels.simulation import assert_close

LAYERS, EPS = 3, 1e-5
RESULT = P(None, "tensor")
BY_OUTPUT, BY_INPUT = P(None, None, "tensor"), P(None, "tensor", None)


class Program(NamedTuple):
    """Sizes on one chip, and how a problem is stored."""

    chips: int = 2
    tokens: int = 32
    columns: int = 128  # of the hidden states
    inner: int = 256
    is_quantized: bool = False
    dtype: Any = jnp.float32
    ranks: int = 1  # that multiply the same
    activation: str | None = None


class Problem(NamedTuple):
    """The whole arrays: two matrices into a layer, and one out of it."""

    x: np.ndarray
    norm: np.ndarray
    gate: RingMatrix
    up: RingMatrix
    down: RingMatrix


def draw(program, seed):
    """Layer 0 is none of the problem's: NaN, or scaled by NaN."""
    rng = np.random.default_rng(seed)
    hidden, inner = program.chips * program.columns, program.chips * program.inner

    def matrix(inputs, outputs):
        shape = (LAYERS, inputs, outputs)
        if not program.is_quantized:
            values = (rng.normal(size=shape) / np.sqrt(inputs)).astype(program.dtype)
            values[0] = np.nan
            return RingMatrix(values)
        values = rng.integers(-127, 128, shape).astype(value_dtype(program.activation or "int8"))
        scales = rng.uniform(0.5, 1.5, (LAYERS, 1, outputs)).astype(np.float32)
        scales[0] = np.nan
        return RingMatrix(values, scales / np.float32(64 * np.sqrt(inputs)))

    x = rng.normal(size=(program.tokens, hidden)).astype(program.dtype)
    norm = rng.uniform(0.5, 1.5, hidden).astype(np.float32)
    into = (matrix(hidden, inner), matrix(hidden, inner))
    return Problem(x, norm, *into, matrix(inner, hidden))


def gated(gate, up):
    return jnp.tanh(gate) * up


def on_ring(program, gather_multiply, multiply_scatter):
    """The function of a problem that runs layers 1 and 2, one after the other, in a loop."""

    def layers(problem):
        def run(x, layer):
            into = (problem.norm, EPS, (problem.gate, problem.up), layer, gated, "tensor")
            inner = gather_multiply(x, *into, program.activation)
            out = (problem.down, layer, x, "tensor", program.activation)
            return multiply_scatter(inner, *out), None

        return lax.scan(run, problem.x, jnp.arange(1, LAYERS))[0]

    def specs(by, of_scales):
        return RingMatrix(by, of_scales if program.is_quantized else None)

    into, out = specs(BY_OUTPUT, BY_OUTPUT), specs(BY_INPUT, P())
    devices = np.array(jax.devices()[: program.ranks * program.chips])
    mesh = Mesh(devices.reshape(program.ranks, -1), ("data", "tensor"))
    return jax.shard_map(
        layers,
        mesh=mesh,
        in_specs=(Problem(RESULT, P(), into, into, out),),
        out_specs=RESULT,
        check_vma=False,
    )


def check(program, problem, result):
    assert result.dtype == program.dtype

    def numbers(matrix, layer):
        values = np.asarray(matrix.values[layer], np.float64)
        return values if matrix.scales is None else values * matrix.scales[layer]

    x = np.asarray(problem.x, np.float64)
    for layer in range(1, LAYERS):
        normed = x / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + EPS) * problem.norm
        normed = rounded(program, normed)
        gate, up, down = (numbers(own, layer) for own in problem[2:])
        inner = np.tanh(normed @ gate) * (normed @ up)
        of_chips = np.split(inner, program.chips, axis=1)
        inner = np.concatenate([rounded(program, own) for own in of_chips], axis=1)
        x = x + inner @ down
    # To numbers of about one, as the comparison expects.
    scale = np.abs(x).max()
    got = np.asarray(result, np.float64) / scale
    if program.activation is None:
        assert_close(got, x / scale, program.dtype)
    else:
        # A number between two values may go to either, and a layer later all are others.
        error = np.sqrt(np.mean((got - x / scale) ** 2))
        assert error < (4e-3 if program.dtype == jnp.float32 else 2e-2)


def rounded(program, x):
    """x as it is multiplied, each row scaled by itself."""
    if program.activation is None:
        return x
    values, scale = quantize_activations(jnp.asarray(x, jnp.float32), program.activation, None)
    return np.asarray(values, np.float64) * np.asarray(scale, np.float64)
