"""The gated delta rule and its convolution in plain XLA, for CPUs and platforms without a kernel.

The cost depends on the tokens in use: loops over blocks of decode rows, and over chunks, have
dynamic trip counts. States are carried through these loops, in place.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sgl_jax.kernels.gated_delta.batch import CHUNK_TOKENS, DeltaInputs, StateBatch
from sgl_jax.kernels.row_blocks import row_wise

DECODE_ROWS = 8  # rows computed at once


class RecurrenceRule(NamedTuple):
    """How a recurrence's tokens change a state; all arrays are float32."""

    terms: Callable[[DeltaInputs], Any]  # of tokens [..., heads, dim], without a state
    next_token: Callable[[Any, jax.Array], tuple[jax.Array, jax.Array]]
    next_chunk: Callable[[DeltaInputs, jax.Array], tuple[jax.Array, jax.Array]]


def _some(tokens: DeltaInputs, numbers: jax.Array, exists: jax.Array) -> DeltaInputs:
    """Return tokens `numbers`, int32 [...], in float32.

    They are zeros, which do not change a state, where `exists`, bool [...], is False.
    """

    def take(x: jax.Array) -> jax.Array:
        some = x.at[numbers].get(mode="clip").astype(jnp.float32)
        return jnp.where(exists.reshape(exists.shape + (1,) * (x.ndim - 1)), some, 0)

    return DeltaInputs(*map(take, tokens))


def _scaled(tokens: DeltaInputs) -> DeltaInputs:
    q, k = tokens.q, tokens.k
    return tokens._replace(q=_unit(q) * q.shape[-1] ** -0.5, k=_unit(k))


def _unit(x: jax.Array) -> jax.Array:
    return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def gated_delta(
    tokens: DeltaInputs, states: jax.Array, layer: jax.Array, batch: StateBatch
) -> tuple[jax.Array, jax.Array]:
    """Implement `api.GatedDelta`; padding tokens' outputs are zeros."""
    return recur(DELTA_RULE, tokens, states, layer, batch)


def recur(
    rule: RecurrenceRule,
    tokens: DeltaInputs,
    states: jax.Array,
    layer: jax.Array,
    batch: StateBatch,
) -> tuple[jax.Array, jax.Array]:
    """Compute a step's tokens by `rule`, and the states in the batch's slots."""
    v = tokens.v
    # A partial chunk writes zeros after its last token; later chunks' tokens overwrite them.
    room = jnp.zeros((v.shape[0] + CHUNK_TOKENS, *v.shape[1:]), v.dtype)
    out, states = _decode(rule, tokens, room, states, layer, batch)
    out, states = _prefill(rule, tokens, out, states, layer, batch)
    return out[: v.shape[0]], states


def _decode(
    rule: RecurrenceRule,
    tokens: DeltaInputs,
    out: jax.Array,
    states: jax.Array,
    layer: jax.Array,
    batch: StateBatch,
) -> tuple[jax.Array, jax.Array]:
    num_rows, most = min(DECODE_ROWS, batch.slots_in.shape[0]), 1 + batch.max_draft_tokens

    def block(number: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        out, states = carry
        rows = number * num_rows + jnp.arange(num_rows)
        starts = batch.q_offsets.at[rows].get(mode="clip")
        lengths = batch.q_offsets.at[rows + 1].get(mode="clip") - starts
        lengths = jnp.where(rows < batch.num_decode, lengths, 0)
        slots_in = batch.slots_in.at[rows].get(mode="clip")
        slots_out = batch.slots_out.at[rows].get(mode="clip")
        # Positions come first. Terms without a state are computed for all positions at once.
        position = jnp.arange(most)[:, None]
        exists, numbers = position < lengths, starts + position
        some = rule.terms(_some(tokens, numbers, exists))
        state = states[layer, slots_in].astype(jnp.float32)

        def next_position(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            outs, after, state = carry
            own, state = rule.next_token(jax.tree.map(lambda x: x[i], some), state)
            return outs.at[i].set(own), after.at[i].set(state), state

        first, state = rule.next_token(jax.tree.map(lambda x: x[0], some), state)
        outs, after = (
            jnp.zeros((most, *own.shape), own.dtype).at[0].set(own) for own in (first, state)
        )
        if most > 1:
            last = jnp.max(lengths)
            outs, after, _ = lax.fori_loop(1, last, next_position, (outs, after, state))
        written = jnp.where(exists, numbers, out.shape[0])
        out = out.at[written].set(outs.astype(out.dtype), mode="drop")
        slots = jnp.where(exists, slots_out + position, -1)
        return out, write_states(states, layer, slots, after)

    return lax.fori_loop(0, -(-batch.num_decode // num_rows), block, (out, states))


class _Terms(NamedTuple):
    """A token's part in a step of the recurrence, [..., value_heads, ...]."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    decay: jax.Array
    beta: jax.Array
    q_times_k: jax.Array

    @classmethod
    def of(cls, tokens: DeltaInputs) -> "_Terms":
        tokens = _scaled(tokens)
        q, k = (jnp.repeat(x, tokens.group, axis=-2) for x in (tokens.q, tokens.k))
        decay, beta = jnp.exp(tokens.log_decay), tokens.beta[..., None]
        q_times_k = jnp.sum(k * q, axis=-1, keepdims=True)
        return cls(q, k, tokens.v, decay, beta, q_times_k)


def _next_token(token: _Terms, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return outputs [n, value_heads, dim] and states [n, value_heads, ...] after one token."""
    q, k, v, decay, beta, q_times_k = token
    # The old state is read once for both products: S^T q is the old state's part plus the change's.
    # One small product takes a CPU half as long as two sums over the state.
    both = _read(jnp.stack([k, q], axis=-2), decay[..., None, :], state)
    change = beta * (v - both[:, :, 0])
    out = both[:, :, 1] + change * q_times_k
    return out, decay[..., None] * state + k[..., None] * change[..., None, :]


def _read(rows: jax.Array, decay: jax.Array, state: jax.Array) -> jax.Array:
    """Multiply rows [..., n, key_dim] with the state, decayed before each of them.

    A decay of a whole head is a factor of the result, which takes a CPU less than one of the rows.
    """
    if decay.shape[-1] > 1:
        return times("...ik,...kv->...iv", rows * decay, state)
    return decay * times("...ik,...kv->...iv", rows, state)


def write_states(
    states: jax.Array, layer: jax.Array, slots: jax.Array, new: jax.Array
) -> jax.Array:
    """Write `new` [..., a state's numbers] to the non-negative `slots` int32 [...]."""
    slots = jnp.where(slots < 0, states.shape[1], slots)
    new = new.reshape(*slots.shape, *states.shape[2:])
    return states.at[layer, slots].set(new.astype(states.dtype), mode="drop")


def _prefill(
    rule: RecurrenceRule,
    tokens: DeltaInputs,
    out: jax.Array,
    states: jax.Array,
    layer: jax.Array,
    batch: StateBatch,
) -> tuple[jax.Array, jax.Array]:
    def chunk(
        c: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        out, states, state = carry
        first, end = batch.chunk_starts[c], batch.chunk_starts[c + 1]
        numbers = first + jnp.arange(CHUNK_TOKENS)
        source = batch.chunk_sources[c]
        stored = states[layer, jnp.maximum(source, 0)].astype(jnp.float32)
        state = jnp.where(source < 0, state, stored)
        some, state = rule.next_chunk(_some(tokens, numbers, numbers < end), state)
        out = lax.dynamic_update_slice_in_dim(out, some.astype(out.dtype), first, axis=0)
        for slot in (batch.chunk_targets[c], batch.chunk_snapshots[c]):
            states = write_states(states, layer, slot, state)
        return out, states, state

    state = jnp.zeros(states.shape[2:], jnp.float32)
    return lax.fori_loop(0, batch.num_chunks, chunk, (out, states, state))[:2]


def _next_chunk(tokens: DeltaInputs, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the outputs [n, value_heads, dim] of a chunk's tokens, and the state after them.

    A token's change of the state depends on the changes of the tokens before it: a triangular
    system of equations.
    """
    q, k, v, log_decay, beta = (jnp.moveaxis(x, 1, 0) for x in _scaled(tokens))  # heads first
    decays = _by_channel if tokens.decays_by_channel else _by_head
    of_keys, of_queries, since, until = decays(q, k, log_decay, tokens.group)
    k, q = (jnp.repeat(x, tokens.group, axis=0) for x in (k, q))
    beta = beta[..., None]
    change = beta * (v - _read(k, since, state))
    change = times("hij,hjv->hiv", _inverse(of_keys * beta), change)
    out = _read(q, since, state) + times("hij,hjv->hiv", of_queries, change)
    state = jnp.swapaxes(since[:, -1:], 1, 2) * state
    return jnp.moveaxis(out, 0, 1), state + times("hik,hiv->hkv", k * until, change)


DELTA_RULE = RecurrenceRule(_Terms.of, _next_token, _next_chunk)


class _Decayed(NamedTuple):
    """A chunk's products and decays, by value head."""

    of_keys: jax.Array  # [heads, n, n] keys times keys, decayed; any number for later keys
    of_queries: jax.Array  # [heads, n, n] queries times keys, decayed; 0 for later keys
    since: jax.Array  # [heads, n, channels or 1] decay from the chunk's begin to after each token
    until: jax.Array  # [heads, n, channels or 1] decay after each token to the chunk's end


def _by_head(q: jax.Array, k: jax.Array, log_decay: jax.Array, group: int) -> _Decayed:
    """Multiply q and k [key_heads, n, dim] with k; heads decay as a whole."""
    between, decay = decays_between(log_decay[..., 0])
    of_keys, of_queries = (
        jnp.repeat(times("hik,hjk->hij", x, k), group, axis=0) * decay for x in (k, q)
    )
    since, until = jnp.exp(jnp.cumsum(log_decay, axis=1)), jnp.exp(between[:, -1])
    return _Decayed(of_keys, of_queries, since, until[..., None])


def _by_channel(q: jax.Array, k: jax.Array, log_decay: jax.Array, group: int) -> _Decayed:
    """Multiply q and k [key_heads, n, dim] with k; channels decay.

    A block of tokens is multiplied with the block before it, for sizes of 1, 2, 4 and so on. The
    decay between two tokens is then the product of two: after the key's token to the border
    between the blocks, and from there on. Neither exceeds 1, so that no product overflows. Sums of
    logs are never differences.
    """
    q, k = (jnp.repeat(x, group, axis=0) for x in (q, k))
    rows = jnp.stack([k, q], axis=1)
    num_heads, n, dim = k.shape
    number = jnp.arange(n)
    since, until = log_decay, jnp.zeros_like(log_decay)  # in each block
    products = jnp.where(jnp.eye(n, dtype=bool), times("hrik,hjk->hrij", rows, k), 0)
    size = 1
    while size < n:
        is_second = (number // size % 2 == 1)[:, None]
        decay = jnp.exp(jnp.where(is_second, since, until))
        found = times("hrik,hjk->hrij", rows * decay[:, None], k * decay)
        products = jnp.where(_is_below(n, size), found, products)
        shape = num_heads, -1, 2 * size, dim
        ends = since.reshape(shape)[:, :, size - 1 :: size]
        first, second = (ends[:, :, i, None] for i in range(2))
        since, until = since.reshape(shape), until.reshape(shape)
        since = since.at[:, :, size:].add(first).reshape(log_decay.shape)
        until = until.at[:, :, :size].add(second).reshape(log_decay.shape)
        size *= 2
    return _Decayed(products[:, 0], products[:, 1], jnp.exp(since), jnp.exp(until))


def _is_below(n: int, size: int) -> jax.Array:
    """Return bool [n, n]: in each second block's rows, the columns of the block before it."""
    row, column = jnp.arange(n)[:, None] // size, jnp.arange(n) // size
    return (row == column + 1) & (row % 2 == 1)


def decays_between(log_decay: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the logs of decays, and decays, from each token j of a chunk to each token i.

    `log_decay` is [heads, n]; the results are [heads, i, j]. These are sums over the tokens, not
    differences of sums, which cancel after strong decay. A later token j has no weight.
    """
    n = log_decay.shape[-1]
    causal = jnp.tril(jnp.ones((n, n), bool))
    later = jnp.where(jnp.tril(causal, -1), log_decay[:, :, None], 0)
    between = times("im,hmj->hij", causal.astype(jnp.float32), later)
    return between, jnp.exp(jnp.where(causal, between, -jnp.inf))


def times(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(spec, a, b, precision=lax.Precision.HIGHEST)


def _inverse(lower: jax.Array) -> jax.Array:
    """Invert I + tril(lower, -1), float32 [..., n, n], n a power of two.

    By halves: the inverse of [[A, 0], [B, D]] is [[A', 0], [-D' B A', D']], with A' and D' the
    inverses of A and D. All blocks of a size are inverted at once. XLA's triangular solver takes a
    hundred times as long on a CPU, and a series of powers of `lower` would cancel where keys are
    alike.
    """
    n = lower.shape[-1]
    inverse = jnp.broadcast_to(jnp.eye(n), lower.shape)
    size = 1
    while size < n:
        below = times("hij,hjk->hik", jnp.where(_is_below(n, size), lower, 0), inverse)
        inverse = inverse - times("hij,hjk->hik", inverse, below)
        size *= 2
    return inverse


def causal_conv(
    u: jax.Array,
    weight: jax.Array,
    states: jax.Array,
    layer: jax.Array,
    batch: StateBatch,
    bias: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Implement `api.CausalConv`; padding tokens' outputs are zeros."""
    num_tokens, width = u.shape[0], weight.shape[0]
    in_row = jnp.arange(num_tokens) - batch.q_offsets[batch.token_rows]
    # In a branch: if this read were fused, XLA would copy all states before some are written.
    slots_in = batch.slots_in
    old = lax.cond(
        batch.q_offsets[-1] > 0,
        lambda: states[layer, slots_in],
        lambda: jnp.zeros((len(slots_in), *states.shape[2:]), states.dtype),
    )
    old = old.reshape(-1, width - 1, u.shape[1])

    def before(distance: int) -> jax.Array:
        """Return u of the token `distance` before each token."""
        earlier = jnp.pad(u, ((distance, 0), (0, 0)))[:num_tokens]
        stored = old[batch.token_rows, jnp.clip(width - 1 - distance + in_row, 0, width - 2)]
        return jnp.where((in_row >= distance)[:, None], earlier, stored)

    def convolved(window: jax.Array) -> jax.Array:
        total = jnp.sum(window.astype(jnp.float32) * weight.astype(jnp.float32), axis=1)
        return jax.nn.silu(total if bias is None else total + bias.astype(jnp.float32))

    window = jnp.stack([before(j) for j in range(width - 1, 0, -1)] + [u], axis=1)
    out = jnp.where(batch.valid[:, None], row_wise(convolved, window), 0).astype(u.dtype)
    after = window[:, 1:]
    decoded = batch.max_decode_tokens
    is_decode = batch.valid & (batch.token_rows < batch.num_decode)
    slots = jnp.where(is_decode, batch.slots_out[batch.token_rows] + in_row, -1)
    states = write_states(states, layer, slots[:decoded], after[:decoded])

    def chunk(c: jax.Array, states: jax.Array) -> jax.Array:
        last = after[batch.chunk_starts[c + 1] - 1]
        for slot in (batch.chunk_targets[c], batch.chunk_snapshots[c]):
            states = write_states(states, layer, slot, last)
        return states

    return out, lax.fori_loop(0, batch.num_chunks, chunk, states)
