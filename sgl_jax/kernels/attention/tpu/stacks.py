"""KV heads side by side in decode: the places of each head's queries, and their attention.

The keys of some heads make one matrix of 256 columns or more, the width of the matrix unit. Each
head's queries are separate rows, with zeros in the columns of the other heads.
"""

from collections.abc import Callable, Iterable
from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from sgl_jax.kernels.attention.batch import MASKED, ScoreOptions
from sgl_jax.kernels.attention.tpu.shared import (
    HALF_BIAS,
    LOG2_E,
    PageBlock,
    Pages,
    Rows,
    Shape,
    Softmax,
    TokenBuffers,
    across,
    converted,
    even_then_odd,
    has_nan,
    nan_flags,
    positions,
    scaled,
    sum_by_lane,
)
from sgl_jax.kernels.pallas_tpu import product
from sgl_jax.kernels.tpu_chip import LANES, SUBLANES

MATRIX_UNIT = 256  # columns of the largest matrix unit
TURN_KEYS = 1024  # keys to score at once, where no masks are needed


class Stacks(NamedTuple):
    """The layout of stacked KV heads."""

    kv_heads: int
    head_rows: int  # rows for one KV head's queries
    head_dim: int

    @property
    def heads_each(self) -> int:
        """Return the number of KV heads in a stack, a divisor of kv_heads."""
        n = 1
        while self.kv_heads % (2 * n) == 0 and (
            2 * n * self.head_rows <= SUBLANES or 2 * n * self.head_dim <= MATRIX_UNIT
        ):
            n *= 2
        return n

    @property
    def num_stacks(self) -> int:
        return self.kv_heads // self.heads_each

    @property
    def rows(self) -> int:
        """Return the rows of a stack, padded to whole registers."""
        return -(-self.heads_each * self.head_rows // SUBLANES) * SUBLANES

    @property
    def columns(self) -> int:
        return self.heads_each * self.head_dim

    def heads(self, stack: int) -> range:
        return range(stack * self.heads_each, (stack + 1) * self.heads_each)

    def place(self, head: int) -> tuple[int, int, slice]:
        """Return a head's stack, its first row there, and its columns."""
        stack, n = divmod(head, self.heads_each)
        return stack, n * self.head_rows, slice(n * self.head_dim, (n + 1) * self.head_dim)


def stacked_sinks(sinks: jax.Array, group: int, stacks: Stacks) -> jax.Array:
    """Arrange sinks [q_heads] like the stacked queries: float32 [S, R, 128], in powers of two."""
    each = (stacks.num_stacks, stacks.heads_each, 1, group)
    by_head = sinks.astype(jnp.float32).reshape(each) * LOG2_E
    by_query = jnp.repeat(by_head, stacks.head_rows // group, axis=2)
    rows = by_query.reshape(stacks.num_stacks, -1)
    rows = jnp.pad(rows, ((0, 0), (0, stacks.rows - rows.shape[1])))
    return jnp.broadcast_to(rows[..., None], (*rows.shape, LANES))


def own_columns(stacks: Stacks, x: jax.Array, width: int) -> jax.Array:
    """Select the columns of each row's head: x [R, heads_each * width] -> [R, width]."""
    row = lax.broadcasted_iota(jnp.int32, (stacks.rows, width), 0)
    result = x[:, :width]
    for head in range(1, stacks.heads_each):
        own = x[:, head * width : (head + 1) * width]
        result = jnp.where(row >= head * stacks.head_rows, own, result)
    return result


Turn = tuple[int, Any]  # a stack, and the index of pages in a buffer


class KeyPages(NamedTuple):
    """The range of pages that each row needs, in scalar memory."""

    first: Any  # int32 [B] the page of the first key that any query of the row sees
    stop: Any  # int32 [B] one past the page of the row's last key


class Decode(NamedTuple):
    shape: Shape
    stacks: Stacks
    options: ScoreOptions
    part_pages: int  # pages of a masked part of a block; divides a block's pages
    moves_bits: bool  # True to read an 8-bit cache by moving bits; see `shared`
    rows: Rows
    key_pages: KeyPages
    sinks: Any  # float32 [S, R, 128], or None
    tokens: Any  # [T, kv_heads, group, D] in HBM: queries, then results
    pages: Pages
    buffers: TokenBuffers
    softmax: Softmax
    flags: Any  # int32 [8, 128] `nan_flags` of the row's keys so far, if bits are moved

    @property
    def max_queries(self) -> int:
        """Return the greatest number of tokens of a row: one, and its drafts."""
        return self.buffers.q.shape[1]


def attend_block(kernel: Decode, row: jax.Array, block: PageBlock) -> None:
    page_size, rows, options = kernel.shape.page_size, kernel.rows, kernel.options
    position, kv_len = block.first * page_size, rows.kv_len(row)
    all_seen = position + kernel.pages.block_pages * page_size <= rows.kv_starts[row] + 1
    if options.sliding_window is not None:
        all_seen &= position >= options.first_seen(kv_len - 1)

    @pl.when(all_seen)
    def _() -> None:
        size = max(1, TURN_KEYS // page_size)
        pages = range(0, kernel.pages.block_pages, size)
        attend(kernel, block.buffer, [slice(first, first + size) for first in pages], None)

    @pl.when(jnp.logical_not(all_seen))
    def _() -> None:
        part = jnp.int32(kernel.part_pages)

        @pl.loop(0, lax.div(block.num_pages + part - 1, part))
        def _(index: jax.Array) -> None:
            first = index * part

            @pl.loop(0, part)
            def _(i: jax.Array) -> None:
                used = kv_len - position - (first + i) * page_size
                pl.when(used < page_size)(
                    lambda: kernel.pages.clear_values(
                        kernel.shape, block.buffer, first + i, None, used
                    )
                )

            seen = seen_keys(kernel, row, position + first * page_size)
            attend(kernel, block.buffer, [pl.ds(first, kernel.part_pages)], seen)


def seen_keys(kernel: Decode, row: Any, position: Any) -> jax.Array:
    """Return bool [R, keys of a part], the keys that each query sees from `position` on."""
    shape, stacks, options = kernel.shape, kernel.stacks, kernel.options
    kv_start, kv_len = kernel.rows.kv_starts[row], kernel.rows.kv_len(row)
    tile = (stacks.rows, kernel.part_pages * shape.page_size)
    order = positions(tile) if kernel.moves_bits else lax.broadcasted_iota(jnp.int32, tile, 1)
    keys = order + position
    if kernel.max_queries == 1:
        last = kv_start
    else:
        query = lax.broadcasted_iota(jnp.int32, (stacks.rows, 1), 0)
        query = lax.div(lax.rem(query, jnp.int32(stacks.head_rows)), jnp.int32(shape.group))
        # Queries that the row does not have see the keys of its last query, never an unused slot.
        last = jnp.minimum(kv_start + query, kv_len - 1)
    seen = keys <= last
    if options.sliding_window is not None:
        seen &= keys >= options.first_seen(last)
    return seen


def attend(kernel: Decode, buffer: Any, turns: list[Any], seen: jax.Array | None) -> None:
    """Merge the attention of a row's queries over pages of a buffer into the softmax.

    Args:
        kernel: the kernel's static sizes, inputs and buffers.
        buffer: index of the KV buffer.
        turns: indices of the pages to compute on together. The matrix unit computes the scores of a
            turn during the softmax of the previous turn.
        seen: bool [R, keys]; None if every query sees every key.
    """
    shape, stacks, options = kernel.shape, kernel.stacks, kernel.options
    softmax, kv = kernel.softmax, kernel.pages.buffers.kv
    bias = HALF_BIAS if kernel.moves_bits else 1.0

    def side_by_side(
        pages: Any, heads: Iterable[int], width: int, *, is_looked_at: bool
    ) -> jax.Array:
        """Return [keys, C] of some heads of the cache in the dtype of products."""
        parts = [kv[buffer, pages, head, :, :width].reshape(-1, width) for head in heads]
        if kernel.moves_bits:
            if is_looked_at:
                kernel.flags[...] |= reduce(jnp.bitwise_or, map(nan_flags, parts))
            return jnp.concatenate([even_then_odd(part) for part in parts], axis=1)
        return converted(jnp.concatenate(parts, axis=1), shape.product_dtype)

    def times(x: jax.Array, kv: jax.Array, axis: int) -> jax.Array:
        return product((x * bias).astype(shape.product_dtype), kv, (1, axis)) * bias

    def scores_of(stack: int, pages: Any) -> jax.Array:
        # The cache has NaN at the same indices of keys and values. Slots without a token are
        # cleared only in the values, which are the whole slot if it is packed.
        heads = stacks.heads(stack)
        keys = side_by_side(pages, heads, shape.head_dim, is_looked_at=shape.packed)
        scores = scaled(times(softmax.q[stack], keys, 1), options)
        return scores if seen is None else jnp.where(seen, scores, MASKED)

    def merge(stack: int, pages: Any, scores: jax.Array) -> None:
        old_m = softmax.m[stack]
        m = jnp.maximum(old_m, scores.max(axis=1, keepdims=True))
        weights = jnp.exp2(scores - across(m, scores.shape[1]))
        kept = jnp.exp2(old_m - m)
        softmax.m[stack] = m
        softmax.l[stack] = softmax.l[stack] * kept + sum_by_lane(weights)
        heads = map(shape.values_of, stacks.heads(stack))
        values = side_by_side(pages, heads, shape.value_dim, is_looked_at=not shape.packed)
        found = own_columns(stacks, times(weights, values, 0), shape.value_dim)
        softmax.acc[stack] = softmax.acc[stack] * across(kept, shape.value_dim) + found

    todo = [(stack, pages) for stack in range(stacks.num_stacks) for pages in turns]
    scores = scores_of(*todo[0])
    for (stack, pages), following in with_following(todo):
        next_scores = scores if following is None else scores_of(*following)
        merge(stack, pages, scores)
        scores = next_scores


def with_following(turns: list[Turn]) -> list[tuple[Turn, Turn | None]]:
    return list(zip(turns, [*turns[1:], None], strict=True))


def for_each_place(kernel: Decode, do: Callable[[int, int, int, slice, slice], None]) -> None:
    """Call do(head, i, stack, rows, columns) for the place of the i-th query of each KV head."""
    group = kernel.shape.group
    for head in range(kernel.shape.kv_heads):
        stack, first, columns = kernel.stacks.place(head)
        for i in range(kernel.max_queries):
            do(head, i, stack, slice(first + i * group, first + (i + 1) * group), columns)


def begin_row(kernel: Decode, at: jax.Array) -> None:
    """Spread the row's queries over the stacks; reset the softmax to no keys, or to the sinks."""
    softmax = kernel.softmax

    def spread(head: int, i: int, stack: int, rows: slice, columns: slice) -> None:
        softmax.q[stack, rows, columns] = kernel.buffers.q[at, i, head].astype(jnp.float32)

    for_each_place(kernel, spread)
    if kernel.sinks is None:
        softmax.m[...] = jnp.full_like(softmax.m, MASKED)
        softmax.l[...] = jnp.zeros_like(softmax.l)
    else:
        softmax.m[...] = kernel.sinks[...]
        softmax.l[...] = jnp.full_like(softmax.l, 1 / LANES)
    softmax.acc[...] = jnp.zeros_like(softmax.acc)
    kernel.flags[...] = jnp.zeros_like(kernel.flags)


def end_row(kernel: Decode, at: jax.Array) -> None:
    """Write the row's results to the output buffer."""
    softmax, out = kernel.softmax, kernel.buffers.out
    is_spoiled = has_nan(kernel.flags[...])

    def collect(head: int, i: int, stack: int, rows: slice, _: slice) -> None:
        result = softmax.acc[stack, rows] / softmax.l[stack, rows].sum(axis=1, keepdims=True)
        if kernel.moves_bits:
            result = jnp.where(is_spoiled, jnp.nan, result)
        out[at, i, head] = result.astype(out.dtype)

    for_each_place(kernel, collect)
