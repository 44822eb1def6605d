"""Mixture of experts: a router chooses a few feed-forward layers for each token.

The experts' inner width is split over the tensor axis, so each chip holds a slice of every expert
and all chips have the same work for any choice of the router. That width is the last axis but one
of all three weights: a slice of it is often no multiple of the 128 lanes of a row of a TPU's
memory, and arrays whose last axis is none are copied on their way into a kernel (docs/kernels.md).
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from sgl_jax.layers.linear import ExpertLinear, Linear
from sgl_jax.layers.mesh_axes import sum_over_tensor


class MixtureOfExperts(nnx.Module):
    """The weighted sum of each token's `top_k` most probable experts."""

    def __init__(
        self,
        router: Linear,
        gate: ExpertLinear,
        up: ExpertLinear,
        down: ExpertLinear,
        *,
        num_experts: int,
        top_k: int,
        norm_topk_prob: bool,
    ) -> None:
        """`router` is [hidden, experts]; `gate` and `up` are transposed, `down` is not."""
        self.router = router
        self.gate = gate
        self.up = up
        self.down = down
        self.num_experts = num_experts
        self.top_k = top_k
        self.norm_topk_prob = norm_topk_prob

    def __call__(self, x: jax.Array) -> jax.Array:
        """x and the result: [T, hidden]."""
        num_tokens, hidden_size = x.shape
        weights, experts = self._route(x)
        chosen = experts.reshape(-1)
        # One line per (token, expert), sorted by expert: the products are then grouped.
        order = jnp.argsort(chosen)
        group_sizes = jnp.sum(chosen[:, None] == jnp.arange(self.num_experts), 0, dtype=jnp.int32)
        lines = x[order // self.top_k]
        inner = jax.nn.silu(self.gate(lines, group_sizes)) * self.up(lines, group_sizes)
        out = self.down(inner, group_sizes)
        out = out[jnp.argsort(order)].reshape(num_tokens, self.top_k, hidden_size)
        partial_sum = jnp.einsum("tkh,tk->th", out, weights.astype(x.dtype))
        return sum_over_tensor(partial_sum)

    def _route(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Weights float32 [T, top_k] and ids int32 [T, top_k] of each token's experts."""
        logits = self.router(x).astype(jnp.float32)
        weights, experts = lax.top_k(jax.nn.softmax(logits, axis=-1), self.top_k)
        if self.norm_topk_prob:
            weights = weights / weights.sum(axis=-1, keepdims=True)
        return weights, experts
