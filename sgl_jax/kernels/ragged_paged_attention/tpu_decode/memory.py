"""What the decode kernel keeps where: its sizes, its buffers, and what it has found so far."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from sgl_jax.kernels.ragged_paged_attention.rows import Rows
from sgl_jax.kernels.ragged_paged_attention.scores import ScoreOptions

SUBLANES = 8
MATRIX_UNIT = 256  # columns, of the largest
TABLES = 4  # rows' page ids at hand: this row's, the next one's, and those under way


class Shape(NamedTuple):
    """The static sizes of one call."""

    kv_heads: int
    group: int  # queries per KV head
    max_queries: int  # tokens of a row: one, and its drafts
    page_size: int
    head_dim: int  # of a slot of the cache
    packed: bool  # whether a slot holds a head's K and V side by side
    block_pages: int  # of one DMA buffer
    part_pages: int  # of a masked part of a block; divides block_pages
    product_dtype: jnp.dtype
    moves_bits: bool  # to read an 8-bit cache; see `tpu_eight_bits`

    @property
    def head_rows(self) -> int:
        """Rows that the queries of one KV head take."""
        return self.group * self.max_queries

    @property
    def stacked(self) -> int:
        """KV heads in a stack: a divisor of kv_heads."""
        stacked = 1
        while self.kv_heads % (2 * stacked) == 0 and (
            2 * stacked * self.head_rows <= SUBLANES or 2 * stacked * self.head_dim <= MATRIX_UNIT
        ):
            stacked *= 2
        return stacked

    @property
    def stack_rows(self) -> int:
        """Rows of a stack, padded to whole registers."""
        return -(-self.stacked * self.head_rows // SUBLANES) * SUBLANES

    @property
    def stack_dim(self) -> int:
        """Columns of a stack."""
        return self.stacked * self.head_dim

    @property
    def stacks(self) -> int:
        return self.kv_heads // self.stacked

    @property
    def block_keys(self) -> int:
        return self.block_pages * self.page_size

    def values_of(self, head: int) -> int:
        """Where in a page a head's values lie."""
        return head if self.packed else self.kv_heads + head

    def heads(self, stack: int) -> range:
        """The KV heads of a stack."""
        return range(stack * self.stacked, (stack + 1) * self.stacked)

    def place(self, head: int) -> tuple[int, int, slice]:
        """Where a head lies: its stack, its first row there, its columns."""
        stack, n = divmod(head, self.stacked)
        return stack, n * self.head_rows, slice(n * self.head_dim, (n + 1) * self.head_dim)


class KeyPages(NamedTuple):
    """Which of its pages each row needs, in scalar memory."""

    first: Any  # int32 [B] the page of the first key that any query of the row sees
    stop: Any  # int32 [B] one past the page of the row's last key


class Buffers(NamedTuple):
    """Memory that DMAs move to and from."""

    table_hbm: Any  # int32 [B, 1, pages of a row]
    q_hbm: Any  # [T, kv_heads, group, head_dim]
    kv_hbm: Any  # [layers, pages, 2 * kv_heads, page_size, head_dim], or kv_heads if packed
    out_hbm: Any  # as q_hbm; the same memory
    table: Any  # int32 [TABLES, 1, pages of a row], in scalar memory
    kv: Any  # [2, block_pages, *one page]
    q: Any  # [2, max_queries, kv_heads, group, head_dim]
    out: Any  # as q
    table_sem: Any
    kv_sem: Any  # [2]
    q_sem: Any  # [2]
    out_sem: Any  # [2]


class Softmax(NamedTuple):
    """One row's queries, and what was found so far for each of them."""

    q: Any  # [stacks, stack_rows, stack_dim], zeros beside the columns of other heads
    top: Any  # float32 [stacks, stack_rows, LANES] greatest score, in all lanes
    total: Any  # float32 [stacks, stack_rows, LANES] denominator times exp(-top), in all lanes
    weighted: Any  # float32 [stacks, stack_rows, head_dim] numerator times exp(-top)


class Kernel(NamedTuple):
    """What every function of the kernel needs."""

    shape: Shape
    options: ScoreOptions
    rows: Rows
    key_pages: KeyPages
    buffers: Buffers
    state: Softmax
    sinks: Any | None  # float32 [stacks, stack_rows, LANES]


class KeyBlock(NamedTuple):
    """A block of a row's pages, and the buffer it goes to."""

    row: jax.Array
    page: jax.Array  # its first page, as the row counts
    pages: jax.Array  # how many the row has of it, 0 .. block_pages
    slot: jax.Array


def key_block(kernel: Kernel, row: jax.Array, page: jax.Array, slot: jax.Array) -> KeyBlock:
    pages = jnp.clip(kernel.key_pages.stop[row] - page, 0, kernel.shape.block_pages)
    return KeyBlock(row, page, pages, slot)
