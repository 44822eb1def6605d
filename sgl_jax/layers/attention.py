"""Self-attention with grouped queries, with KV heads split over the tensor axis."""

import jax
import jax.numpy as jnp
from flax import nnx

from sgl_jax.kernels.attention.api import RaggedPagedAttention
from sgl_jax.kernels.attention.batch import AttentionBatch, ScoreOptions
from sgl_jax.layers.head_sources import Heads
from sgl_jax.layers.linear import Linear
from sgl_jax.layers.mesh_axes import TENSOR_AXIS
from sgl_jax.layers.norm import RMSNorm
from sgl_jax.layers.parameter import parameter
from sgl_jax.layers.qkv_heads import HeadsNorm, QKVHeads, xla_qkv_heads
from sgl_jax.layers.rotary import Rotation, scale_queries
from sgl_jax.layers.sources import Source


class KVScales(nnx.Module):
    """Scales of one layer's 8-bit KV, float32 [kv_heads], split over the tensor axis like heads.

    The cache holds K / k_scale and V / v_scale. A score is q . K = (q * k_scale) . (K / k_scale),
    so queries are multiplied before attention, and its result by v_scale afterwards.
    Powers of two multiply without rounding, so only the cached values are rounded.
    """

    def __init__(self, num_kv_heads: int) -> None:
        """Declare the scales; `num_kv_heads` counts copies."""
        self.k = parameter((num_kv_heads,), jnp.float32, TENSOR_AXIS)
        self.v = parameter((num_kv_heads,), jnp.float32, TENSOR_AXIS)

    def before(
        self, q: jax.Array, k: jax.Array, v: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Scale q [T, q_heads, D], k and v [T, kv_heads, D]; k and v become float32."""
        q = _times(q, self.k[...])
        return q, k / self.k[...][:, None], v / self.v[...][:, None]

    def after(self, out: jax.Array) -> jax.Array:
        """Rescale out [T, q_heads, D], the result of attention to scaled values."""
        return _times(out, self.v[...])


def _times(x: jax.Array, scales: jax.Array) -> jax.Array:
    """Multiply x [T, q_heads, D] by the scale of each head's KV head, [kv_heads]; in x's dtype."""
    by_kv_head = x.reshape(x.shape[0], scales.shape[0], -1)
    return (by_kv_head * scales[:, None]).astype(x.dtype).reshape(x.shape)


def replicated_kv_heads(num_heads: int, num_kv_heads: int, tp_size: int) -> int:
    """Return the KV heads of the whole mesh: copies included, if there are more chips than heads.

    Raises ValueError if heads cannot be distributed evenly over `tp_size` chips.
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

    The projections of Q, K and V are one matrix, [hidden, num_kv * kv_width] (`FusedHeads`): for
    each KV head its queries, its key, its value. Some layers have no values of their own, or no
    keys either (`Heads.num_kv_parts`). So related heads stay together for any number of
    chips. It is a matrix and not an array of heads because a TPU would copy such an array, in every
    step, into a layout for multiplication.
    """

    def __init__(
        self,
        heads: Heads,
        qkv: Linear,
        output: Linear,
        *,
        gate: Linear | None = None,
        attend: RaggedPagedAttention,
        qkv_heads: QKVHeads = xla_qkv_heads,
        q_norm: HeadsNorm | None = None,
        k_norm: HeadsNorm | None = None,
        v_norm: RMSNorm | None = None,
        scores: ScoreOptions,
        sinks: Source | None = None,
        has_kv_scales: bool = False,
    ) -> None:
        """Declare the layer.

        `qkv` is split by its outputs, `output` by its inputs. `gate` multiplies each query's result
        and is split by its outputs, in the order of the heads. `qkv_heads` computes the inputs of
        the kernel `attend`. The norms apply to queries and keys before rotation, and to values.
        `sinks` are [num_heads], and not in `scores`. `has_kv_scales` adds the scales of an 8-bit
        cache.
        """
        self.heads = heads
        self.qkv = qkv
        self.output = output
        self.gate = gate
        self.q_norm = q_norm
        self.k_norm = k_norm
        self.v_norm = v_norm
        self.kv_scales = KVScales(heads.num_kv) if has_kv_scales else None
        self.scores = scores
        self.sinks = None if sinks is None else parameter(sinks, jnp.float32, TENSOR_AXIS)
        self.attend = attend
        self.qkv_heads = qkv_heads

    def __call__(
        self,
        x: jax.Array,
        by: Rotation,
        batch: AttentionBatch,
        kv_cache: jax.Array,
        layer: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        """Map x [T, hidden] to (result [T, hidden], kv_cache with this layer's new K and V)."""
        norms = self.q_norm, self.k_norm, self.v_norm
        q, k, v = self.qkv_heads(self.qkv(x), self.heads, norms, by)
        q = scale_queries(q, by)
        if self.kv_scales is not None:
            assert k is not None
            assert v is not None
            q, k, v = self.kv_scales.before(q, k, v)
        scores = self.scores
        if self.sinks is not None:
            scores = scores._replace(sinks=self.sinks[...])
        out, kv_cache = self.attend(q, k, v, kv_cache, layer, batch, scores)
        if self.kv_scales is not None:
            out = self.kv_scales.after(out)
        out = out.reshape(x.shape[0], -1)
        if self.gate is not None:
            out = out * jax.nn.sigmoid(self.gate(x))
        return self.output(out), kv_cache
