"""Common parts of the kernels of the gated delta rule: arrays, buffers, the call."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from sgl_jax.kernels.pallas_tpu import UNCHECKED

EPSILON = 1e-6  # of the lengths of keys and queries


class HBM(NamedTuple):
    q: Any  # [T, Hk, 128]
    k: Any  # [T, Hk, 128]
    gates: Any  # float32 [T, 2, ...] decays and betas, laid out by each kernel
    v: Any  # [T, Hv, 128] values, then outputs
    states: Any  # [layers, slots, Hv, 128, 128]


class Buffers(NamedTuple):
    """Some tokens or states of each array, in vector memory."""

    q: Any
    k: Any
    gates: Any
    v: Any
    out: Any
    states: Any


def call(
    kernel: Callable[..., None],
    name: str,
    scalars: tuple[Any, ...],
    hbm: HBM,
    scratch: list[Any],
    interpret: Any,
) -> tuple[jax.Array, jax.Array]:
    """Run kernel(scalars, hbm, v, states, *scratch), all of them references; returns v and states.

    These two take the memory of `hbm.v` and `hbm.states`. `scalars` are in scalar memory.
    """
    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    run = pl.pallas_call(
        kernel,
        name=name,
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (hbm.v, hbm.states)],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            in_specs=[HBM(*[in_hbm] * len(hbm))],
            out_specs=[in_hbm, in_hbm],
            scratch_shapes=scratch,
        ),
        input_output_aliases={len(scalars) + 3: 0, len(scalars) + 4: 1},
        compiler_params=UNCHECKED,
        interpret=interpret,
    )
    out, states = run(scalars, hbm)
    return out, states


def unit(x: jax.Array) -> jax.Array:
    """float32 of x [n, 128], each row scaled to length 1."""
    wide = x.astype(jnp.float32)
    return wide * lax.rsqrt(jnp.sum(wide * wide, axis=1, keepdims=True) + EPSILON)


def row_and_column(shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """int32 of `shape`, the number of each element's row, and of its column."""
    row, column = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in range(2))
    return row, column
