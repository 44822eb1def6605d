"""The gated delta rule of prefill rows on TPU: chunk by chunk, as products of matrices.

Within a chunk, a token's change of the state depends on the changes of the tokens before it: a
triangular system of 64 equations for each value head, inverted by blocks (`inverse.py`). Two heads
side by side fill a row of lanes. Each product waits for the previous product, so several pairs of
heads alternate.

Grid: none. One program processes the chunks in order.

Buffers, with C = 64, and a state [Hv, 128, 128]:
    q, k, v, gates, out   [2, C, heads, 128]   of chunk c in c % 2, by token; gates [2, C, *, 128]
    states                [2, 2, *state]       before chunk c in [0, c % 2], after it in [1, c % 2]
    by_head               [heads, C, 128]      float32: the same as q, k, v and out by head
    gates by head         see `by_head.py`

DMAs of chunk c:
    start the inputs of chunk c + 1, with its initial state if that is in a slot
    wait for the inputs of chunk c
    wait until the results of chunk c - 2 are in memory; start the results of chunk c
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
from sgl_jax.kernels.gated_delta.tpu.by_channel import summed_tokens
from sgl_jax.kernels.gated_delta.tpu.by_head import ChunkByHead
from sgl_jax.kernels.gated_delta.tpu.inverse import SIDE_BY_SIDE, inverses
from sgl_jax.kernels.gated_delta.tpu.pairs import Pair, Vectors, channel_pairs, head_pairs
from sgl_jax.kernels.gated_delta.tpu.shared import (
    Buffers,
    DeltaArrays,
    Semaphores,
    unit,
)
from sgl_jax.kernels.pallas_tpu import call, for_each_run, product, start, wait
from sgl_jax.kernels.tpu_chip import LANES

RUN_TOKENS = 16  # a DMA's size is static: partial chunks are copied in such runs, and by token
TURNED_TOKENS = 32  # tokens ordered by head at once
VALUE_HEADS = 16


class _Chunks(NamedTuple):
    """The step's chunks, in scalar memory."""

    layer: Any  # int32 [1]
    num_chunks: Any  # int32 [1]
    starts: Any  # int32 [N + 1]
    sources: Any  # int32 [N] slot or negative
    targets: Any  # int32 [N] slot or negative
    snapshots: Any  # int32 [N] slot or negative

    def length(self, chunk: Any) -> jax.Array:
        return self.starts[chunk + 1] - self.starts[chunk]


class ChunkKernel(NamedTuple):
    """The references of a running kernel."""

    chunks: _Chunks
    # Gates are float32 [T, 2, 128], the logs of decays, and betas, with a value head in each lane;
    # by channel [T, Hv + 8, 128], the logs of each value head, and betas.
    hbm: DeltaArrays
    buffers: Buffers
    by_head: ChunkByHead
    sems: Semaphores
    which: Any  # `by_channel.summed_tokens`; None if decays are of whole heads

    @property
    def by_channel(self) -> bool:
        return self.which is not None

    @property
    def group(self) -> int:
        """Return the number of value heads per key head."""
        return self.by_head.v.shape[0] // self.by_head.k.shape[0]

    @property
    def product_dtype(self) -> jnp.dtype:
        """Return the dtype of the matrix unit's inputs; it accumulates in float32."""
        return self.buffers.k.dtype


# Computes a chunk's outputs in place of its values by head, and the states after it.
ChunkChange = Callable[[ChunkKernel, jax.Array], None]


def prefill_gated_delta(
    tokens: DeltaInputs, states: jax.Array, layer: jax.Array, batch: StateBatch
) -> tuple[jax.Array, jax.Array]:
    """Compute the prefill rows' tokens for `api.GatedDelta`.

    key_dim and value_dim are 128, and there are at most 128 value heads. Returns v with outputs at
    the prefill tokens, and the states; in the memory of `v` and `states` if the caller does not use
    them again.
    """
    return recur_chunks(_for_heads, "gated_delta_prefill", tokens, states, layer, batch)


def recur_chunks(
    change: ChunkChange,
    name: str,
    tokens: DeltaInputs,
    states: jax.Array,
    layer: jax.Array,
    batch: StateBatch,
    heads_each: int = 1,
) -> tuple[jax.Array, jax.Array]:
    """Compute the prefill rows' tokens by `change`; return the arrays of tokens and of states.

    A row of values, v's last axis, has those of `heads_each` heads.
    """
    q, k, v, log_decay, beta = tokens
    beta, which = _in_lanes(beta), None
    if by_channel := tokens.decays_by_channel:
        which = jnp.asarray(summed_tokens(), jnp.bfloat16)
        gates = jnp.concatenate([log_decay, jnp.pad(beta, ((0, 0), (0, 7), (0, 0)))], axis=1)
    else:
        gates = jnp.concatenate([_in_lanes(log_decay[..., 0]), beta], axis=1)
    hbm = DeltaArrays(q, k, gates, v, states)

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
        ChunkByHead.scratch(k.shape[1], v.shape[1], by_channel=by_channel),
        Semaphores.scratch(2),
    ]
    kernel = partial(_kernel, change=change, heads_each=heads_each)
    out, states = call(kernel, name, (chunks,), (which,), hbm, 2, scratch)
    return out, states


def _in_lanes(gate: jax.Array) -> jax.Array:
    """Return a gate [T, heads] with a head in each lane, [T, 1, 128]."""
    return jnp.pad(gate, ((0, 0), (0, LANES - gate.shape[1])))[:, None]


def _kernel(
    chunks: _Chunks,
    which: Any,
    hbm: DeltaArrays,
    tokens: Any,
    states: Any,
    buffers: Buffers,
    by_head: ChunkByHead,
    sems: Semaphores,
    *,
    change: ChunkChange,
    heads_each: int,
) -> None:
    # Inputs and results share memory: one array is read and written.
    hbm = hbm._replace(v=tokens, states=states)
    kernel = ChunkKernel(chunks, hbm, buffers, by_head, sems, which)
    num_chunks = chunks.num_chunks[0]
    pl.when(num_chunks > 0)(lambda: _for_inputs(kernel, jnp.int32(0), start))

    @pl.loop(0, num_chunks)
    def _(chunk: jax.Array) -> None:
        pl.when(chunk + 1 < num_chunks)(lambda: _for_inputs(kernel, chunk + 1, start))
        _for_inputs(kernel, chunk, wait)
        pl.when(chunk >= 2)(lambda: _for_results(kernel, chunk - 2, wait))
        _begin_chunk(kernel, chunk, heads_each)
        change(kernel, chunk)
        _end_chunk(kernel, chunk)
        _for_results(kernel, chunk, start)

    @pl.loop(jnp.maximum(num_chunks - 2, 0), num_chunks)
    def _(chunk: jax.Array) -> None:
        _for_results(kernel, chunk, wait)


def _for_inputs(kernel: ChunkKernel, chunk: jax.Array, do: Callable[[Any], None]) -> None:
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


def _for_results(kernel: ChunkKernel, chunk: jax.Array, do: Callable[[Any], None]) -> None:
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


def _for_runs(kernel: ChunkKernel, chunk: jax.Array, do: Callable[[Any, Any], None]) -> None:
    """Call do(tokens of the step, tokens of the chunk) for runs that make up the chunk."""
    length, begin = kernel.chunks.length(chunk), kernel.chunks.starts[chunk]

    def run(first: Any, size: int) -> None:
        do(pl.ds(begin + first, size), pl.ds(first, size))

    for_each_run(length, (CHUNK_TOKENS, RUN_TOKENS, 1), kernel.hbm.v.shape[0], run)


def _begin_chunk(kernel: ChunkKernel, chunk: jax.Array, heads_each: int) -> None:
    at, buffers, by_head = lax.rem(chunk, 2), kernel.buffers, kernel.by_head

    # Zeros in place of missing tokens change nothing.
    @pl.loop(kernel.chunks.length(chunk), CHUNK_TOKENS)
    def _(token: jax.Array) -> None:
        for buffer in buffers[:4]:
            buffer[at, token] = jnp.zeros(buffer.shape[2:], buffer.dtype)

    turned = [(buffers.q, by_head.q), (buffers.k, by_head.k), (buffers.v, by_head.v)]
    if kernel.by_channel:
        turned.append((buffers.gates, by_head.decays))
    for source, target in turned:

        @pl.loop(0, CHUNK_TOKENS // TURNED_TOKENS)
        def _(i: jax.Array, source: Any = source, target: Any = target) -> None:
            some = pl.ds(pl.multiple_of(i * TURNED_TOKENS, TURNED_TOKENS), TURNED_TOKENS)
            heads = source[at, some, : target.shape[0]]
            target[:, some] = jnp.swapaxes(heads.astype(jnp.float32), 0, 1)

    if kernel.by_channel:
        by_head.spread_betas(buffers.gates[at, :, by_head.v.shape[0]])
    else:
        by_head.decays.spread(buffers.gates[at, :, 0], heads_each)
        by_head.spread_betas(buffers.gates[at, :, 1])


def _end_chunk(kernel: ChunkKernel, chunk: jax.Array) -> None:
    out = kernel.buffers.out.at[lax.rem(chunk, 2)]

    @pl.loop(0, CHUNK_TOKENS // TURNED_TOKENS)
    def _(i: jax.Array) -> None:
        some = pl.ds(pl.multiple_of(i * TURNED_TOKENS, TURNED_TOKENS), TURNED_TOKENS)
        out[some] = jnp.swapaxes(kernel.by_head.v[:, some], 0, 1).astype(out.dtype)


def _for_heads(kernel: ChunkKernel, chunk: jax.Array) -> None:
    key_heads, at = kernel.by_head.k.shape[0], lax.rem(chunk, 2)
    before = state_before(kernel, chunk)
    at_once = max(
        n
        for n in range(1, key_heads + 1)
        if key_heads % n == 0 and (n == 1 or n * kernel.group <= VALUE_HEADS)
    )

    @pl.loop(0, key_heads // at_once)
    def _(i: jax.Array) -> None:
        _change(kernel, [i * at_once + n for n in range(at_once)], before, at)


def state_before(kernel: ChunkKernel, chunk: jax.Array) -> Any:
    """Return the reference to the states before a chunk."""
    at = lax.rem(chunk, 2)
    is_stored = kernel.chunks.sources[chunk] >= 0
    return kernel.buffers.states.at[jnp.where(is_stored, 0, 1), jnp.where(is_stored, at, 1 - at)]


def _change(kernel: ChunkKernel, key_heads: list[Any], before: Any, at: Any) -> None:
    """Compute the outputs of some key heads' value heads, and their states after the chunk."""
    by_head, group = kernel.by_head, kernel.group
    vectors = Vectors(
        [unit(by_head.k[head]) for head in key_heads],
        [unit(by_head.q[head]) * LANES**-0.5 for head in key_heads],
    )
    if kernel.by_channel:
        pair = channel_pairs(by_head, kernel.which, vectors, kernel.product_dtype)
    else:
        pair = head_pairs(by_head, vectors, kernel.product_dtype)
    # An unpaired head is paired with itself.
    last = len(key_heads) * group - 1
    pairs = []
    for numbers in [(n, min(n + 1, last)) for n in range(0, last + 1, SIDE_BY_SIDE)]:
        heads = tuple(key_heads[n // group] * group + n % group for n in numbers)
        pairs.append(pair((heads[0], heads[1]), [n // group for n in numbers]))
    _change_pairs(kernel, pairs, before, at)


def _change_pairs(kernel: ChunkKernel, pairs: list[Pair], before: Any, at: Any) -> None:
    """Compute `_change` for pairs of value heads, with stores last, so that no load waits."""
    by_head, dtype = kernel.by_head, kernel.product_dtype
    # Products with the old state come first: they need no inverse, and the compiler schedules them
    # into its waits.
    found = [_found(kernel, pair, before) for pair in pairs]
    solved = inverses([pair.system for pair in pairs], dtype)
    changes = [
        product(inverse.astype(dtype), _apart(alone, dtype), (1, 0))
        for inverse, (_, alone) in zip(solved, found, strict=True)
    ]
    new = [
        product(pair.weights.astype(dtype), _apart(_halves(change), dtype), (1, 0))
        for pair, change in zip(pairs, changes, strict=True)
    ]
    for pair, (read, _), result in zip(pairs, found, new, strict=True):
        for head, own_read, own, decay in zip(
            pair.heads, read, _halves(result), pair.decays, strict=True
        ):
            by_head.v[head] = own_read + own[:CHUNK_TOKENS]
            state = before[head].astype(jnp.float32) * decay + own[CHUNK_TOKENS:]
            kernel.buffers.states[1, at, head] = state.astype(kernel.buffers.states.dtype)


def _halves(both: jax.Array) -> list[jax.Array]:
    return [both[:, :LANES], both[:, LANES:]]


def _found(kernel: ChunkKernel, pair: Pair, before: Any) -> tuple[list[jax.Array], list[jax.Array]]:
    """Return the old states' part of outputs [C, 128], and right sides, of two value heads."""
    by_head, dtype, rows = kernel.by_head, kernel.product_dtype, pair.rows
    states = [before[head].astype(dtype) for head in pair.heads]
    if rows[0] is rows[1]:
        found = _halves(product(rows[0], jnp.concatenate(states, axis=1), (1, 0)))
    else:
        found = [product(x, y, (1, 0)) for x, y in zip(rows, states, strict=True)]
    read, alone = [], []
    for head, own in zip(pair.heads, found, strict=True):
        seen, out = own[:CHUNK_TOKENS], own[CHUNK_TOKENS:]
        if not kernel.by_channel:
            decay = by_head.decays.since(head, slice(None))
            seen, out = decay * seen, decay * out
        alone.append(by_head.v[head] - seen)
        read.append(out)
    return read, alone


def _apart(matrices: list[jax.Array], dtype: jnp.dtype) -> jax.Array:
    """Place two matrices [C, 128] as blocks on the diagonal of one matrix."""
    left, right = (x.astype(dtype) for x in matrices)
    zeros = jnp.zeros_like(left)
    upper, lower = (jnp.concatenate(x, axis=1) for x in ((left, zeros), (zeros, right)))
    return jnp.concatenate([upper, lower], axis=0)
