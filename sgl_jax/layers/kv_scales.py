"""Scales of an 8-bit KV cache: static numbers for each KV head, outside of the cache and kernels.

The cache holds K / k_scale and V / v_scale. A score is q . K = (q * k_scale) . (K / k_scale), so
queries are multiplied before attention, and its result by v_scale afterwards.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from sgl_jax.layers.mesh_axes import TENSOR_AXIS
from sgl_jax.layers.parameter import parameter


class KVScales(nnx.Module):
    """One layer's scales, float32 [kv_heads], split over the tensor axis as the heads are.

    Powers of two multiply without rounding, so that only what is cached is rounded.
    """

    def __init__(self, num_kv_heads: int) -> None:
        """`num_kv_heads` counts copies."""
        self.k = parameter((num_kv_heads,), jnp.float32, TENSOR_AXIS)
        self.v = parameter((num_kv_heads,), jnp.float32, TENSOR_AXIS)

    def before(
        self, q: jax.Array, k: jax.Array, v: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """What attention is given for q [T, q_heads, D], k and v [T, kv_heads, D].

        q keeps its dtype; k and v are float32, rounded once, by the cache.
        """
        q = _times(q, self.k[...])
        return q, k / self.k[...][:, None], v / self.v[...][:, None]

    def after(self, out: jax.Array) -> jax.Array:
        """out [T, q_heads, D] of attention to scaled values, as if they had not been scaled."""
        return _times(out, self.v[...])


def _times(x: jax.Array, scales: jax.Array) -> jax.Array:
    """x [T, q_heads, D] times the scale of each head's KV head, [kv_heads]; in x's dtype."""
    by_kv_head = x.reshape(x.shape[0], scales.shape[0], -1)
    return (by_kv_head * scales[:, None]).astype(x.dtype).reshape(x.shape)
