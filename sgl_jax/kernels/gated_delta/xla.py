"""TEMPORARY stand-in until the gdn branch is merged."""

import jax, jax.numpy as jnp
from jax import lax


def _writes(batch, t, row):
    in_row = t - batch.q_offsets[row]
    is_decode = row < batch.num_decode
    last = t + 1 == batch.q_offsets[row + 1]
    own = jnp.where(
        is_decode, batch.slots_out[row] + in_row, jnp.where(last, batch.slots_out[row], -1)
    )
    ends = (batch.chunk_starts[1:] == t + 1) & (
        jnp.arange(batch.chunk_rows.shape[0]) < batch.num_chunks
    )
    snap = jnp.max(jnp.where(ends, batch.chunk_snapshots, -1), initial=-1)
    return own, snap


def _run(states, layer, batch, step):
    def body(t, carry):
        states, s, outs = carry
        row = batch.token_rows[t]
        first = t == batch.q_offsets[row]
        s = jnp.where(first, states[layer, batch.slots_in[row]].astype(jnp.float32), s)
        s, out = step(t, s)
        for slot in _writes(batch, t, row):
            ok = batch.valid[t] & (slot >= 0)
            i = jnp.maximum(slot, 0)
            states = states.at[layer, i].set(
                jnp.where(ok, s.astype(states.dtype), states[layer, i])
            )
        return states, s, outs.at[t].set(out)

    return body


def gated_delta(q, k, v, log_decay, beta, states, layer, batch):
    f = jnp.float32
    norm = lambda x: x.astype(f) * lax.rsqrt(jnp.sum(x.astype(f) ** 2, -1, keepdims=True) + 1e-6)
    r = v.shape[1] // k.shape[1]
    q, k = jnp.repeat(norm(q) * q.shape[-1] ** -0.5, r, 1), jnp.repeat(norm(k), r, 1)

    def step(t, s):
        s = s * jnp.exp(log_decay[t])[:, None, None]
        d = beta[t][:, None] * (v[t].astype(f) - jnp.einsum("hkv,hk->hv", s, k[t]))
        s = s + k[t][:, :, None] * d[:, None]
        return s, jnp.einsum("hkv,hk->hv", s, q[t]).astype(v.dtype)

    body = _run(states, layer, batch, step)
    states, _, out = lax.fori_loop(
        0, q.shape[0], body, (states, jnp.zeros(states.shape[2:], f), jnp.zeros(v.shape, v.dtype))
    )
    return out, states


def causal_conv(u, weight, states, layer, batch):
    def step(t, s):
        window = jnp.concatenate([s, u[t][None].astype(s.dtype)])
        return window[1:], jax.nn.silu(jnp.sum(window * weight, 0)).astype(u.dtype)

    body = _run(states, layer, batch, step)
    states, _, out = lax.fori_loop(
        0, u.shape[0], body, (states, jnp.zeros(states.shape[2:], jnp.float32), jnp.zeros_like(u))
    )
    return out, states
