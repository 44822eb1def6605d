"""A layer's products over a ring: drawn, run under `shard_map`, and judged by float64."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

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
        values = rng.integers(-127, 128, shape).astype(np.int8)
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
            inner = gather_multiply(x, *into)
            return multiply_scatter(inner, problem.down, layer, x, "tensor"), None

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
        gate, up, down = (numbers(own, layer) for own in problem[2:])
        x = x + (np.tanh(normed @ gate) * (normed @ up)) @ down
    # To numbers of about one, as the comparison expects.
    scale = np.abs(x).max()
    assert_close(np.asarray(result, np.float64) / scale, x / scale, program.dtype)
