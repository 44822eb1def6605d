"""From the product of Q, K and V to heads: split, normalised and rotated."""

from typing import Protocol

import jax
from jax import lax

from sgl_jax.kernels.tpu_chip import LANES
from sgl_jax.layers.head_sources import Heads
from sgl_jax.layers.norm import AllHeadsNorm, RMSNorm
from sgl_jax.layers.rotary import Rotation, rotate

QKV = tuple[jax.Array, jax.Array, jax.Array]
HeadsNorm = RMSNorm | AllHeadsNorm  # of each head, or of all heads together


class QKVHeads(Protocol):
    """Split Q, K and V into heads, normalise queries and keys if they have norms, rotate them."""

    def __call__(
        self,
        qkv: jax.Array,
        heads: Heads,
        q_norm: HeadsNorm | None,
        k_norm: HeadsNorm | None,
        by: Rotation,
    ) -> QKV:
        """Compute the heads of one chip's tokens.

        Args:
            qkv: [T, kv_heads * heads.kv_width], for each KV head its queries, its key, its value.
            heads: the layer's heads on the whole mesh; `group` and `head_dim` also hold for a chip.
            q_norm, k_norm: norms of queries and keys, or None.
            by: each token's rotation.

        Returns:
            q [T, kv_heads * group, head_dim], k and v [T, kv_heads, head_dim], in qkv's dtype.
        """
        ...


def xla_qkv_heads(
    qkv: jax.Array, heads: Heads, q_norm: HeadsNorm | None, k_norm: HeadsNorm | None, by: Rotation
) -> QKV:
    # After the barrier, the split into heads cannot reach the product, where it would make the
    # TPU's compiler transpose the weights in every step, at eight times the product's cost.
    parts = lax.optimization_barrier(qkv)
    parts = parts.reshape(qkv.shape[0], -1, heads.group + 2, heads.head_dim)
    q = parts[:, :, :-2].reshape(qkv.shape[0], -1, heads.head_dim)
    k, v = parts[:, :, -2], parts[:, :, -1]
    q = q if q_norm is None else q_norm(q)
    k = k if k_norm is None else k_norm(k)
    return rotate(q, by), rotate(k, by), v


def pallas_qkv_heads(
    qkv: jax.Array, heads: Heads, q_norm: HeadsNorm | None, k_norm: HeadsNorm | None, by: Rotation
) -> QKV:
    """Implement `QKVHeads` by a kernel.

    Heads that do not fill rows of lanes, and norms of all heads together, are left to XLA.
    """
    if heads.head_dim % LANES:
        return xla_qkv_heads(qkv, heads, q_norm, k_norm, by)
    if isinstance(q_norm, AllHeadsNorm) or isinstance(k_norm, AllHeadsNorm):
        return xla_qkv_heads(qkv, heads, q_norm, k_norm, by)
    # Imported late: a process without the Pallas kernels does not wait for their import.
    from sgl_jax.kernels.qkv_heads import HeadNorm, rotated_heads

    q, k, v = rotated_heads(
        qkv,
        by.cos[:, 0],
        by.sin[:, 0],
        *(
            None if x is None else HeadNorm(x.weight[...], x.eps, x.from_one)
            for x in (q_norm, k_norm)
        ),
        group=heads.group,
        head_dim=heads.head_dim,
    )
    by_head = (qkv.shape[0], -1, heads.head_dim)
    return q, k.reshape(by_head), v.reshape(by_head)
