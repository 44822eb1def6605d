"""Blocks of a prefill row's queries: the keys that they see, and their copies to and from HBM.

Queries are ordered by token in HBM and by head in the computation; see `prefill`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from sgl_jax.kernels.attention.batch import ScoreOptions
from sgl_jax.kernels.attention.tpu.shared import (
    Expansion,
    Pages,
    Rows,
    Shape,
    Softmax,
    TokenBuffers,
    div,
)
from sgl_jax.kernels.attention.tpu.tuned import PrefillBlocks
from sgl_jax.kernels.pallas_tpu import for_each_run

# Tokens reordered at once between the order of HBM (by token) and of the computation (by head).
TRANSPOSED_TOKENS = 32
# Tokens copied at once where a row has less than a block of them.
RUN_TOKENS = 16


class Prefill(NamedTuple):
    shape: Shape
    blocks: PrefillBlocks
    options: ScoreOptions
    rows: Rows
    sinks: Any  # float32 [H, G, 1, 128] in powers of two, or None
    expansion: Expansion | None
    tokens: Any  # [T, q_heads, D] in HBM: queries, then results
    next_rows: Any
    pages: Pages
    buffers: TokenBuffers
    softmax: Softmax

    @property
    def no_row(self) -> int:
        """Return B, which stands for "no row"."""
        return self.next_rows.shape[0] - 1

    @property
    def transposed(self) -> int:
        """Return the number of tokens to reorder at once; it divides a block of queries."""
        return min(TRANSPOSED_TOKENS, self.blocks.few_queries)


class QueryBlock(NamedTuple):
    """Some of a row's queries, and the blocks of keys that they see: [first, stop).

    All queries see all keys of the blocks [clear, clear + num_clear).
    """

    row: jax.Array
    table: jax.Array  # index of the buffer with the row's page ids
    token: jax.Array  # index of the first query in the step
    position: jax.Array  # position of the first query in its request
    num_tokens: jax.Array
    first: jax.Array
    stop: jax.Array
    clear: jax.Array
    num_clear: jax.Array

    @classmethod
    def of(cls, kernel: Prefill, row: jax.Array, index: Any, table: Any) -> "QueryBlock":
        """Return block number `index` of a row with its page ids in the buffer `table`."""
        rows, window = kernel.rows, kernel.options.sliding_window
        num_queries, num_keys = kernel.blocks.queries, kernel.blocks.keys
        done = index * num_queries
        num_tokens = jnp.minimum(rows.q_len(row) - done, num_queries)
        position = rows.kv_starts[row] + done
        last = position + num_tokens - 1
        stop = div(last, num_keys) + 1
        first = clear = jnp.int32(0)
        if window is not None:
            first = div(jnp.maximum(position - window + 1, 0), num_keys)
            edge = jnp.maximum(last - window + 1, 0)
            clear = jnp.minimum(div(edge + num_keys - 1, num_keys), stop)
        num_clear = jnp.maximum(div(position + 1, num_keys) - clear, 0)
        token = rows.q_offsets[row] + done
        return cls(row, table, token, position, num_tokens, first, stop, clear, num_clear)

    @property
    def num_key_blocks(self) -> jax.Array:
        return self.stop - self.first

    def key_block(self, n: Any) -> jax.Array:
        """Return the n-th block of keys to read; clear blocks come first, then masked blocks."""
        masked = self.first + n - self.num_clear
        skipped = jnp.where(masked >= self.clear, self.num_clear, 0)
        return jnp.where(n < self.num_clear, self.clear + n, masked + skipped)


def begin_queries(kernel: Prefill, block: QueryBlock) -> None:
    shape, softmax = kernel.shape, kernel.softmax
    tile = (shape.kv_heads, shape.group, kernel.transposed, shape.head_dim)

    def transpose(at: Any) -> None:
        by_head = jnp.swapaxes(kernel.buffers.q[at].astype(softmax.q.dtype), 0, 1)
        softmax.q[:, :, at] = by_head.reshape(tile)

    for_each_slice(kernel, block, transpose)


def end_queries(kernel: Prefill, block: QueryBlock) -> None:
    softmax, out = kernel.softmax, kernel.buffers.out

    def transpose(at: Any) -> None:
        share = 1 / jnp.sum(softmax.l[:, :, at], axis=3, keepdims=True)
        by_head = (softmax.acc[:, :, at] * share).reshape(-1, kernel.transposed, out.shape[2])
        out[at] = jnp.swapaxes(by_head, 0, 1).astype(out.dtype)

    for_each_slice(kernel, block, transpose)


def for_each_slice(kernel: Prefill, block: QueryBlock, do: Callable[[Any], None]) -> None:
    """Call do(tokens) for slices of the buffers that together cover all tokens of the block."""
    size = kernel.transposed

    @pl.loop(0, div(block.num_tokens + size - 1, size))
    def _(i: jax.Array) -> None:
        do(pl.ds(pl.multiple_of(i * size, size), size))


def block_runs(kernel: Prefill, block: QueryBlock, do: Callable[[Any, Any], None]) -> None:
    """Call do(tokens of the step, tokens of the block) for runs that make up the block."""

    def run(first: Any, size: int) -> None:
        do(pl.ds(block.token + first, size), pl.ds(first, size))

    sizes = (kernel.blocks.queries, RUN_TOKENS, 1)
    for_each_run(block.num_tokens, sizes, kernel.tokens.shape[0], run)


def q_copies(kernel: Prefill, block: QueryBlock, do: Callable[[Any], None]) -> None:
    """Call do(copy) for the DMAs that copy a block's queries from HBM."""
    q, sem = kernel.buffers.q, kernel.buffers.q_sem

    def copy(tokens: Any, here: Any) -> None:
        do(pltpu.make_async_copy(kernel.tokens.at[tokens], q.at[here], sem))

    block_runs(kernel, block, copy)


def out_copies(kernel: Prefill, block: QueryBlock, do: Callable[[Any], None]) -> None:
    """Call do(copy) for the DMAs that copy a block's results to HBM."""
    out, sem = kernel.buffers.out, kernel.buffers.out_sem

    def copy(tokens: Any, here: Any) -> None:
        results = kernel.tokens.at[tokens, :, : out.shape[2]]
        do(pltpu.make_async_copy(out.at[here], results, sem))

    block_runs(kernel, block, copy)
