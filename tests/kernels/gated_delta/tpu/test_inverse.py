"""Inverses of a chunk's triangular systems against float64."""

from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas.tpu import force_tpu_interpret_mode

from sgl_jax.kernels.gated_delta.batch import CHUNK_TOKENS
from sgl_jax.kernels.gated_delta.tpu.inverse import inverses
from tests.kernels.simulation import EAGER

PAIRS = 2

# The worst that keys make of it: alike, with high betas, little forgotten.
TOLERANCE = {jnp.float32: 1e-6, jnp.bfloat16: 1.5e-2}


@lru_cache
def solver(dtype):
    def kernel(source, target):
        for n, found in enumerate(inverses([source[n] for n in range(PAIRS)], dtype)):
            target[n] = found

    @jax.jit
    def solve(pairs):
        with force_tpu_interpret_mode(EAGER):
            return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(pairs.shape, jnp.float32))(
                pairs
            )

    return solve


def check(systems, dtype):
    """Two systems [4, 64, 64] side by side; numbers on and above the diagonal do not count."""
    side_by_side = np.concatenate([systems[::2], systems[1::2]], axis=2).astype(np.float32)
    found = np.asarray(solver(dtype)(side_by_side))
    lower = np.tril(systems.astype(np.float32).astype(np.float64), -1)
    want = np.linalg.inv(np.eye(CHUNK_TOKENS) + lower)
    for half in range(2):
        own = found[:, :, half * CHUNK_TOKENS :][:, :, :CHUNK_TOKENS]
        np.testing.assert_allclose(own, want[half::2], rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("alike", [0, 0.9, 1])
def test_systems_of_keys(alike, dtype):
    rng = np.random.default_rng(0)
    keys = rng.normal(size=(4, CHUNK_TOKENS, 128))
    keys = alike * keys[:, :1] + (1 - alike) * keys
    keys /= np.linalg.norm(keys, axis=2, keepdims=True)
    beta = rng.uniform(0.9, 1, size=(4, 1, CHUNK_TOKENS))
    check(keys @ keys.swapaxes(1, 2) * beta, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("row", [1, 7, 8, 15, 16, 31, 32, 33, 63])
def test_one_number_at_the_borders_of_blocks(row, dtype):
    systems = np.zeros((4, CHUNK_TOKENS, CHUNK_TOKENS))
    systems[0, row, row - 1] = systems[1, row, 0] = systems[2, 63, row - 1] = 0.5
    systems[3] = np.triu(np.full((CHUNK_TOKENS, CHUNK_TOKENS), 7.0))
    check(systems, dtype)
