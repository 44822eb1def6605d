"""The gated delta rule of prefill rows on TPU: chunk by chunk, as products of matrices.

Within a chunk, a token's change of the state depends on the changes of the tokens before it: a
triangular system of 64 equations for each value head, inverted by blocks (`inverse.py`). Two heads
side by side fill a row of lanes. Each product waits for the previous product, so several pairs of
heads alternate.

Grid: none. One program processes the chunks in order.

Buffers, with C = 64, and a state [Hv, 128, 128]:
    q, k, v, gates, out   [2, C, heads, 128]   of chunk c in c % 2, by token; gates [2, C, 2, 128]
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
from sgl_jax.kernels.gated_delta.tpu.by_head import ChunkByHead
from sgl_jax.kernels.gated_delta.tpu.inverse import SIDE_BY_SIDE, inverses
from sgl_jax.kernels.gated_delta.tpu.shared import (
    Buffers,
    DeltaArrays,
    Semaphores,
    row_and_column,
    unit,
)
from sgl_jax.kernels.pallas_tpu import call, for_each_run, product, start, wait
from sgl_jax.kernels.tpu_chip import LANES

RUN_TOKENS = 16  # a DMA's size is static: partial chunks are copied in such runs, and by token
TURNED_TOKENS = 32  # tokens ordered by head at once
VALUE_HEADS = 16
NEVER = -1e30  # log of a decay; its exp is zero


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
    hbm: DeltaArrays  # gates float32 [T, 2, 128]: logs of decays, and betas, by value head
    buffers: Buffers
    by_head: ChunkByHead
    sems: Semaphores

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
    gates = jnp.stack([log_decay, beta], axis=1)
    gates = jnp.pad(gates, ((0, 0), (0, 0), (0, LANES - log_decay.shape[1])))
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
        ChunkByHead.scratch(k.shape[1], v.shape[1]),
        Semaphores.scratch(2),
    ]
    kernel = partial(_kernel, change=change, heads_each=heads_each)
    out, states = call(kernel, name, (chunks,), (), hbm, 2, scratch)
    return out, states


def _kernel(
    chunks: _Chunks,
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
    kernel = ChunkKernel(chunks, hbm._replace(v=tokens, states=states), buffers, by_head, sems)
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

    for source, target in ((buffers.q, by_head.q), (buffers.k, by_head.k), (buffers.v, by_head.v)):

        @pl.loop(0, CHUNK_TOKENS // TURNED_TOKENS)
        def _(i: jax.Array, source: Any = source, target: Any = target) -> None:
            some = pl.ds(pl.multiple_of(i * TURNED_TOKENS, TURNED_TOKENS), TURNED_TOKENS)
            target[:, some] = jnp.swapaxes(source[at, some].astype(jnp.float32), 0, 1)

    log_decay, beta = (buffers.gates[at, :, gate] for gate in range(2))
    by_head.spread_gates(log_decay, beta, heads_each)


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


class _Pair(NamedTuple):
    """The equations of two value heads side by side, float32."""

    heads: tuple[Any, Any]  # their indices
    system: jax.Array  # [C, 2 * C]; only the parts below the diagonals are used
    weights: jax.Array  # [C + 128, 2 * C] of each token for each query, and for the states
    rows: list[jax.Array]  # [2 * C, 128] of each head: its keys, then its queries, for products


def _change(kernel: ChunkKernel, key_heads: list[Any], before: Any, at: Any) -> None:
    """Compute the outputs of some key heads' value heads, and their states after the chunk."""
    by_head, group, dtype = kernel.by_head, kernel.group, kernel.product_dtype
    keys = [unit(by_head.k[head]) for head in key_heads]
    queries = [unit(by_head.q[head]) * LANES**-0.5 for head in key_heads]
    rows = [jnp.concatenate(x, axis=0).astype(dtype) for x in zip(keys, queries, strict=True)]
    similar = [
        product(own, jnp.concatenate([own[:CHUNK_TOKENS]] * SIDE_BY_SIDE, axis=0), (1, 1))
        for own in rows
    ]
    # An unpaired head is paired with itself.
    last = len(key_heads) * group - 1
    both = [(n, min(n + 1, last)) for n in range(0, last + 1, SIDE_BY_SIDE)]
    pairs = []
    for numbers in both:
        own = [n // group for n in numbers]
        heads = tuple(key_heads[n // group] * group + n % group for n in numbers)
        pairs.append(_pair(kernel, heads, *([x[n] for n in own] for x in (keys, similar, rows))))
    _change_pairs(kernel, pairs, before, at)


def _change_pairs(kernel: ChunkKernel, pairs: list[_Pair], before: Any, at: Any) -> None:
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
        for head, own_read, own in zip(pair.heads, read, _halves(result), strict=True):
            by_head.v[head] = own_read + own[:CHUNK_TOKENS]
            decay = by_head.decay(head, slice(CHUNK_TOKENS - 1, CHUNK_TOKENS))
            state = before[head].astype(jnp.float32) * decay + own[CHUNK_TOKENS:]
            kernel.buffers.states[1, at, head] = state.astype(kernel.buffers.states.dtype)


def _halves(both: jax.Array) -> list[jax.Array]:
    return [both[:, :LANES], both[:, LANES:]]


def _found(
    kernel: ChunkKernel, pair: _Pair, before: Any
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Return the old states' part of outputs [C, 128], and right sides, of two value heads."""
    by_head, dtype, rows = kernel.by_head, kernel.product_dtype, pair.rows
    states = [before[head].astype(dtype) for head in pair.heads]
    if rows[0] is rows[1]:
        found = _halves(product(rows[0], jnp.concatenate(states, axis=1), (1, 0)))
    else:
        found = [product(x, y, (1, 0)) for x, y in zip(rows, states, strict=True)]
    read, alone = [], []
    for head, own in zip(pair.heads, found, strict=True):
        decay = by_head.decay(head, slice(None))
        alone.append(by_head.v[head] - decay * own[:CHUNK_TOKENS])
        read.append(decay * own[CHUNK_TOKENS:])
    return read, alone


def _apart(matrices: list[jax.Array], dtype: jnp.dtype) -> jax.Array:
    """Place two matrices [C, 128] as blocks on the diagonal of one matrix."""
    left, right = (x.astype(dtype) for x in matrices)
    zeros = jnp.zeros_like(left)
    upper, lower = (jnp.concatenate(x, axis=1) for x in ((left, zeros), (zeros, right)))
    return jnp.concatenate([upper, lower], axis=0)


def _pair(
    kernel: ChunkKernel,
    heads: tuple[Any, ...],
    keys: list[jax.Array],
    similar: list[jax.Array],
    rows: list[jax.Array],
) -> _Pair:
    """Build the equations of two value heads.

    `similar` [2 * C, 2 * C] is each head's `rows` times its keys, twice. A change is computed as if
    beta were 1, and beta is a factor of its weights: one number for each column, which costs less
    than one for each row.
    """
    by_head = kernel.by_head
    row, column = row_and_column((CHUNK_TOKENS, LANES))
    is_left, column = column < CHUNK_TOKENS, column & (CHUNK_TOKENS - 1)

    def beside(left: jax.Array, right: jax.Array) -> jax.Array:
        mask = is_left[: left.shape[0]]
        return jnp.where(mask, left, right)

    def of_heads(array: Any) -> jax.Array:
        return beside(*(array[head] for head in heads))

    def of_rows(array: Any) -> jax.Array:
        return beside(*(array[pl.ds(head, 1)] for head in heads))

    coarse_row, fine_row, beta = map(
        of_rows, (by_head.coarse_rows, by_head.fine_rows, by_head.beta_rows)
    )
    coarse, fine = of_heads(by_head.coarse), of_heads(by_head.fine)
    between = (coarse - coarse_row) + (fine - fine_row)
    end = slice(CHUNK_TOKENS - 1, CHUNK_TOKENS)
    until = jnp.exp((coarse[end] - coarse_row) + (fine[end] - fine_row))
    # A later token has no weight: its exponent is masked.
    decay = jnp.exp(jnp.where(is_seen(row, column), between, NEVER)) * beta
    if similar[0] is similar[1]:
        of_keys, of_queries = similar[0][:CHUNK_TOKENS], similar[0][CHUNK_TOKENS:]
    else:
        of_keys = beside(*(x[:CHUNK_TOKENS] for x in similar))
        of_queries = beside(*(x[CHUNK_TOKENS:] for x in similar))
    turned = jnp.concatenate(keys, axis=0).T
    weights = jnp.concatenate([of_queries * decay, turned * (until * beta)], axis=0)
    return _Pair((heads[0], heads[1]), of_keys * decay, weights, rows)


def is_seen(row: jax.Array, column: jax.Array) -> jax.Array:
    return column <= row
