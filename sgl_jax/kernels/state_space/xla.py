"""The recurrence of state space models in plain XLA, for CPUs and platforms without a kernel."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from sgl_jax.kernels.gated_delta.batch import DeltaInputs, StateBatch
from sgl_jax.kernels.gated_delta.xla import RecurrenceRule, decays_between, recur, times


def state_space(
    tokens: DeltaInputs, states: jax.Array, layer: jax.Array, batch: StateBatch
) -> tuple[jax.Array, jax.Array]:
    """Implement `api.StateSpace`; padding tokens' outputs are zeros."""
    return recur(SPACE_RULE, tokens, states, layer, batch)


class _Terms(NamedTuple):
    """A token's part in a step of the recurrence, [..., lines, ...]."""

    q: jax.Array
    k: jax.Array
    change: jax.Array  # beta * v
    decay: jax.Array  # of each value

    @classmethod
    def of(cls, tokens: DeltaInputs) -> "_Terms":
        q, k = (jnp.repeat(x, tokens.group, axis=-2) for x in (tokens.q, tokens.k))

        def of_values(by_head: jax.Array) -> jax.Array:
            num_values = tokens.v.shape[-2] * tokens.v.shape[-1] // by_head.shape[-1]
            return jnp.repeat(by_head, num_values, axis=-1).reshape(tokens.v.shape)

        decay = of_values(jnp.exp(tokens.log_decay[..., 0]))
        return cls(q, k, of_values(tokens.beta) * tokens.v, decay)


def _next_token(token: _Terms, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return outputs [n, lines, values] and states [n, lines, ...] after one token."""
    q, k, change, decay = token
    state = decay[..., None, :] * state + k[..., None] * change[..., None, :]
    return times("nhk,nhkv->nhv", q, state), state


def _next_chunk(tokens: DeltaInputs, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the outputs [n, lines, values] of a chunk's tokens, and the state after them."""
    q, k, v, log_decay, beta = (jnp.moveaxis(x, 1, 0) for x in tokens)
    heads = tokens.log_decay.shape[1]

    def by_head(x: jax.Array) -> jax.Array:
        """Split lines [lines, n, values] to [heads, n, values of a head]."""
        apart = x.reshape(*x.shape[:2], heads // x.shape[0], -1)
        return jnp.moveaxis(apart, 2, 1).reshape(heads, x.shape[1], -1)

    def by_line(x: jax.Array) -> jax.Array:
        lines = state.shape[0]
        apart = x.reshape(lines, heads // lines, *x.shape[1:])
        return jnp.moveaxis(apart, 1, 2).reshape(lines, x.shape[1], -1)

    between, decay = decays_between(log_decay[..., 0])
    group = heads // k.shape[0]
    scores = jnp.repeat(times("hik,hjk->hij", q, k), group, axis=0) * decay * beta[:, None]
    q, k = (jnp.repeat(x, group, axis=0) for x in (q, k))
    v, old = by_head(v), by_head(state)
    since = jnp.exp(jnp.cumsum(log_decay, axis=1))
    out = since * times("hik,hkv->hiv", q, old) + times("hij,hjv->hiv", scores, v)
    until = (jnp.exp(between[:, -1]) * beta)[..., None]
    new = since[:, -1:] * old + times("hik,hiv->hkv", k, until * v)
    return jnp.moveaxis(by_line(out), 0, 1), by_line(new)


SPACE_RULE = RecurrenceRule(_Terms.of, _next_token, _next_chunk)
