"""Which queries the prefill kernel computes on at once, and which blocks of keys they see."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from sgl_jax.kernels.ragged_paged_attention.tpu_prefill.memory import Kernel, div


class QueryBlock(NamedTuple):
    """Some of a row's queries, and the blocks of keys that they see.

    Of the key blocks [first, stop), all queries see all keys of [clear, clear + num_clear).
    """

    row: jax.Array
    token: jax.Array  # of the step, the first
    position: jax.Array  # of the first query in its request
    num_tokens: jax.Array
    first: jax.Array
    stop: jax.Array
    clear: jax.Array
    num_clear: jax.Array

    @classmethod
    def of(cls, kernel: Kernel, row: jax.Array, index: Any) -> "QueryBlock":
        """The block number `index` of a row."""
        rows, window = kernel.rows, kernel.options.sliding_window
        num_queries, num_keys = kernel.shape.blocks.queries, kernel.shape.blocks.keys
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
        return cls(row, token, position, num_tokens, first, stop, clear, num_clear)

    @property
    def num_key_blocks(self) -> jax.Array:
        return self.stop - self.first

    def key_block(self, turn: Any) -> jax.Array:
        """Which block of keys is met at a turn: first the clear ones, then those to be masked."""
        masked = self.first + turn - self.num_clear
        skipped = jnp.where(masked >= self.clear, self.num_clear, 0)
        return jnp.where(turn < self.num_clear, self.clear + turn, masked + skipped)
