"""The gated delta rule of decode rows on TPU: a token of each row, plus its drafts.

Decode is bound by memory: each token's state is written once, and the state before a row's first
token is read once. In between it stays in vector memory, and each of its registers is loaded twice:
for the products with the key and the query, and for the update. The products are too small for the
matrix unit, which would have to load the states as weights.

Grid: none. One program processes the tokens of the rows 0 .. num_decode in order.

Buffers, with n of each (`num_buffers`), and a state [Hv, 128, 128]:
    q, k, v, gates   [n, heads, 128]   of token t in t % n; gates are decay and beta, in all lanes
    out              [n, Hv, 128]      of token t in t % n
    states           [2, n, *state]    before token t in [0, t % n] if it is its row's first,
                                       after token t in [1, t % n]

DMAs of token t:
    start the inputs of token t + n - 1, with its row's state if it is the row's first
    wait for the inputs of token t
    wait until the results of token t - n are in memory; start the results of token t
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from sgl_jax.kernels.gated_delta.batch import DeltaInputs, StateBatch
from sgl_jax.kernels.gated_delta.tpu.shared import Buffers, DeltaArrays, Semaphores, StateRows, unit
from sgl_jax.kernels.pallas_tpu import call, start, wait
from sgl_jax.kernels.tpu_chip import LANES, SUBLANES

# Three buffers of large states keep the memory busy; small states need more DMAs in flight, since
# each DMA has a latency.
MIN_BUFFERS, MAX_BUFFERS = 3, 8
BUFFER_BYTES = 4 << 20


class DecodeKernel(NamedTuple):
    """The references of a running kernel."""

    rows: StateRows
    hbm: DeltaArrays  # gates float32 [T, 2, Hv, 128]
    buffers: Buffers
    sems: Semaphores

    @property
    def num_buffers(self) -> int:
        return self.buffers.out.shape[0]

    def buffer(self, index: Any) -> jax.Array:
        return lax.rem(index, jnp.int32(self.num_buffers))


# Writes a token's output, and the state after it, to its buffers; the last argument is the state
# before it.
Change = Callable[[DecodeKernel, jax.Array, Any], None]


def num_buffers(state_bytes: int) -> int:
    """Return the number of buffers of each kind for states of `state_bytes` bytes."""
    return min(max(BUFFER_BYTES // state_bytes, MIN_BUFFERS), MAX_BUFFERS)


def decode_gated_delta(
    tokens: DeltaInputs,
    states: jax.Array,
    layer: jax.Array,
    batch: StateBatch,
    *,
    of_all_rows: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Compute the decode rows' tokens for `api.GatedDelta`, with key_dim and value_dim 128.

    With `of_all_rows`, prefill rows are computed in the same way, token after token. Returns v with
    outputs at these tokens, and the states; in the memory of `v` and `states` if the caller does
    not use them again.
    """
    decoded = len(tokens.v) if of_all_rows else batch.max_decode_tokens
    q, k, v, log_decay, beta = tokens
    by_head = (decoded, v.shape[1], LANES)
    parts = jnp.exp(log_decay[:decoded]), beta[:decoded, :, None]
    gates = jnp.stack([jnp.broadcast_to(part, by_head) for part in parts], axis=1)
    hbm = DeltaArrays(q, k, gates, v, states)
    change = partial(_change, by_channel=tokens.decays_by_channel)
    rows = StateRows.of(batch, layer, of_all_rows=of_all_rows)
    return recur_tokens(change, "gated_delta_decode", hbm, rows)


def recur_tokens(
    change: Change, name: str, hbm: DeltaArrays, rows: StateRows
) -> tuple[jax.Array, jax.Array]:
    """Compute the decode rows' tokens by `change`; return the arrays of tokens and of states."""
    states = hbm.states
    n = num_buffers(states[0, 0].size * states.dtype.itemsize)
    scratch = [Buffers.scratch(hbm, n), Semaphores.scratch(n)]
    out, states = call(partial(_kernel, change=change), name, (rows,), (), hbm, 2, scratch)
    return out, states


def _kernel(
    rows: StateRows,
    hbm: DeltaArrays,
    tokens: Any,
    states: Any,
    buffers: Buffers,
    sems: Semaphores,
    *,
    change: Change,
) -> None:
    # Inputs and results share memory: one array is read and written.
    kernel = DecodeKernel(rows, hbm._replace(v=tokens, states=states), buffers, sems)
    num_tokens, ahead = rows.q_offsets[rows.num_decode[0]], kernel.num_buffers - 1

    @pl.loop(0, jnp.minimum(num_tokens, ahead))
    def _(token: jax.Array) -> None:
        _start_token(kernel, token)

    @pl.loop(0, num_tokens)
    def _(token: jax.Array) -> None:
        pl.when(token + ahead < num_tokens)(lambda: _start_token(kernel, token + ahead))
        _next_token(kernel, token, change)

    @pl.loop(jnp.maximum(num_tokens - kernel.num_buffers, 0), num_tokens)
    def _(token: jax.Array) -> None:
        _result_copies(kernel, token, wait)


def _start_token(kernel: DecodeKernel, token: jax.Array) -> None:
    _for_each(_token_copies(kernel, token), start)
    pl.when(kernel.rows.is_first(token))(lambda: _state_copy(kernel, token).start())


def _next_token(kernel: DecodeKernel, token: jax.Array, change: Change) -> None:
    is_first = kernel.rows.is_first(token)
    _for_each(_token_copies(kernel, token), wait)
    pl.when(token >= kernel.num_buffers)(
        lambda: _result_copies(kernel, token - kernel.num_buffers, wait)
    )
    pl.when(is_first)(lambda: _state_copy(kernel, token).wait())
    change(kernel, token, _state_before(kernel, token, is_first))
    _result_copies(kernel, token, start)


def _state_before(kernel: DecodeKernel, token: jax.Array, is_first: jax.Array) -> Any:
    before = kernel.buffer(jnp.where(is_first, token, token - 1))
    return kernel.buffers.states.at[jnp.where(is_first, 0, 1), before]


def _change(kernel: DecodeKernel, token: jax.Array, state: Any, *, by_channel: bool) -> None:
    at, buffers = kernel.buffer(token), kernel.buffers
    key_heads, value_heads = buffers.k.shape[1], buffers.v.shape[1]
    q, k = unit(buffers.q[at]) * LANES**-0.5, unit(buffers.k[at])
    both = jnp.sum(q * k, axis=1, keepdims=True)
    columns = columns_of(k, q, *[buffers.gates[at, 0]] * by_channel)
    for head in range(value_heads):
        key_head = head // (value_heads // key_heads)
        key, query = (columns[:, i : i + 1] for i in (key_head, key_heads + key_head))
        own = slice(head, head + 1)
        decay, beta = (buffers.gates[at, gate, own] for gate in range(2))
        if by_channel:
            number = 2 * key_heads + head
            decay = columns[:, number : number + 1]
        decayed = state[head].astype(jnp.float32) * decay
        seen = jnp.sum(decayed * key, axis=0, keepdims=True)
        change = beta * (buffers.v[at, own].astype(jnp.float32) - seen)
        out = jnp.sum(decayed * query, axis=0, keepdims=True)
        out += both[key_head : key_head + 1] * change
        buffers.out[at, own] = out.astype(buffers.out.dtype)
        new = decayed + key * change
        buffers.states[1, at, head] = new.astype(buffers.states.dtype)


def columns_of(*rows: jax.Array) -> jax.Array:
    """Transpose n float32 rows [*, 128] to [128, n], padded with columns of zeros."""
    if missing := -sum(map(len, rows)) % SUBLANES:
        rows = (*rows, jnp.zeros((missing, LANES), jnp.float32))
    return jnp.concatenate(rows, axis=0).T


def _token_copies(kernel: DecodeKernel, token: jax.Array) -> list[Any]:
    at = kernel.buffer(token)
    return [
        pltpu.make_async_copy(source.at[token], target.at[at], kernel.sems.tokens.at[at])
        for source, target in zip(kernel.hbm[:4], kernel.buffers[:4], strict=True)
    ]


def _state_copy(kernel: DecodeKernel, token: jax.Array) -> Any:
    at, row = kernel.buffer(token), kernel.rows.token_rows[token]
    source = kernel.hbm.states.at[kernel.rows.layer[0], kernel.rows.slots_in[row]]
    return pltpu.make_async_copy(source, kernel.buffers.states.at[0, at], kernel.sems.states.at[at])


def _result_copies(kernel: DecodeKernel, token: jax.Array, do: Callable[[Any], None]) -> None:
    """Call do(copy) for the DMAs of a token's output, and of the state after it to its slots."""
    at, rows, buffers, sem = kernel.buffer(token), kernel.rows, kernel.buffers, kernel.sems.results
    do(pltpu.make_async_copy(buffers.out.at[at], kernel.hbm.v.at[token], sem.at[at]))

    def copy_state(slot: jax.Array) -> None:
        target = kernel.hbm.states.at[rows.layer[0], slot]
        do(pltpu.make_async_copy(buffers.states.at[1, at], target, sem.at[at]))

    if rows.slots_after is None:
        copy_state(rows.slot_written(token))
        return
    for slots in rows.slots_after:
        pl.when(slots[token] >= 0)(partial(copy_state, slots[token]))


def _for_each(copies: list[Any], do: Callable[[Any], None]) -> None:
    for copy in copies:
        do(copy)
