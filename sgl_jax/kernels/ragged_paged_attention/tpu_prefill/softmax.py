"""The prefill kernel's arithmetic: attention of a block of queries to a block of keys."""

from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from sgl_jax.kernels.ragged_paged_attention.scores import MASKED
from sgl_jax.kernels.ragged_paged_attention.tpu_eight_bits import converted
from sgl_jax.kernels.ragged_paged_attention.tpu_prefill.memory import Kernel, div
from sgl_jax.kernels.ragged_paged_attention.tpu_prefill.query_block import QueryBlock
from sgl_jax.kernels.tpu_chip import LANES

LOG2_E = 1.4426950408889634


class Work(NamedTuple):
    """Some queries of a block, and some keys of a block, to attend to."""

    block: QueryBlock
    slot: Any  # of the keys
    is_first: Any  # whether these are the first keys that the queries meet
    first: Any  # token of the block
    num_tokens: int
    first_page: Any  # of the slot
    num_keys: int
    position: Any  # of the first key, or None if all queries see all keys


def for_each_turn(kernel: Kernel, block: QueryBlock, do: Any) -> None:
    """do(tokens) for slices of the buffers' tokens that hold all of the block's."""
    turned = kernel.shape.turned

    @pl.loop(0, div(block.num_tokens + turned - 1, turned))
    def _(i: jax.Array) -> None:
        do(pl.ds(pl.multiple_of(i * turned, turned), turned))


def begin_queries(kernel: Kernel, block: QueryBlock) -> None:
    """Order the queries by head."""
    shape, buffers, state = kernel.shape, kernel.buffers, kernel.state
    tile = (shape.kv_heads, shape.group, shape.turned, shape.head_dim)

    def turn(at: Any) -> None:
        by_head = jnp.swapaxes(buffers.q_arriving[at].astype(state.q.dtype), 0, 1)
        state.q[:, :, at] = by_head.reshape(tile)

    for_each_turn(kernel, block, turn)


def end_queries(kernel: Kernel, block: QueryBlock) -> None:
    """Put the results, ordered by token, into `out_leaving`."""
    shape, buffers, state = kernel.shape, kernel.buffers, kernel.state

    def turn(at: Any) -> None:
        share = 1 / jnp.sum(state.total[:, :, at], axis=3, keepdims=True)
        by_head = (state.weighted[:, :, at] * share).reshape(-1, shape.turned, shape.head_dim)
        buffers.out_leaving[at] = jnp.swapaxes(by_head, 0, 1).astype(buffers.out_leaving.dtype)

    for_each_turn(kernel, block, turn)


def clear_unseen_values(kernel: Kernel, block: QueryBlock, keys: Any, slot: Any) -> None:
    """Zero V in the slots of a block of keys that hold no token, or none that the window reaches.

    Their weight is zero, but zero times what lies there, from another row or from nobody, may be
    NaN. K needs no such care: a masked score is replaced, whatever it was.
    """
    shape, buffers = kernel.shape, kernel.buffers
    begin, end = keys * shape.blocks.keys, kernel.rows.kv_len(block.row)
    window = kernel.options.sliding_window
    first_seen = jnp.int32(0) if window is None else block.position - window + 1

    @pl.when((begin + shape.blocks.keys > end) | (begin < first_seen))
    def _() -> None:
        @pl.loop(0, shape.block_pages)
        def _(page: jax.Array) -> None:
            here = begin + page * shape.page_size

            @pl.when((here + shape.page_size > end) | (here < first_seen))
            def _() -> None:
                tile = (shape.page_size, shape.head_dim)
                position = here + lax.broadcasted_iota(jnp.int32, tile, 0)
                kept = (position < end) & (position >= first_seen)
                for head in map(shape.values_of, range(shape.kv_heads)):
                    values = buffers.kv[slot, page, head]
                    buffers.kv[slot, page, head] = jnp.where(kept, values, jnp.zeros_like(values))


def seen_keys(kernel: Kernel, work: Work) -> jax.Array:
    """bool [1, tokens, keys]: which keys each query sees."""
    tile = (1, work.num_tokens, work.num_keys)
    query = lax.broadcasted_iota(jnp.int32, tile, 1) + (work.block.position + work.first)
    key = lax.broadcasted_iota(jnp.int32, tile, 2) + work.position
    seen = key <= query
    if kernel.options.sliding_window is not None:
        seen &= key > query - kernel.options.sliding_window
    return seen


def _found_before(
    kernel: Kernel, work: Work, head: Any, at: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Top, total and weighted [group * tokens, ...] of a KV head's queries before these keys.

    Before the first keys the state holds another block's results. What counts then is nothing,
    or a sink, which is one more key, always visible, whose value is zero. To choose here costs
    less than to write it to the state beforehand: arithmetic waits for the matrix unit anyway.
    """
    state, rows = kernel.state, kernel.shape.group * work.num_tokens
    if kernel.sinks is None:
        top, total = jnp.float32(MASKED), jnp.float32(0)
    else:
        top, total = kernel.sinks[head], jnp.float32(1 / LANES)
    return (
        jnp.where(work.is_first, top, state.top[head, :, at]).reshape(rows, LANES),
        jnp.where(work.is_first, total, state.total[head, :, at]).reshape(rows, LANES),
        jnp.where(work.is_first, 0.0, state.weighted[head, :, at]).reshape(rows, -1),
    )


def _across(x: jax.Array, width: int) -> jax.Array:
    """x [rows, 128], the same in all lanes, as [rows, width]."""
    if width <= LANES:
        return x[:, :width]
    return jnp.concatenate([x] * (width // LANES), axis=1)


def _attend_head(kernel: Kernel, work: Work, head: Any, seen: jax.Array | None) -> None:
    """Merge the attention of one KV head's queries over a block of keys into the state."""
    shape, options, state = kernel.shape, kernel.options, kernel.state
    num_keys, head_dim, kv = work.num_keys, shape.head_dim, kernel.buffers.kv
    dtype = state.q.dtype
    by_token, rows = (shape.group, work.num_tokens), shape.group * work.num_tokens
    at = pl.ds(work.first, work.num_tokens)
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else None
    dot = partial(lax.dot_general, precision=precision, preferred_element_type=jnp.float32)
    pages = pl.ds(work.first_page, num_keys // shape.page_size)
    k = kv[work.slot, pages, head].reshape(num_keys, head_dim)
    v = kv[work.slot, pages, shape.values_of(head)].reshape(num_keys, head_dim)
    k, v = converted(k, dtype), converted(v, dtype)
    scores = dot(state.q[head, :, at].reshape(rows, head_dim), k, (((1,), (1,)), ((), ())))
    if options.soft_cap is None:
        scores = scores * (options.scale * LOG2_E)
    else:
        scores = jnp.tanh(scores * (options.scale / options.soft_cap))
        scores = scores * (options.soft_cap * LOG2_E)
    if seen is not None:
        scores = scores.reshape(*by_token, num_keys)
        scores = jnp.where(seen, scores, MASKED).reshape(rows, num_keys)
    old_top, old_total, old_weighted = _found_before(kernel, work, head, at)
    top = jnp.maximum(old_top, jnp.max(scores, axis=1, keepdims=True))
    weights = jnp.exp2(scores - _across(top, num_keys))
    kept = jnp.exp2(old_top - top)
    parts = [weights[:, i : i + LANES] for i in range(0, num_keys, LANES)]
    total = old_total * kept + reduce(jnp.add, parts)
    found = dot(weights.astype(dtype), v, (((1,), (0,)), ((), ())))
    weighted = old_weighted * _across(kept, head_dim) + found
    state.top[head, :, at] = top.reshape(*by_token, LANES)
    state.total[head, :, at] = total.reshape(*by_token, LANES)
    state.weighted[head, :, at] = weighted.reshape(*by_token, head_dim)


def attend_heads(kernel: Kernel, work: Work) -> None:
    """`_attend_head` of all heads."""
    is_masked = work.position is not None
    seen = seen_keys(kernel, work) if is_masked else None
    heads = kernel.shape.part_heads if is_masked else kernel.shape.blocks.heads

    @pl.loop(0, kernel.shape.kv_heads // heads)
    def _(turn: jax.Array) -> None:
        for i in range(heads):
            _attend_head(kernel, work, turn * heads + i, seen)


def attend(kernel: Kernel, work: Work) -> None:
    """Merge the attention of all queries of the work's block into the state."""
    queries, few = kernel.shape.blocks.queries, kernel.shape.blocks.few_queries
    if few == queries:
        attend_heads(kernel, work)
        return
    num_tokens = work.block.num_tokens
    is_short = num_tokens <= queries // 2
    pl.when(jnp.logical_not(is_short))(lambda: attend_heads(kernel, work))

    @pl.loop(0, jnp.where(is_short, div(num_tokens + few - 1, few), 0))
    def _(i: jax.Array) -> None:
        first = pl.multiple_of(i * few, few)
        attend_heads(kernel, work._replace(first=first, num_tokens=few))


def attend_masked(kernel: Kernel, work: Work, keys: Any) -> None:
    """`attend` to those parts of a block of keys that any of the queries sees."""
    shape, block, window = kernel.shape, work.block, kernel.options.sliding_window
    part = shape.blocks.part_keys
    begin = keys * shape.blocks.keys
    seen = jnp.minimum(block.position + block.num_tokens - begin, shape.blocks.keys)
    first_part = jnp.int32(0)
    if window is not None:
        first_part = div(jnp.maximum(block.position - window + 1 - begin, 0), part)

    @pl.loop(first_part, div(seen + part - 1, part))
    def _(i: jax.Array) -> None:
        position = begin + i * part
        attend(
            kernel,
            work._replace(
                is_first=work.is_first & (i == first_part),
                first_page=i * (part // shape.page_size),
                num_keys=part,
                position=position,
            ),
        )
