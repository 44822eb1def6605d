"""One layer of a decoder: attention or a recurrence, and a feed-forward layer, or one of them.

Hidden states are replicated on the chips of a rank, or sequence-parallel: each chip has a share of
the tokens. Then a product's sum is a reduce-scatter, norms and additions are computed for that
share only, and an all-gather precedes the next product (arXiv 2205.05198).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from sgl_jax.kernels.row_blocks import row_wise
from sgl_jax.layers.attention import Attention
from sgl_jax.layers.gated_delta_net import GatedDeltaNet
from sgl_jax.layers.latent_attention import LatentAttention
from sgl_jax.layers.linear import GatedMLP
from sgl_jax.layers.mesh_axes import join_shares
from sgl_jax.layers.moe import ExpertCopies, MixtureOfExperts, MLPWithExperts
from sgl_jax.layers.norm import RMSNorm
from sgl_jax.layers.per_layer_embedding import PerLayerGate
from sgl_jax.layers.state_space import Mamba2

Mixer = Attention | LatentAttention | GatedDeltaNet | Mamba2
FeedForward = GatedMLP | MixtureOfExperts | MLPWithExperts


class DecoderLayer(nnx.Module):
    """Attention or a recurrence, then a feed-forward layer, with pre-norms and residual sums.

    Some models normalise the terms of the sums as well, or instead.
    """

    def __init__(
        self,
        input_norm: RMSNorm | None,
        attention: Mixer | None,
        post_attention_norm: RMSNorm | None,
        mlp: FeedForward | None,
        *,
        attended_norm: RMSNorm | None = None,
        mlp_output_norm: RMSNorm | None = None,
        per_layer_gate: PerLayerGate | None = None,
        scale: nnx.Param[Any] | None = None,
        residual_scale: float = 1.0,
    ) -> None:
        """Declare the layer.

        Either part may be None, with its norm. `post_attention_norm` normalises the feed-forward
        layer's input, and experts need it; the other two normalise the outputs of attention and of
        the feed-forward layer, and `residual_scale` multiplies both. `per_layer_gate` adds a term
        of the layer's embedding; `scale`, [1], multiplies the result.
        """
        self.input_norm = input_norm
        self.attention = attention
        self.post_attention_norm = post_attention_norm
        self.mlp = mlp
        self.attended_norm = attended_norm
        self.mlp_output_norm = mlp_output_norm
        self.per_layer_gate = per_layer_gate
        self.scale = scale
        self.residual_scale = residual_scale

    def __call__(
        self,
        hidden: jax.Array,
        is_token: jax.Array,
        copies: ExpertCopies | None,
        reads: tuple[Any, ...],
        memory: Any,
        layer: jax.Array,
        vectors: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array, Any, jax.Array | None]:
        """Run the layer on hidden [T, hidden_size].

        Hidden states and results have this chip's share of the T tokens if they are
        sequence-parallel. Attention reads its tokens' rotations and an `AttentionBatch`, and its
        memory is a KV pool; a recurrence reads a `StateBatch`, and its memory is `LayerStates`; a
        layer without both reads nothing and leaves its memory alone.
        `is_token` is bool [T], False for padding. `layer` is the layer's index in the memory.
        `vectors` are [T, size], the tokens' embeddings of this layer, for `per_layer_gate`.

        Returns:
            Two terms with the new hidden state as their sum, the memory, and the experts of the
            tokens, int32 [top_k, T], or None.
        """
        if self.attention is not None:
            mix: Callable[..., tuple[jax.Array, Any]] = self.attention
            normed = self._whole(normalised(hidden, self.input_norm), is_token)
            attended, memory = mix(normed, *reads, memory, layer)
            attended = scaled(normalised(attended, self.attended_norm), self.residual_scale)
            if self.mlp is None:
                return hidden, attended, memory, None
            hidden = hidden + attended
        added, experts = self._fed_forward(hidden, is_token, copies)
        added = scaled(normalised(added, self.mlp_output_norm), self.residual_scale)
        if self.per_layer_gate is not None:
            assert vectors is not None
            hidden = hidden + added
            added = self.per_layer_gate(hidden, vectors)
        if self.scale is not None:
            scale = self.scale[...]
            hidden, added = hidden * scale, added * scale
        return hidden, added, memory, experts

    def _fed_forward(
        self, hidden: jax.Array, is_token: jax.Array, copies: ExpertCopies | None
    ) -> tuple[jax.Array, jax.Array | None]:
        mlp, norm = self.mlp, self.post_attention_norm
        assert mlp is not None
        if isinstance(mlp, GatedMLP):
            return mlp(self._whole(normalised(hidden, norm), is_token)), None
        assert norm is not None
        return mlp(self._whole(hidden, is_token), norm, is_token, copies)

    def _whole(self, x: jax.Array, is_token: jax.Array) -> jax.Array:
        return join_shares(x, len(is_token)) if self._scatters else x

    @property
    def _scatters(self) -> bool:
        """Return whether hidden states are shares of the tokens."""
        if self.attention is not None:
            return self.attention.output.scatters
        if isinstance(self.mlp, GatedMLP):
            return self.mlp.down.scatters
        assert isinstance(self.mlp, MixtureOfExperts)
        return self.mlp.scatters


def scaled(x: jax.Array, factor: float) -> jax.Array:
    """Return x times a factor that is not rounded to x's dtype."""
    if factor == 1.0:
        return x

    def product(x: jax.Array) -> jax.Array:
        return (x.astype(jnp.float32) * factor).astype(x.dtype)

    # Row-wise: a product and a sum in one instruction are not rounded in between.
    result: jax.Array = row_wise(product, x)
    return result


def normalised(x: jax.Array, norm: RMSNorm | None) -> jax.Array:
    """Return x normalised, or x if there is no norm."""
    return x if norm is None else norm(x)
