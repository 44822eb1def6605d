"""State space models of decode rows on TPU: a token of each row, plus its drafts.

The rows, buffers and DMAs are those of `gated_delta.tpu.decode`. A state [lines, 128, 128] has the
values of two heads in its lanes, and their keys in its sublanes; each of its registers is loaded
once.
"""

from typing import Any

import jax
import jax.numpy as jnp

from sgl_jax.kernels.gated_delta.batch import DeltaInputs, StateBatch
from sgl_jax.kernels.gated_delta.tpu.decode import DecodeKernel, columns_of, recur_tokens
from sgl_jax.kernels.gated_delta.tpu.shared import DeltaArrays, StateRows


def decode_state_space(
    tokens: DeltaInputs,
    states: jax.Array,
    layer: jax.Array,
    batch: StateBatch,
    *,
    of_all_rows: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Compute the decode rows' tokens for `api.StateSpace`.

    With `of_all_rows`, prefill rows are computed in the same way, token after token. Returns v with
    outputs at these tokens, and the states; in the memory of `v` and `states` if the caller does
    not use them again.
    """
    decoded = len(tokens.v) if of_all_rows else batch.max_decode_tokens
    q, k, v, log_decay, beta = tokens
    by_head = jnp.stack([jnp.exp(log_decay[:decoded, :, 0]), beta[:decoded]], axis=1)
    values = v.shape[1] * v.shape[2] // log_decay.shape[1]
    gates = jnp.repeat(by_head, values, axis=2).reshape(*by_head.shape[:2], *v.shape[1:])
    hbm = DeltaArrays(q, k, gates, v, states)
    rows = StateRows.of(batch, layer, of_all_rows=of_all_rows)
    return recur_tokens(_change, "state_space_decode", hbm, rows)


def _change(kernel: DecodeKernel, token: jax.Array, state: Any) -> None:
    at, buffers = kernel.buffer(token), kernel.buffers
    groups, lines = buffers.k.shape[1], buffers.v.shape[1]
    columns = columns_of(*(x[at].astype(jnp.float32) for x in (buffers.k, buffers.q)))
    for line in range(lines):
        group, own = line * groups // lines, slice(line, line + 1)
        key, query = (columns[:, n : n + 1] for n in (group, groups + group))
        decay, beta = (buffers.gates[at, gate, own] for gate in range(2))
        change = beta * buffers.v[at, own].astype(jnp.float32)
        new = state[line].astype(jnp.float32) * decay + key * change
        out = jnp.sum(new * query, axis=0, keepdims=True)
        buffers.out[at, own] = out.astype(buffers.out.dtype)
        buffers.states[1, at, line] = new.astype(buffers.states.dtype)
