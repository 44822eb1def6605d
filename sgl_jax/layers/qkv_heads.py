"""From the product of Q, K and V to heads: split, normalised and rotated."""

from typing import Protocol

import jax
from jax import lax

from sgl_jax.kernels.tpu_chip import LANES
from sgl_jax.layers.head_sources import Heads
from sgl_jax.layers.norm import AllHeadsNorm, RMSNorm
from sgl_jax.layers.rotary import Rotation, rotate

QKV = tuple[jax.Array, jax.Array | None, jax.Array | None]
HeadsNorm = RMSNorm | AllHeadsNorm  # of each head, or of all heads together
QKVNorms = tuple[HeadsNorm | None, HeadsNorm | None, RMSNorm | None]


class QKVHeads(Protocol):
    """Split Q, K and V into heads, normalise those with norms, rotate queries and keys."""

    def __call__(self, qkv: jax.Array, heads: Heads, norms: QKVNorms, by: Rotation) -> QKV:
        """Compute the heads of one chip's tokens.

        Args:
            qkv: [T, kv_heads * heads.kv_width], for each KV head its queries, its key, its value.
            heads: the layer's heads on the whole mesh; the number of KV heads differs on a chip.
            norms: norms of queries, keys and values, or None.
            by: each token's rotation.

        Returns:
            q [T, kv_heads * group, head_dim], k and v [T, kv_heads, head_dim], in qkv's dtype. k
            and v are None if the product has neither; v is made of keys if it has no values.
        """
        ...


def xla_qkv_heads(qkv: jax.Array, heads: Heads, norms: QKVNorms, by: Rotation) -> QKV:
    # After the barrier, the split into heads cannot reach the product, where it would make the
    # TPU's compiler transpose the weights in every step, at eight times the product's cost.
    parts = lax.optimization_barrier(qkv)
    parts = parts.reshape(qkv.shape[0], -1, heads.group + heads.num_kv_parts, heads.head_dim)
    q_norm, k_norm, v_norm = norms
    q = parts[:, :, : heads.group].reshape(qkv.shape[0], -1, heads.head_dim)
    q = rotate(q if q_norm is None else q_norm(q), by)
    if heads.num_kv_parts == 0:
        return q, None, None
    k, v = parts[:, :, heads.group], parts[:, :, -1]
    k = k if k_norm is None else k_norm(k)
    v = v if v_norm is None else v_norm(v)
    return q, rotate(k, by), v


def pallas_qkv_heads(qkv: jax.Array, heads: Heads, norms: QKVNorms, by: Rotation) -> QKV:
    """Implement `QKVHeads` by a kernel.

    Heads that do not fill rows of lanes, and norms of all heads together, are left to XLA.
    """
    if heads.head_dim % LANES or any(isinstance(norm, AllHeadsNorm) for norm in norms):
        return xla_qkv_heads(qkv, heads, norms, by)
    # Imported late: a process without the Pallas kernels does not wait for their import.
    from sgl_jax.kernels.qkv_heads import HeadNorm, rotated_heads

    q, *kv = rotated_heads(
        qkv,
        by.cos[:, 0],
        by.sin[:, 0],
        *(
            None if x is None else HeadNorm(x.weight[...], x.eps, getattr(x, "from_one", False))
            for x in norms
        ),
        group=heads.group,
        head_dim=heads.head_dim,
        num_kv_parts=heads.num_kv_parts,
    )
    if not kv:
        return q, None, None
    k, v = (x.reshape(qkv.shape[0], -1, heads.head_dim) for x in kv)
    return q, k, v
