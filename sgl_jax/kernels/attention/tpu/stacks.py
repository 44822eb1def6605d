"""KV heads side by side in decode: the rows and columns of each head's queries.

The keys of some heads make one matrix of 256 columns or more, the width of the matrix unit. Each
head's queries are separate rows, with zeros in the columns of the other heads.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sgl_jax.kernels.attention.tpu.shared import LOG2_E
from sgl_jax.kernels.tpu_chip import LANES, SUBLANES

MATRIX_UNIT = 256  # columns of the largest matrix unit


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
