"""The decode kernel's arithmetic: attention of one row's queries, block by block of its keys."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from sgl_jax.kernels.ragged_paged_attention.scores import MASKED
from sgl_jax.kernels.ragged_paged_attention.tpu_decode.memory import Kernel, KeyBlock, Shape
from sgl_jax.kernels.ragged_paged_attention.tpu_eight_bits import (
    HALF_BIAS,
    converted,
    even_then_odd,
    positions,
)


def begin_row(kernel: Kernel, slot: jax.Array) -> None:
    """Spread the row's queries over stacks; nothing found yet, or a sink, whose value is zero."""
    shape, state = kernel.shape, kernel.state
    for head in range(shape.kv_heads):
        stack, first, columns = shape.place(head)
        for i in range(shape.max_queries):
            at = slice(first + i * shape.group, first + (i + 1) * shape.group)
            state.q[stack, at, columns] = kernel.buffers.q[slot, i, head].astype(jnp.float32)
    if kernel.sinks is None:
        state.top[...] = jnp.full_like(state.top, MASKED)
        state.total[...] = jnp.zeros_like(state.total)
    else:
        state.top[...] = kernel.sinks[...]
        state.total[...] = jnp.ones_like(state.total)
    state.weighted[...] = jnp.zeros_like(state.weighted)


def clear_unused_values(kernel: Kernel, slot: Any, page: Any, used: Any) -> None:
    """Zero V in the slots of one page of a buffer from `used` on.

    Their weight is zero, but zero times what lies there, from another row or from nobody, may be
    NaN. K needs no such care: a masked score is replaced, whatever it was.
    """
    shape, kv = kernel.shape, kernel.buffers.kv
    token = lax.broadcasted_iota(jnp.int32, kv.shape[3:], 0)
    for head in map(shape.values_of, range(shape.kv_heads)):
        values = kv[slot, page, head]
        kv[slot, page, head] = jnp.where(token < used, values, jnp.zeros_like(values))


def seen_keys(kernel: Kernel, row: Any, position: Any) -> jax.Array:
    """bool [stack_rows, part_keys]: which keys each query sees; `position` is the first key's."""
    shape, options = kernel.shape, kernel.options
    kv_start, kv_len = kernel.rows.kv_starts[row], kernel.rows.kv_len(row)
    tile = (shape.stack_rows, shape.part_pages * shape.page_size)
    order = positions(tile) if shape.moves_bits else lax.broadcasted_iota(jnp.int32, tile, 1)
    keys = order + position
    if shape.max_queries == 1:
        last = kv_start
    else:
        query = lax.broadcasted_iota(jnp.int32, (shape.stack_rows, 1), 0)
        query = lax.div(lax.rem(query, jnp.int32(shape.head_rows)), jnp.int32(shape.group))
        # Queries that the row does not have see what its last one sees, never an unused slot.
        last = jnp.minimum(kv_start + query, kv_len - 1)
    seen = keys <= last
    if options.sliding_window is not None:
        seen &= keys > last - options.sliding_window
    return seen


def _attend(kernel: Kernel, slot: Any, pages: Any, seen: jax.Array | None) -> None:
    """Merge the attention of a row's queries over some pages of a buffer into the row's state.

    `seen` None: every query sees every key.
    """
    shape, options, state, kv = kernel.shape, kernel.options, kernel.state, kernel.buffers.kv

    def side_by_side(heads: Iterable[int]) -> jax.Array:
        """[keys, stack_dim] of some heads of the cache, as `_product` wants it."""
        parts = [kv[slot, pages, head].reshape(-1, shape.head_dim) for head in heads]
        if shape.moves_bits:
            return jnp.concatenate([even_then_odd(part) for part in parts], axis=1)
        return converted(jnp.concatenate(parts, axis=1), shape.product_dtype)

    for stack in range(shape.stacks):
        keys = side_by_side(shape.heads(stack))
        scores = _product(shape, state.q[stack], keys, 1) * options.scale
        if options.soft_cap is not None:
            scores = options.soft_cap * jnp.tanh(scores / options.soft_cap)
        if seen is not None:
            scores = jnp.where(seen, scores, MASKED)
        old_top = state.top[stack]
        top = jnp.maximum(old_top, scores.max(axis=1, keepdims=True))
        weights = jnp.exp(scores - top[:, :1])
        kept = jnp.exp(old_top - top)
        state.top[stack] = top
        state.total[stack] = state.total[stack] * kept + weights.sum(axis=1, keepdims=True)
        values = side_by_side(map(shape.values_of, shape.heads(stack)))
        found = own_columns(shape, _product(shape, weights, values, 0))
        state.weighted[stack] = state.weighted[stack] * kept[:, :1] + found


def _product(shape: Shape, x: jax.Array, kv: jax.Array, axis: int) -> jax.Array:
    """float32 x [rows, n] times keys or values, whose `axis` has n elements; float32."""
    bias = HALF_BIAS if shape.moves_bits else 1.0
    result = lax.dot_general(
        (x * bias).astype(shape.product_dtype),
        kv,
        (((1,), (axis,)), ((), ())),
        precision=lax.Precision.HIGHEST if shape.product_dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
    return result * bias


def own_columns(shape: Shape, x: jax.Array) -> jax.Array:
    """Of x [stack_rows, stack_dim] each row's columns of its own head: [stack_rows, head_dim]."""
    row = lax.broadcasted_iota(jnp.int32, (shape.stack_rows, shape.head_dim), 0)
    result = x[:, : shape.head_dim]
    for head in range(1, shape.stacked):
        _, first, columns = shape.place(head)
        result = jnp.where(row >= first, x[:, columns], result)
    return result


def attend_block(kernel: Kernel, block: KeyBlock) -> None:
    """Attend to a block that has arrived."""
    shape, rows = kernel.shape, kernel.rows
    position, kv_len = block.page * shape.page_size, rows.kv_len(block.row)
    all_seen = position + shape.block_keys <= rows.kv_starts[block.row] + 1
    if kernel.options.sliding_window is not None:
        all_seen &= position >= kv_len - kernel.options.sliding_window

    @pl.when(all_seen)
    def _() -> None:
        _attend(kernel, block.slot, slice(None), None)

    @pl.when(jnp.logical_not(all_seen))
    def _() -> None:
        part = jnp.int32(shape.part_pages)

        @pl.loop(0, lax.div(block.pages + part - 1, part))
        def _(index: jax.Array) -> None:
            first = index * part

            @pl.loop(0, part)
            def _(i: jax.Array) -> None:
                used = kv_len - position - (first + i) * shape.page_size
                pl.when(used < shape.page_size)(
                    lambda: clear_unused_values(kernel, block.slot, first + i, used)
                )

            seen = seen_keys(kernel, block.row, position + first * shape.page_size)
            _attend(kernel, block.slot, pl.ds(first, shape.part_pages), seen)


def end_row(kernel: Kernel, slot: jax.Array) -> None:
    """Put the row's results into its slot of the output buffer."""
    shape, state, out = kernel.shape, kernel.state, kernel.buffers.out
    for head in range(shape.kv_heads):
        stack, first, _ = shape.place(head)
        for i in range(shape.max_queries):
            at = slice(first + i * shape.group, first + (i + 1) * shape.group)
            result = state.weighted[stack, at] / state.total[stack, at][:, :1]
            out[slot, i, head] = result.astype(out.dtype)
