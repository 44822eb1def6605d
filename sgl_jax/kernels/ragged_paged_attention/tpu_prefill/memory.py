"""What the prefill kernel keeps where: its sizes, its buffers, and what it has found so far."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sgl_jax.kernels.ragged_paged_attention.prefill_blocks import PrefillBlocks
from sgl_jax.kernels.ragged_paged_attention.rows import Rows
from sgl_jax.kernels.ragged_paged_attention.scores import ScoreOptions

# Tokens that change between the order of memory, by token, and that of compute, by head, at once.
TURNED_TOKENS = 32


class Shape(NamedTuple):
    """The static sizes of one call."""

    kv_heads: int
    group: int  # queries per KV head
    page_size: int
    head_dim: int  # of a slot of the cache
    packed: bool  # whether a slot holds a head's K and V side by side
    blocks: PrefillBlocks

    def values_of(self, head: Any) -> Any:
        """Where in a page a head's values lie."""
        return head if self.packed else self.kv_heads + head

    @property
    def block_pages(self) -> int:
        return self.blocks.keys // self.page_size

    @property
    def part_heads(self) -> int:
        """As `blocks.heads`, where masks are needed: about as many instructions."""
        wanted = self.blocks.heads * (self.blocks.keys // self.blocks.part_keys)
        return max(n for n in range(1, wanted + 1) if self.kv_heads % n == 0)

    @property
    def turned(self) -> int:
        return min(TURNED_TOKENS, self.blocks.few_queries)


class Buffers(NamedTuple):
    """Memory of the kernel; B rows, of which only prefill rows are looked at."""

    kv_hbm: Any  # [layers, pages, 2 * kv_heads, page_size, head_dim]
    table_hbm: Any  # int32 [B, 1, table_width]
    q_hbm: Any  # [T, q_heads, head_dim]
    tokens_hbm: Any  # the same memory: queries, and in their place the result
    next_rows: Any  # int32 [B + 1] scalar memory: the next row that has queries, or B
    table: Any  # int32 [2, 1, table_width] scalar memory: page ids of this row and the next
    kv: Any  # [2, block_pages, 2 * kv_heads, page_size, head_dim]
    q_arriving: Any  # [queries, q_heads, head_dim]
    out_leaving: Any  # as q_arriving
    table_sem: Any
    kv_sem: Any  # [2]
    q_sem: Any
    out_sem: Any


class Softmax(NamedTuple):
    """A block's queries by head, and what was found so far for each of them."""

    q: Any  # [kv_heads, group, queries, head_dim] in the type of the products
    top: Any  # float32 [kv_heads, group, queries, 128] greatest score, in all lanes
    total: Any  # as top: denominator times 2^-top, a part of it in each lane
    weighted: Any  # float32 [kv_heads, group, queries, head_dim] numerator times 2^-top


class Kernel(NamedTuple):
    """Everything that a part of the kernel may need."""

    rows: Rows
    buffers: Buffers
    state: Softmax
    sinks: Any | None  # float32 [kv_heads, group, 1, 128]
    shape: Shape
    options: ScoreOptions

    @property
    def num_slots(self) -> int:
        """B, which as a row's number means nobody."""
        return self.buffers.next_rows.shape[0] - 1


def div(a: Any, b: int) -> jax.Array:
    """a // b of a >= 0, which costs less than the division that knows signs."""
    return lax.div(jnp.int32(a), jnp.int32(b))
