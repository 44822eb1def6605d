"""The causal convolution of gated delta nets on TPU, over states in slots.

Tokens are processed in order, the channels of each as a matrix of 128 lanes, so that a token's
inputs are whole registers right after the inputs of the previous token. At a row's first token, its
state replaces the previous tokens, which belong to a completed row. A state to be kept is a copy of
the last inputs.

Grid: one step for each block of 64 of the step's tokens, in order.

Buffers, with K the convolution's width, C channels, G = C / 128:
    u, out    [block, C], [block, G, 128]    this grid step's, copied by the grid
    window    float32 [(K - 1 + block) * G, 128]   inputs of K - 1 tokens before the block, and of
                                                   its tokens
    read      [8, (K - 1) * G, 128]    state of row r in r % 8
    written   [8, (K - 1) * G, 128]    the n-th state that is kept in n % 8
    done      int32 [2]        counts of chunks, and of kept states, so far; in scalar memory

DMAs: reads are started 7 rows ahead; a write is waited for before its buffer is used again, or at
the end.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from sgl_jax.kernels.gated_delta.batch import StateBatch
from sgl_jax.kernels.gated_delta.tpu.shared import StateRows
from sgl_jax.kernels.pallas_tpu import UNCHECKED
from sgl_jax.kernels.tpu_chip import LANES, SUBLANES

BLOCK_TOKENS = 64
NUM_BUFFERS = 8
CHUNKS, WRITES = 0, 1  # indices in `done`


class _Scalars(NamedTuple):
    """Inputs in scalar memory."""

    rows: StateRows
    num_rows: Any  # int32 [1]
    chunk_starts: Any  # int32 [N + 1]
    chunk_targets: Any  # int32 [N] slot or negative
    chunk_snapshots: Any  # int32 [N] slot or negative


class _Buffers(NamedTuple):
    """Buffers in vector memory, except `done` in scalar memory."""

    window: Any
    read: Any
    written: Any
    read_sem: Any  # [8]
    write_sem: Any  # [8]
    done: Any


class _Kernel(NamedTuple):
    scalars: _Scalars
    states: Any  # [layers, slots, (K - 1) * G, 128] in HBM
    buffers: _Buffers
    lines: int  # G, the rows of 128 lanes of a token

    @property
    def rows(self) -> StateRows:
        return self.scalars.rows

    @property
    def before(self) -> int:
        """Return the number of tokens of a state."""
        return self.states.shape[2] // self.lines


def causal_conv(
    u: jax.Array,
    weight: jax.Array,
    states: jax.Array,
    layer: jax.Array,
    batch: StateBatch,
    bias: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Implement `api.CausalConv`; padding tokens' outputs are zeros.

    Outputs leave the kernel as matrices of 128 lanes, so a caller that views them as heads of 128
    before it splits them causes no copy. Raises ValueError if the channels, or the states, do not
    come in rows of 128.
    """
    num_tokens, channels = u.shape
    if channels % LANES or states.shape[3] != LANES:
        raise ValueError(
            f"on TPU, a convolution's channels and states must come in rows of {LANES}, got "
            f"{channels} channels and states of {states.shape[2:]}"
        )
    lines, before, block = channels // LANES, weight.shape[0] - 1, min(BLOCK_TOKENS, num_tokens)
    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    buffer = pltpu.VMEM((NUM_BUFFERS, *states.shape[2:]), states.dtype)
    sems = pltpu.SemaphoreType.DMA((NUM_BUFFERS,))
    rows, num_rows = StateRows.of(batch, layer), batch.num_rows.reshape(1)
    chunks = batch.chunk_starts, batch.chunk_targets, batch.chunk_snapshots
    scalars = _Scalars(rows, num_rows, *chunks)
    if bias is not None:  # a last row
        weight = jnp.concatenate([weight, bias[None].astype(weight.dtype)])
    run = pl.pallas_call(
        partial(_kernel, lines=channels // LANES),
        name="causal_conv",
        out_shape=[
            jax.ShapeDtypeStruct((num_tokens, lines, LANES), u.dtype),
            jax.ShapeDtypeStruct(states.shape, states.dtype),
        ],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(-(-num_tokens // block),),
            in_specs=[
                pl.BlockSpec((block, channels), lambda i, _: (i, 0)),
                pl.BlockSpec((weight.shape[0], lines, LANES), lambda i, _: (0, 0, 0)),
                in_hbm,
            ],
            out_specs=[pl.BlockSpec((block, lines, LANES), lambda i, _: (i, 0, 0)), in_hbm],
            scratch_shapes=[
                _Buffers(
                    pltpu.VMEM(((before + block) * lines, LANES), jnp.float32),
                    buffer,
                    buffer,
                    sems,
                    sems,
                    pltpu.SMEM((2,), jnp.int32),
                )
            ],
        ),
        input_output_aliases={len(jax.tree.leaves(scalars)) + 2: 1},
        compiler_params=UNCHECKED,
    )
    by_line = weight.astype(jnp.float32).reshape(-1, lines, LANES)
    out, states = run(scalars, u, by_line, states)
    return out.reshape(u.shape), states


def _kernel(
    scalars: _Scalars,
    u: Any,
    weight: Any,
    _old: Any,
    out: Any,
    states: Any,
    buffers: _Buffers,
    *,
    lines: int,
) -> None:
    kernel, block = _Kernel(scalars, states, buffers, lines), u.shape[0]
    window, done = buffers.window, buffers.done
    first = pl.program_id(0) * block
    count = jnp.clip(scalars.rows.num_tokens - first, 0, block)

    @pl.when(first == 0)
    def _() -> None:
        # Rows without tokens read no state; zeros in its place keep their products finite.
        window[...] = jnp.zeros_like(window)
        done[CHUNKS] = 0
        done[WRITES] = 0
        pl.loop(0, NUM_BUFFERS - 1)(lambda row: _start_read(kernel, row))

    @pl.when(count < block)
    def _() -> None:
        out[...] = jnp.zeros_like(out)

    @pl.when(count > 0)
    def _() -> None:
        for line in range(lines):
            lanes = slice(line * LANES, (line + 1) * LANES)
            place = pl.ds(kernel.before * lines + line, block, lines)
            window[place] = u[:, lanes].astype(jnp.float32)

        @pl.loop(0, count)
        def _(i: jax.Array) -> None:
            _begin_row(kernel, first + i, i)
            total = sum(
                weight[j] * window[_lines(kernel, i + j, 1)] for j in range(kernel.before + 1)
            )
            if weight.shape[0] > kernel.before + 1:
                total += weight[kernel.before + 1]
            out[i] = (total / (1 + jnp.exp(-total))).astype(out.dtype)
            _keep_states(kernel, first + i, i)

        window[: kernel.before * lines] = window[block * lines :]

    @pl.when(pl.program_id(0) == pl.num_programs(0) - 1)
    def _() -> None:
        @pl.loop(jnp.maximum(done[WRITES] - NUM_BUFFERS, 0), done[WRITES])
        def _(number: jax.Array) -> None:
            _write(kernel, number, 0).wait()


def _lines(kernel: _Kernel, token: Any, count: int) -> Any:
    start = token * kernel.lines
    start = pl.multiple_of(start, SUBLANES) if kernel.lines % SUBLANES == 0 else start
    return pl.ds(start, count * kernel.lines)


def _start_read(kernel: _Kernel, row: jax.Array) -> None:
    last = kernel.rows.slots_in.shape[0] - 1
    exists = row < kernel.scalars.num_rows[0]
    row = jnp.minimum(row, last)
    has_tokens = kernel.rows.q_offsets[row + 1] > kernel.rows.q_offsets[row]
    pl.when(exists & has_tokens)(lambda: _read(kernel, row).start())


def _read(kernel: _Kernel, row: jax.Array) -> Any:
    at, buffers = lax.rem(row, jnp.int32(NUM_BUFFERS)), kernel.buffers
    source = kernel.states.at[kernel.rows.layer[0], kernel.rows.slots_in[row]]
    return pltpu.make_async_copy(source, buffers.read.at[at], buffers.read_sem.at[at])


def _write(kernel: _Kernel, number: jax.Array, slot: Any) -> Any:
    at, buffers = lax.rem(number, jnp.int32(NUM_BUFFERS)), kernel.buffers
    target = kernel.states.at[kernel.rows.layer[0], slot]
    return pltpu.make_async_copy(buffers.written.at[at], target, buffers.write_sem.at[at])


def _begin_row(kernel: _Kernel, token: jax.Array, i: jax.Array) -> None:
    """Put the row's state before the block's i-th token, if that is the row's first."""
    row = kernel.rows.token_rows[token]

    @pl.when(kernel.rows.is_first(token))
    def _() -> None:
        _read(kernel, row).wait()
        state = kernel.buffers.read[lax.rem(row, jnp.int32(NUM_BUFFERS))]
        kernel.buffers.window[_lines(kernel, i, kernel.before)] = state.astype(jnp.float32)

        # Reads are started ahead, also for the rows without tokens before this row.
        previous = jnp.where(token == 0, -1, kernel.rows.token_rows[jnp.maximum(token - 1, 0)])
        ahead = NUM_BUFFERS - 1
        pl.loop(previous + 1 + ahead, row + 1 + ahead)(lambda row: _start_read(kernel, row))


def _keep_states(kernel: _Kernel, token: jax.Array, i: jax.Array) -> None:
    rows, scalars, done = kernel.rows, kernel.scalars, kernel.buffers.done
    is_decode = rows.token_rows[token] < rows.num_decode[0]
    pl.when(is_decode)(lambda: _keep(kernel, i, rows.slot_written(token)))
    chunk = done[CHUNKS]

    @pl.when(jnp.logical_not(is_decode) & (token + 1 == scalars.chunk_starts[chunk + 1]))
    def _() -> None:
        for slots in (scalars.chunk_targets, scalars.chunk_snapshots):
            slot = slots[chunk]
            pl.when(slot >= 0)(partial(_keep, kernel, i, slot))
        done[CHUNKS] = chunk + 1


def _keep(kernel: _Kernel, i: jax.Array, slot: jax.Array) -> None:
    number = kernel.buffers.done[WRITES]
    pl.when(number >= NUM_BUFFERS)(lambda: _write(kernel, number - NUM_BUFFERS, slot).wait())
    written = kernel.buffers.written
    new = kernel.buffers.window[_lines(kernel, i + 1, kernel.before)]
    written[lax.rem(number, jnp.int32(NUM_BUFFERS))] = new.astype(written.dtype)
    _write(kernel, number, slot).start()
    kernel.buffers.done[WRITES] = number + 1
