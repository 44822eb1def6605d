"""Blocks of a prefill row's queries: the keys that they see, their copies, and their attention.

Queries are ordered by token in HBM and by head in the computation; see `prefill`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from sgl_jax.kernels.attention.batch import MASKED, ScoreOptions
from sgl_jax.kernels.attention.tpu.shared import (
    Expansion,
    Pages,
    Rows,
    Shape,
    Softmax,
    Spans,
    TokenBuffers,
    across,
    converted,
    div,
    scaled,
    sum_by_lane,
)
from sgl_jax.kernels.attention.tpu.tuned import PrefillBlocks
from sgl_jax.kernels.pallas_tpu import for_each_run, product
from sgl_jax.kernels.tpu_chip import LANES

# Tokens reordered at once between the order of HBM (by token) and of the computation (by head).
TRANSPOSED_TOKENS = 32
# Tokens copied at once where a row has less than a block of them.
RUN_TOKENS = 16


class Prefill(NamedTuple):
    shape: Shape
    blocks: PrefillBlocks
    options: ScoreOptions
    rows: Rows
    spans: Spans | None
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

    def last_seen(self, row: Any, positions: Any) -> Any:
        """Return the last keys that queries of `row` at `positions` see."""
        if self.spans is None:
            return positions
        return self.spans.last_seen(row, positions, self.rows.kv_len(row))

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
        rows, options = kernel.rows, kernel.options
        num_queries, num_keys = kernel.blocks.queries, kernel.blocks.keys
        done = index * num_queries
        num_tokens = jnp.minimum(rows.q_len(row) - done, num_queries)
        position = rows.kv_starts[row] + done
        last = position + num_tokens - 1
        stop = div(kernel.last_seen(row, last), num_keys) + 1
        first = clear = jnp.int32(0)
        if options.sliding_window is not None:
            first = div(jnp.maximum(options.first_seen(position), 0), num_keys)
            edge = jnp.maximum(options.first_seen(last), 0)
            clear = jnp.minimum(div(edge + num_keys - 1, num_keys), stop)
        num_clear = jnp.maximum(div(kernel.last_seen(row, position) + 1, num_keys) - clear, 0)
        if kernel.blocks.is_invariant:
            num_clear = jnp.int32(0)
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


class Work(NamedTuple):
    """Some queries of a block, and some keys of a block for them to attend to."""

    block: QueryBlock
    buffer: Any  # index of the KV buffer
    is_first: Any  # whether the queries have met no keys before
    first: Any  # first token in the block of queries
    num_tokens: int
    first_page: Any  # first page in the buffer
    num_keys: int
    position: Any  # of the first key in its request, or None if all queries see all keys


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


def attend_masked(kernel: Prefill, work: Work, keys: Any) -> None:
    """Call `attend` for each part of a block of keys that at least one of the queries sees."""
    block, options, part = work.block, kernel.options, kernel.blocks.part_keys
    begin = keys * kernel.blocks.keys
    end = block.position + block.num_tokens
    if kernel.spans is not None:
        end = kernel.last_seen(block.row, end - 1) + 1
    seen = jnp.minimum(end - begin, kernel.blocks.keys)
    first_part = jnp.int32(0)
    if options.sliding_window is not None:
        first_part = div(jnp.maximum(options.first_seen(block.position) - begin, 0), part)

    @pl.loop(first_part, div(seen + part - 1, part))
    def _(i: jax.Array) -> None:
        masked = work._replace(
            is_first=work.is_first & (i == first_part),
            first_page=i * (part // kernel.shape.page_size),
            num_keys=part,
            position=begin + i * part,
        )
        attend(kernel, masked)


def attend(kernel: Prefill, work: Work) -> None:
    """Add the work's keys to the softmax of all queries of the block."""
    queries, few = kernel.blocks.queries, kernel.blocks.few_queries
    if few == queries:
        attend_heads(kernel, work)
        return
    num_tokens = work.block.num_tokens
    is_short = jnp.bool_(True)
    if not kernel.blocks.is_invariant:
        is_short = num_tokens <= queries // 2
        pl.when(jnp.logical_not(is_short))(lambda: attend_heads(kernel, work))

    @pl.loop(0, jnp.where(is_short, div(num_tokens + few - 1, few), 0))
    def _(i: jax.Array) -> None:
        first = pl.multiple_of(i * few, few)
        attend_heads(kernel, work._replace(first=first, num_tokens=few))


def attend_heads(kernel: Prefill, work: Work) -> None:
    is_masked, kv_heads = work.position is not None, kernel.shape.kv_heads
    seen = seen_keys(kernel, work) if is_masked else None
    heads = kernel.blocks.masked_heads(kv_heads) if is_masked else kernel.blocks.heads

    @pl.loop(0, kv_heads // heads)
    def _(n: jax.Array) -> None:
        for i in range(heads):
            attend_head(kernel, work, n * heads + i, seen)


def seen_keys(kernel: Prefill, work: Work) -> jax.Array:
    """Return bool [1, tokens, keys], the keys that each query sees."""
    tile, options = (1, work.num_tokens, work.num_keys), kernel.options
    query = lax.broadcasted_iota(jnp.int32, tile, 1) + (work.block.position + work.first)
    key = lax.broadcasted_iota(jnp.int32, tile, 2) + work.position
    seen = key <= _last_seen_keys(kernel, work, query)
    if options.sliding_window is not None:
        seen &= key >= options.first_seen(query)
    return seen


def _last_seen_keys(kernel: Prefill, work: Work, query: jax.Array) -> jax.Array:
    """Return the last keys that queries at `query`, int32 [1, tokens, keys], see."""
    if kernel.spans is None:
        return query
    lasts = kernel.last_seen(work.block.row, query[..., :LANES])
    return jnp.concatenate([lasts] * max(1, query.shape[2] // LANES), axis=2)


def attend_head(kernel: Prefill, work: Work, head: Any, seen: jax.Array | None) -> None:
    """Merge the attention of one KV head's queries over a block of keys into the softmax."""
    shape, options, softmax = kernel.shape, kernel.options, kernel.softmax
    num_keys, head_dim = work.num_keys, shape.head_dim
    by_token, rows = (shape.group, work.num_tokens), shape.group * work.num_tokens
    at = pl.ds(work.first, work.num_tokens)
    k, v = keys_and_values(kernel, work, head)
    scores = scaled(product(softmax.q[head, :, at].reshape(rows, head_dim), k, (1, 1)), options)
    if seen is not None:
        scores = scores.reshape(*by_token, num_keys)
        scores = jnp.where(seen, scores, MASKED).reshape(rows, num_keys)
    old_m, old_l, old_acc = found_before(kernel, work, head, at)
    m = jnp.maximum(old_m, jnp.max(scores, axis=1, keepdims=True))
    weights = jnp.exp2(scores - across(m, num_keys))
    kept = jnp.exp2(old_m - m)
    sums = old_l * kept + sum_by_lane(weights)
    found = product(weights.astype(shape.product_dtype), v, (1, 0))
    acc = old_acc * across(kept, shape.value_dim) + found
    softmax.m[head, :, at] = m.reshape(*by_token, LANES)
    softmax.l[head, :, at] = sums.reshape(*by_token, LANES)
    softmax.acc[head, :, at] = acc.reshape(*by_token, shape.value_dim)


def keys_and_values(kernel: Prefill, work: Work, head: Any) -> tuple[jax.Array, jax.Array]:
    """Return [keys, head_dim] and [keys, value_dim] of one KV head, in the dtype of products."""
    shape, expansion, kv = kernel.shape, kernel.expansion, kernel.pages.buffers.kv
    pages = pl.ds(work.first_page, work.num_keys // shape.page_size)

    def slots(index: Any) -> jax.Array:
        cached = kv[work.buffer, pages, index].reshape(work.num_keys, kv.shape[4])
        return converted(cached, shape.product_dtype)

    keys = slots(shape.keys_of(head))
    if expansion is None:
        return keys, slots(shape.values_of(head))[:, : shape.value_dim]
    latents, rest = keys[:, : expansion.keys.shape[2]], keys[:, expansion.keys.shape[2] :]
    parts = (
        product(latents, expansion.keys[head], (1, 1)),
        product(latents, expansion.values[head], (1, 0)),
    )
    made, values = (part.astype(shape.product_dtype) for part in parts)
    return jnp.concatenate([made, rest], axis=1), values


def found_before(
    kernel: Prefill, work: Work, head: Any, at: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return m, l and acc [group * tokens, ...] of a KV head's queries before these keys.

    Before the first keys, the softmax buffers hold another block's results, so the initial values
    are selected instead: no key, or a sink, which is one more key, always visible, of value zero.
    Selecting costs less than writing them to memory first: arithmetic waits for the matrix unit
    anyway.
    """
    softmax, rows = kernel.softmax, kernel.shape.group * work.num_tokens
    if kernel.sinks is None:
        m, sums = jnp.float32(MASKED), jnp.float32(0)
    else:
        m, sums = kernel.sinks[head], jnp.float32(1 / LANES)
    return (
        jnp.where(work.is_first, m, softmax.m[head, :, at]).reshape(rows, LANES),
        jnp.where(work.is_first, sums, softmax.l[head, :, at]).reshape(rows, LANES),
        jnp.where(work.is_first, 0.0, softmax.acc[head, :, at]).reshape(rows, -1),
    )
