"""One layer of a decoder: attention or a recurrence, and a feed-forward layer.

Hidden states are on every chip of a rank, or each chip has columns of them (`hidden_columns`).
"""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from sgl_jax.kernels.ring_products.interface import RingProducts
from sgl_jax.layers.attention import Attention
from sgl_jax.layers.gated_delta_net import GatedDeltaNet
from sgl_jax.layers.hidden_columns import are_supported, gather_multiply, multiply_scatter
from sgl_jax.layers.latent_attention import LatentAttention
from sgl_jax.layers.linear import Linear
from sgl_jax.layers.mesh_axes import TENSOR_AXIS, concatenate_over, scatter_sum
from sgl_jax.layers.mlp import GatedMLP
from sgl_jax.layers.moe import ExpertCopies, MixtureOfExperts
from sgl_jax.layers.norm import RMSNorm


class DecoderLayer(nnx.Module):
    """Attention or a recurrence, then a feed-forward layer, with pre-norms and residual sums.

    Some models also normalise the terms of the sums.
    """

    def __init__(
        self,
        input_norm: RMSNorm,
        attention: Attention | LatentAttention | GatedDeltaNet,
        post_attention_norm: RMSNorm,
        mlp: GatedMLP | MixtureOfExperts,
        *,
        attended_norm: RMSNorm | None = None,
        mlp_output_norm: RMSNorm | None = None,
    ) -> None:
        """Declare the layer.

        `post_attention_norm` normalises the feed-forward layer's input; the last two normalise the
        outputs of attention and of the feed-forward layer.
        """
        self.input_norm = input_norm
        self.attention = attention
        self.post_attention_norm = post_attention_norm
        self.mlp = mlp
        self.attended_norm = attended_norm
        self.mlp_output_norm = mlp_output_norm

    def __call__(
        self,
        hidden: jax.Array,
        is_token: jax.Array,
        copies: ExpertCopies | None,
        reads: tuple[Any, ...],
        memory: Any,
        layer: jax.Array,
    ) -> tuple[jax.Array, jax.Array, Any, jax.Array | None]:
        """Run the layer on hidden [T, hidden_size].

        Attention reads its tokens' rotations and an `AttentionBatch`, and its memory is a KV pool;
        a recurrence reads a `StateBatch`, and its memory is `LayerStates`. `is_token` is bool [T],
        False for padding. `layer` is the layer's index in the memory.

        Returns:
            Two terms with the new hidden state as their sum, the memory, and the experts of the
            tokens, int32 [top_k, T], or None.
        """
        mix: Callable[..., tuple[jax.Array, Any]] = self.attention
        attended, memory = mix(self.input_norm(hidden), *reads, memory, layer)
        hidden = hidden + _normalised(attended, self.attended_norm)
        mlp, norm, experts = self.mlp, self.post_attention_norm, None
        if isinstance(mlp, GatedMLP):
            added = mlp(norm(hidden))
        else:
            added, experts = mlp(hidden, norm, is_token, copies)
        return hidden, _normalised(added, self.mlp_output_norm), memory, experts

    def fits_columns(self, num_chips: int, multiple: int) -> bool:
        """Return True if `on_columns` can run the layer.

        It must not normalise its outputs, and collective matmul must support its non-expert
        matrices.
        """
        own, mlp = self.attention, self.mlp
        if not isinstance(own, Attention) or own.gate or own.output.bias:
            return False
        if self.attended_norm or self.mlp_output_norm or mlp.down.bias:
            return False
        return all(
            are_supported(linears, num_chips, multiple) for _, linears in self.column_products()
        )

    def column_products(self) -> tuple[tuple[bool, tuple[Linear, ...]], ...]:
        """Return the products of `on_columns`: True for a gathering product, and its matrices."""
        own, mlp = self.attention, self.mlp
        assert isinstance(own, Attention)
        attention = (True, (own.qkv,)), (False, (own.output,))
        if isinstance(mlp, MixtureOfExperts):
            return attention
        return *attention, (True, (mlp.gate, mlp.up)), (False, (mlp.down,))

    def on_columns(
        self,
        hidden: jax.Array,
        is_token: jax.Array,
        copies: ExpertCopies | None,
        reads: tuple[Any, ...],
        memory: Any,
        layer: jax.Array,
        ring: RingProducts,
    ) -> tuple[jax.Array, Any, jax.Array | None]:
        """Run a layer that `fits_columns` on this chip's columns [T, hidden_size / chips].

        Returns the new columns (see `hidden_columns`), the memory, and the tokens' experts or None.
        """
        own, mlp = self.attention, self.mlp
        assert isinstance(own, Attention)
        qkv = gather_multiply(ring, hidden, self.input_norm, (own.qkv,), lambda qkv: qkv)
        if own.qkv.bias is not None:
            qkv += own.qkv.bias[...]
        attend: Callable[..., tuple[jax.Array, Any]] = own.attended
        attended, memory = attend(qkv, *reads, memory, layer)
        hidden = multiply_scatter(ring, attended, own.output, hidden)
        norm = self.post_attention_norm
        if isinstance(mlp, GatedMLP):
            inner = gather_multiply(ring, hidden, norm, (mlp.gate, mlp.up), mlp.gated)
            return multiply_scatter(ring, inner, mlp.down, hidden), memory, None
        # An expert multiplies only some of the tokens, so hidden states are exchanged whole.
        whole = concatenate_over(TENSOR_AXIS, hidden, axis=1)
        own_part, _, experts = mlp.own_part(whole, norm, is_token, copies)
        return hidden + scatter_sum(own_part), memory, experts


def _normalised(x: jax.Array, norm: RMSNorm | None) -> jax.Array:
    return x if norm is None else norm(x)
