"""The gated delta rule of prefill rows on TPU: chunk by chunk, as products of matrices.

Within a chunk, a token's change of the state depends on the changes of the tokens before it: a
triangular system of 64 equations for each value head. Its inverse is made by halves, all blocks of
a size at once (`inverse.py`), by products of whole matrices, and two heads side by side fill a row
of lanes. Each product waits for the one before, so several heads take turns.

Grid: none. One program takes the chunks in turn.

Buffers, with C = 64, and a state [Hv, 128, 128]:

    q, k, v, gates, out   [2, C, heads, 128]   of chunk c in c % 2, by token; gates [2, C, 2, 128]
    states                [2, 2, *state]       before chunk c in [0, c % 2], after it in [1, c % 2]
    by_head               [heads, C, 128]      float32: the same as q, k, v and out by head
    gates_by_head         [Hv, C, 128]         float32, of each: in all lanes the log of a token's
                                               decay, its sums since the chunk began and until it
                                               ends, and beta

DMAs of chunk c: start the inputs of chunk c + 1, with the state that it starts from if that is in a
slot; wait for its own inputs; wait until the results of chunk c - 2 are in memory; start its own.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from sgl_jax.kernels.gated_delta.batch import CHUNK_TOKENS, DeltaInputs, StateBatch
from sgl_jax.kernels.gated_delta.tpu.inverse import inverses
from sgl_jax.kernels.gated_delta.tpu.shared import (
    Buffers,
    DeltaArrays,
    Semaphores,
    row_and_column,
    unit,
)
from sgl_jax.kernels.pallas_tpu import bfloat16_parts, call, for_each_run, product, start, wait
from sgl_jax.kernels.tpu_chip import LANES

RUN_TOKENS = 16  # a DMA's size is static: chunks that are not full move in such runs, and by token
TURNED_TOKENS = 32  # ordered by head at once
VALUE_HEADS = 16  # computed at once
NEVER = -1e30  # a logarithm of a decay: exp of it is zero


class _Chunks(NamedTuple):
    """In scalar memory."""

    layer: Any  # int32 [1]
    num_chunks: Any  # int32 [1]
    starts: Any  # int32 [N + 1]
    sources: Any  # int32 [N] slot or negative
    targets: Any  # int32 [N] slot or negative
    snapshots: Any  # int32 [N] slot or negative

    def length(self, chunk: Any) -> jax.Array:
        return self.starts[chunk + 1] - self.starts[chunk]


class _ByHead(NamedTuple):
    """A chunk in vector memory, float32."""

    q: Any  # [Hk, C, 128]
    k: Any  # [Hk, C, 128]
    v: Any  # [Hv, C, 128] values, then outputs
    decay: Any  # [Hv, C, 128]
    since: Any  # [Hv, C, 128]
    until: Any  # [Hv, C, 128]
    beta: Any  # [Hv, C, 128]


class _Kernel(NamedTuple):
    chunks: _Chunks
    hbm: DeltaArrays  # gates float32 [T, 2, 128]: logs of decays, and betas, by value head
    buffers: Buffers
    by_head: _ByHead
    sems: Semaphores

    @property
    def group(self) -> int:
        """Value heads of a key head."""
        return self.by_head.v.shape[0] // self.by_head.k.shape[0]

    @property
    def product_dtype(self) -> jnp.dtype:
        """The type of the matrix unit's inputs; it adds in float32."""
        return self.buffers.k.dtype


def prefill_gated_delta(
    tokens: DeltaInputs, states: jax.Array, layer: jax.Array, batch: StateBatch
) -> tuple[jax.Array, jax.Array]:
    """The prefill rows' tokens; arguments as in `api.GatedDelta`, of 128 key and value dimensions,
    and at most 128 value heads.

    Returns:
        v with the outputs in the prefill tokens' place, and the states; in the memory of `v` and
        `states` if the caller has no further use for them.
    """
    q, k, v, log_decay, beta = tokens
    key_heads, value_heads = k.shape[1], v.shape[1]
    gates = jnp.stack([log_decay, beta], axis=1)
    gates = jnp.pad(gates, ((0, 0), (0, 0), (0, LANES - value_heads)))
    hbm = DeltaArrays(q, k, gates, v, states)

    def heads(n: int) -> Any:
        return pltpu.VMEM((n, CHUNK_TOKENS, LANES), jnp.float32)

    chunks = _Chunks(
        layer.reshape(1),
        batch.num_chunks.reshape(1),
        batch.chunk_starts,
        batch.chunk_sources,
        batch.chunk_targets,
        batch.chunk_snapshots,
    )
    scratch = [
        Buffers.scratch(hbm, 2, CHUNK_TOKENS),
        _ByHead(*[heads(key_heads)] * 2, *[heads(value_heads)] * 5),
        Semaphores.scratch(2),
    ]
    out, states = call(_kernel, "gated_delta_prefill", (chunks,), (), hbm, 2, scratch)
    return out, states


def _kernel(
    chunks: _Chunks,
    hbm: DeltaArrays,
    tokens: Any,
    states: Any,
    buffers: Buffers,
    by_head: _ByHead,
    sems: Semaphores,
) -> None:
    # Inputs and results share memory: one array is read and written.
    kernel = _Kernel(chunks, hbm._replace(v=tokens, states=states), buffers, by_head, sems)
    num_chunks = chunks.num_chunks[0]
    pl.when(num_chunks > 0)(lambda: _for_inputs(kernel, jnp.int32(0), start))

    @pl.loop(0, num_chunks)
    def _(chunk: jax.Array) -> None:
        pl.when(chunk + 1 < num_chunks)(lambda: _for_inputs(kernel, chunk + 1, start))
        _for_inputs(kernel, chunk, wait)
        pl.when(chunk >= 2)(lambda: _for_results(kernel, chunk - 2, wait))
        _begin_chunk(kernel, chunk)
        _for_heads(kernel, chunk)
        _end_chunk(kernel, chunk)
        _for_results(kernel, chunk, start)

    @pl.loop(jnp.maximum(num_chunks - 2, 0), num_chunks)
    def _(chunk: jax.Array) -> None:
        _for_results(kernel, chunk, wait)


def _for_inputs(kernel: _Kernel, chunk: jax.Array, do: Callable[[Any], None]) -> None:
    """do(copy) for the DMAs of a chunk's inputs."""
    at = lax.rem(chunk, 2)

    def copy(source: Any, target: Any, tokens: Any, here: Any) -> None:
        sem = kernel.sems.tokens.at[at]
        do(pltpu.make_async_copy(source.at[tokens], target.at[at, here], sem))

    for source, target in zip(kernel.hbm[:4], kernel.buffers[:4], strict=True):
        _for_runs(kernel, chunk, partial(copy, source, target))
    slot = kernel.chunks.sources[chunk]

    @pl.when(slot >= 0)
    def _() -> None:
        state = kernel.hbm.states.at[kernel.chunks.layer[0], slot]
        target = kernel.buffers.states.at[0, at]
        do(pltpu.make_async_copy(state, target, kernel.sems.states.at[at]))


def _for_results(kernel: _Kernel, chunk: jax.Array, do: Callable[[Any], None]) -> None:
    """do(copy) for the DMAs of a chunk's outputs, and of the state after it."""
    at, chunks = lax.rem(chunk, 2), kernel.chunks
    sem = kernel.sems.results.at[at]

    def copy(tokens: Any, here: Any) -> None:
        out = kernel.buffers.out.at[at, here]
        do(pltpu.make_async_copy(out, kernel.hbm.v.at[tokens], sem))

    _for_runs(kernel, chunk, copy)
    for slots in (chunks.targets, chunks.snapshots):
        slot = slots[chunk]

        @pl.when(slot >= 0)
        def _(slot: jax.Array = slot) -> None:
            target = kernel.hbm.states.at[chunks.layer[0], slot]
            do(pltpu.make_async_copy(kernel.buffers.states.at[1, at], target, sem))


def _for_runs(kernel: _Kernel, chunk: jax.Array, do: Callable[[Any, Any], None]) -> None:
    """do(tokens of the step, tokens of the chunk) for runs that make up the chunk."""
    length, begin = kernel.chunks.length(chunk), kernel.chunks.starts[chunk]

    def run(first: Any, size: int) -> None:
        do(pl.ds(begin + first, size), pl.ds(first, size))

    for_each_run(length, (CHUNK_TOKENS, RUN_TOKENS, 1), kernel.hbm.v.shape[0], run)


def _begin_chunk(kernel: _Kernel, chunk: jax.Array) -> None:
    """Order a chunk by head, and sum up its decays."""
    at, buffers, by_head = lax.rem(chunk, 2), kernel.buffers, kernel.by_head

    # Tokens that a chunk does not have change nothing if they are zeros.
    @pl.loop(kernel.chunks.length(chunk), CHUNK_TOKENS)
    def _(token: jax.Array) -> None:
        for buffer in buffers[:4]:
            buffer[at, token] = jnp.zeros(buffer.shape[2:], buffer.dtype)

    for source, target in ((buffers.q, by_head.q), (buffers.k, by_head.k), (buffers.v, by_head.v)):

        @pl.loop(0, CHUNK_TOKENS // TURNED_TOKENS)
        def _(i: jax.Array, source: Any = source, target: Any = target) -> None:
            some = pl.ds(pl.multiple_of(i * TURNED_TOKENS, TURNED_TOKENS), TURNED_TOKENS)
            target[:, some] = jnp.swapaxes(source[at, some].astype(jnp.float32), 0, 1)

    log_decay, beta = (buffers.gates[at, :, gate] for gate in range(2))
    row, column = row_and_column((CHUNK_TOKENS, CHUNK_TOKENS))

    def summed(which: jax.Array, gate: jax.Array) -> jax.Array:
        return product(which.astype(jnp.float32), gate, (1, 0))

    # A token's gates lie in a register of their own; products with ones bring them together.
    gates = (
        (by_head.decay, summed(column == row, log_decay)),
        (by_head.since, summed(column <= row, log_decay)),
        (by_head.until, summed(column > row, log_decay)),
        (by_head.beta, summed(column == row, beta)),
    )
    for head in range(by_head.v.shape[0]):
        for target, gate in gates:
            own = gate[:, head : head + 1]
            target[head] = jnp.broadcast_to(own, (CHUNK_TOKENS, LANES))


def _end_chunk(kernel: _Kernel, chunk: jax.Array) -> None:
    """Put the outputs, ordered by token, into the buffer that they leave from."""
    out = kernel.buffers.out.at[lax.rem(chunk, 2)]

    @pl.loop(0, CHUNK_TOKENS // TURNED_TOKENS)
    def _(i: jax.Array) -> None:
        some = pl.ds(pl.multiple_of(i * TURNED_TOKENS, TURNED_TOKENS), TURNED_TOKENS)
        out[some] = jnp.swapaxes(kernel.by_head.v[:, some], 0, 1).astype(out.dtype)


def _for_heads(kernel: _Kernel, chunk: jax.Array) -> None:
    """Compute a chunk, some key heads and their value heads at once."""
    key_heads, at = kernel.by_head.k.shape[0], lax.rem(chunk, 2)
    before = _state_before(kernel, chunk)
    at_once = max(
        n
        for n in range(1, key_heads + 1)
        if key_heads % n == 0 and (n == 1 or n * kernel.group <= VALUE_HEADS)
    )

    @pl.loop(0, key_heads // at_once)
    def _(i: jax.Array) -> None:
        _change(kernel, [i * at_once + n for n in range(at_once)], before, at)


def _state_before(kernel: _Kernel, chunk: jax.Array) -> Any:
    """The buffer that holds the state that a chunk starts from."""
    at = lax.rem(chunk, 2)
    is_stored = kernel.chunks.sources[chunk] >= 0
    return kernel.buffers.states.at[jnp.where(is_stored, 0, 1), jnp.where(is_stored, at, 1 - at)]


class _Head(NamedTuple):
    """A value head's equations, float32."""

    head: Any  # its number
    system: jax.Array  # [C, C]; only the part below the diagonal counts
    seen: jax.Array  # [C, C] weight of each token for each query
    since: jax.Array  # [C, 128] logs of decays
    beta: jax.Array  # [C, 128]


def _change(kernel: _Kernel, key_heads: list[Any], before: Any, at: Any) -> None:
    """Outputs of some key heads' value heads, and their states after the chunk."""
    by_head, group, dtype = kernel.by_head, kernel.group, kernel.product_dtype
    rows, heads = [], []
    for key_head in key_heads:
        key = unit(by_head.k[key_head]).astype(dtype)
        query = (unit(by_head.q[key_head]) * LANES**-0.5).astype(dtype)
        rows.append(jnp.concatenate([key, query], axis=0))
        similar = product(rows[-1], key, (1, 1))
        heads.append([_head(kernel, key_head * group + n, similar) for n in range(group)])
    all_heads = [head for some in heads for head in some]
    solved = iter(inverses([head.system for head in all_heads], dtype))
    for some, own in zip(heads, rows, strict=True):
        states = [before[head.head].astype(jnp.float32) for head in some]
        found = product(own, jnp.concatenate(states, axis=1).astype(dtype), (1, 0))
        kept, added = [], []
        for n, head in enumerate(some):
            lanes, decay = slice(n * LANES, (n + 1) * LANES), jnp.exp(head.since)
            old, read = (found[first : first + CHUNK_TOKENS, lanes] for first in (0, CHUNK_TOKENS))
            alone = head.beta * (by_head.v[head.head] - decay * old)
            change = product(next(solved).astype(dtype), alone.astype(dtype), (1, 0))
            out = product(head.seen.astype(dtype), change.astype(dtype), (1, 0))
            by_head.v[head.head] = decay * read + out
            added.append((change * jnp.exp(by_head.until[head.head])).astype(dtype))
            kept.append(states[n] * decay[CHUNK_TOKENS - 1 :])
        new = product(own[:CHUNK_TOKENS], jnp.concatenate(added, axis=1), (0, 0))
        for n, head in enumerate(some):
            state = kept[n] + new[:, n * LANES : (n + 1) * LANES]
            kernel.buffers.states[1, at, head.head] = state.astype(kernel.buffers.states.dtype)


def _head(kernel: _Kernel, head: Any, similar: jax.Array) -> _Head:
    """A value head's equations; `similar` [2 * C, C]: keys, then queries, times keys."""
    since, beta = kernel.by_head.since[head], kernel.by_head.beta[head]
    row, column = row_and_column((CHUNK_TOKENS, CHUNK_TOKENS))
    # Sums from each token to each, and not differences of sums, which cancel after strong decay.
    # Three parts of bfloat16 are exact, and products with ones are.
    later = jnp.where(column < row, kernel.by_head.decay[head, :, :CHUNK_TOKENS], 0)
    up_to = (column <= row).astype(jnp.bfloat16)
    between = product(
        jnp.concatenate([up_to] * 3, axis=1),
        jnp.concatenate(bfloat16_parts(later, 3), axis=0),
        (1, 0),
    )
    # A later token has no weight: its exponent is masked.
    decay = jnp.exp(jnp.where(_is_seen(row, column), between, NEVER))
    system = similar[:CHUNK_TOKENS] * decay * beta[:, :CHUNK_TOKENS]
    return _Head(head, system, similar[CHUNK_TOKENS:] * decay, since, beta)


def _is_seen(row: jax.Array, column: jax.Array) -> jax.Array:
    return column <= row
