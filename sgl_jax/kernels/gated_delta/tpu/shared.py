"""Common parts of the kernels of gated delta nets: rows, arrays and buffers."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from sgl_jax.kernels.gated_delta.batch import StateBatch

EPSILON = 1e-6  # added to the squared lengths of keys and queries


class StateRows(NamedTuple):
    """The rows of a step: arrays outside a kernel, in scalar memory inside."""

    layer: Any  # int32 [1]
    num_decode: Any  # int32 [1]
    q_offsets: Any  # int32 [B + 1]
    token_rows: Any  # int32 [T]
    slots_in: Any  # int32 [B]
    slots_out: Any  # int32 [B]
    # Two int32 [T] with slots for the state after each token, or negative numbers; None: each
    # token's `slot_written`.
    slots_after: Any = None

    @classmethod
    def of(cls, batch: StateBatch, layer: jax.Array, *, of_all_rows: bool = False) -> "StateRows":
        """Return the rows of `batch`; with `of_all_rows`, all of them count as decode rows."""
        num_decode = batch.num_rows if of_all_rows else batch.num_decode
        numbers = layer.reshape(1), num_decode.reshape(1)
        slots = batch.slots_in, batch.slots_out
        after = batch.slots_after() if of_all_rows else None
        return cls(*numbers, batch.q_offsets, batch.token_rows, *slots, after)

    @property
    def num_tokens(self) -> jax.Array:
        """Return the number of tokens of all rows, without padding."""
        return self.q_offsets[self.q_offsets.shape[0] - 1]

    def is_first(self, token: Any) -> jax.Array:
        return token == self.q_offsets[self.token_rows[token]]

    def slot_written(self, token: Any) -> jax.Array:
        """Return the slot of the state after a decode row's token."""
        row = self.token_rows[token]
        return self.slots_out[row] + token - self.q_offsets[row]


class DeltaArrays(NamedTuple):
    """The inputs and results in HBM."""

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

    @classmethod
    def scratch(cls, arrays: DeltaArrays, *lead: int) -> "Buffers":
        """Return scratch shapes with the dimensions `lead` before a token's dimensions.

        `lead[0]` is the number of buffers of each array, and of states before and after some
        tokens.
        """
        q, k, gates, v = (pltpu.VMEM((*lead, *x.shape[1:]), x.dtype) for x in arrays[:4])
        states = arrays.states
        kept = pltpu.VMEM((2, lead[0], *states.shape[2:]), states.dtype)
        return cls(q, k, gates, v, v, kept)


class Semaphores(NamedTuple):
    tokens: Any
    states: Any
    results: Any

    @classmethod
    def scratch(cls, num_buffers: int) -> "Semaphores":
        return cls(*[pltpu.SemaphoreType.DMA((num_buffers,))] * 3)


def unit(x: jax.Array) -> jax.Array:
    """Scale each row of x [n, 128] to length 1, in float32."""
    wide = x.astype(jnp.float32)
    return wide * lax.rsqrt(jnp.sum(wide * wide, axis=1, keepdims=True) + EPSILON)


def row_and_column(shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Return the row number and the column number of each element, int32 of `shape`."""
    row, column = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in range(2))
    return row, column
