"""Self-attention with grouped queries, its KV heads split over the tensor axis."""

import math
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from sgl_jax.kernels.attention.api import (
    AttentionBatch,
    RaggedPagedAttention,
    ScoreOptions,
)
from sgl_jax.layers.kv_scales import KVScales
from sgl_jax.layers.layer_weights import project, use_weight
from sgl_jax.layers.mesh_axes import TENSOR_AXIS, sum_over_tensor
from sgl_jax.layers.norm import RMSNorm
from sgl_jax.layers.parameter import parameter
from sgl_jax.layers.rotary import Rotation, rotate


def replicated_kv_heads(num_heads: int, num_kv_heads: int, tp_size: int) -> int:
    """KV heads of the whole mesh: more than the model's when there are more chips than heads.

    Raises:
        ValueError: heads cannot be dealt out evenly over `tp_size` chips.
    """
    if num_heads % tp_size:
        raise ValueError(
            f"tp_size ({tp_size}) must divide the number of attention heads ({num_heads})"
        )
    if num_kv_heads % tp_size and tp_size % num_kv_heads:
        raise ValueError(
            f"tp_size ({tp_size}) must divide the number of KV heads ({num_kv_heads}) or be a "
            f"multiple of it"
        )
    return max(num_kv_heads, tp_size)


class Attention(nnx.Module):
    """Rotary attention over the paged KV cache.

    The projections of Q, K and V are one matrix, [hidden, kv_heads * (group + 2) * head_dim]: for
    each KV head its queries, its key, its value. So the heads that belong together stay together
    however many chips share them. It is a matrix and not an array of heads because a TPU would
    copy such an array, in every step, into a layout that it can multiply.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        dtype: DTypeLike,
        qkv_bias: bool = False,
        qk_norm_eps: float | None = None,
        attend: RaggedPagedAttention,
        sliding_window: int | None = None,
        has_kv_scales: bool = False,
    ) -> None:
        """`num_kv_heads` counts copies (`replicated_kv_heads`); `qk_norm_eps` adds Q, K norms;
        `attend` is the kernel; `has_kv_scales` adds the scales of an 8-bit cache."""
        heads = (num_kv_heads, num_heads // num_kv_heads + 2, head_dim)
        self.qkv = parameter((hidden_size, math.prod(heads)), dtype, None, TENSOR_AXIS)
        self.qkv_bias = parameter(heads, dtype, TENSOR_AXIS) if qkv_bias else None
        self.heads_shape = heads[1:]
        self.q_norm = RMSNorm(head_dim, qk_norm_eps, dtype) if qk_norm_eps is not None else None
        self.k_norm = RMSNorm(head_dim, qk_norm_eps, dtype) if qk_norm_eps is not None else None
        self.output = parameter((num_heads * head_dim, hidden_size), dtype, TENSOR_AXIS)
        self.kv_scales = KVScales(num_kv_heads) if has_kv_scales else None
        self.sliding_window = sliding_window
        self.attend = attend

    def __call__(
        self,
        x: jax.Array,
        by: Rotation,
        batch: AttentionBatch,
        kv_cache: jax.Array,
        layer: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        """x [T, hidden] -> (result [T, hidden], kv_cache with this layer's new K and V)."""
        q, k, v = self._project(x)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, by), rotate(k, by)
        if self.kv_scales is not None:
            q, k, v = self.kv_scales.before(q, k, v)
        out, kv_cache = self.attend(
            q,
            k,
            v,
            kv_cache,
            layer,
            batch,
            ScoreOptions(scale=q.shape[-1] ** -0.5, sliding_window=self.sliding_window),
        )
        if self.kv_scales is not None:
            out = self.kv_scales.after(out)
        out = project(out.reshape(x.shape[0], -1), self.output)
        return sum_over_tensor(out), kv_cache

    def _project(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """q [T, q_heads, head_dim], k and v [T, kv_heads, head_dim] of this chip."""
        # Behind the barrier the split into heads cannot reach the product: there it makes the TPU's
        # compiler transpose the weights in every step, at eight times the product's cost.
        qkv = lax.optimization_barrier(project(x, self.qkv))
        qkv = qkv.reshape(x.shape[0], -1, *self.heads_shape)
        if self.qkv_bias is not None:
            qkv = use_weight(self.qkv_bias, partial(jnp.add, qkv))
        q = qkv[:, :, :-2].reshape(x.shape[0], -1, qkv.shape[-1])
        return q, qkv[:, :, -2], qkv[:, :, -1]
