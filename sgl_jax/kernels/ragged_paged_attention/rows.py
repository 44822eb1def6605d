"""The rows of a step as the attention kernels see them, in scalar memory."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from sgl_jax.kernels.ragged_paged_attention.batch import AttentionBatch


class Rows(NamedTuple):
    """Of B rows where each one's tokens are; arrays outside of a kernel, references inside."""

    sizes: Any  # int32 [3]: layer, num_decode, num_rows
    kv_starts: Any  # int32 [B]
    q_offsets: Any  # int32 [B + 1]

    @classmethod
    def of(cls, batch: AttentionBatch, layer: jax.Array) -> "Rows":
        """What a kernel is given."""
        sizes = jnp.stack([layer, batch.num_decode, batch.num_rows]).astype(jnp.int32)
        return cls(sizes, batch.kv_starts, batch.q_offsets)

    @property
    def layer(self) -> jax.Array:
        return self.sizes[0]

    @property
    def num_decode(self) -> jax.Array:
        return self.sizes[1]

    @property
    def num_rows(self) -> jax.Array:
        """Rows up to the last one that has queries."""
        return self.sizes[2]

    def q_len(self, row: Any) -> jax.Array:
        return self.q_offsets[row + 1] - self.q_offsets[row]

    def kv_len(self, row: Any) -> jax.Array:
        """Tokens in the cache, this step's included."""
        return self.kv_starts[row] + self.q_len(row)
