"""Mixture of experts: a router chooses a few feed-forward layers for each token.

The experts' inner width is split over the tensor axis, so each chip holds a slice of every expert
and all chips have the same work for any choice of the router. That width is the last axis but one
of all three weights: a slice of it is often no multiple of the 128 lanes of a row of a TPU's
memory, and arrays whose last axis is none are copied on their way into a kernel
(docs/inside/kernels.md).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from sgl_jax.layers.linear import ExpertLinear, Linear
from sgl_jax.layers.mesh_axes import sum_over_tensor
from sgl_jax.layers.mlp import GatedMLP

# The inner values of a gate's and an up's results.
Gated = Callable[[jax.Array, jax.Array], jax.Array]


def silu_gated(gate: jax.Array, up: jax.Array) -> jax.Array:
    """silu(gate) * up (arXiv 2002.05202)."""
    return jax.nn.silu(gate) * up


def clamped_swiglu(gate: jax.Array, up: jax.Array, *, limit: float, alpha: float) -> jax.Array:
    """gpt-oss's gate * sigmoid(alpha * gate) * (up + 1), with gate and up clamped to `limit`."""
    gate = jnp.minimum(gate, limit)
    return gate * jax.nn.sigmoid(alpha * gate) * (jnp.clip(up, -limit, limit) + 1)


class SharedExpert(nnx.Module):
    """An expert that serves every token, by a weight of its own for each."""

    def __init__(self, expert: GatedMLP, gate: Linear) -> None:
        """`gate` is [hidden, 1]."""
        self.expert = expert
        self.gate = gate

    def own_part(self, x: jax.Array) -> jax.Array:
        """This chip's part of the expert's result, [T, hidden] as x."""
        return jax.nn.sigmoid(self.gate(x)) * self.expert.own_part(x)


class MixtureOfExperts(nnx.Module):
    """The weighted sum of each token's `top_k` most probable experts, and of a shared one if there
    is one."""

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
        gated: Gated = silu_gated,
        shared: SharedExpert | None = None,
    ) -> None:
        """`router` is [hidden, experts]; `gate` and `up` are transposed, `down` is not. Either all
        three have biases or none. Their rows may be longer than hidden, by zeros."""
        self.router = router
        self.gate = gate
        self.up = up
        self.down = down
        self.num_experts = num_experts
        self.top_k = top_k
        self.norm_topk_prob = norm_topk_prob
        self.gated = gated
        self.shared = shared

    def __call__(self, x: jax.Array) -> jax.Array:
        """x and the result: [T, hidden]."""
        num_tokens, hidden_size = x.shape
        weights, experts = self._route(x)
        chosen = experts.reshape(-1)
        # One line per (token, expert), sorted by expert: the products are then grouped.
        order = jnp.argsort(chosen)
        group_sizes = jnp.sum(chosen[:, None] == jnp.arange(self.num_experts), 0, dtype=jnp.int32)
        padded = jnp.pad(x, ((0, 0), (0, self.gate.row_size - hidden_size)))
        inner = self._inner(padded[order // self.top_k], group_sizes)
        out = self.down(inner, group_sizes)
        out = out[jnp.argsort(order)].reshape(num_tokens, self.top_k, -1)
        partial_sum = jnp.einsum("tkh,tk->th", out, weights.astype(x.dtype))
        own_part = partial_sum[:, :hidden_size]
        if self.shared is not None:
            own_part = own_part + self.shared.own_part(x)
        total = sum_over_tensor(own_part)
        if self.down.bias is None:
            return total
        is_chosen = experts[:, :, None] == jnp.arange(self.num_experts)
        shares = jnp.sum(jnp.where(is_chosen, weights[:, :, None], 0), axis=1)
        return total + self.down.biases(shares)

    def _inner(self, lines: jax.Array, group_sizes: jax.Array) -> jax.Array:
        """Inputs [n, width] of the experts' last product for lines [n, hidden], by expert."""
        gate, up = self.gate(lines, group_sizes), self.up(lines, group_sizes)
        if self.gate.bias is None:
            return self.gated(gate, up)
        stops = jnp.cumsum(group_sizes)
        line = jnp.arange(len(lines))[:, None]
        is_of = (line >= stops - group_sizes) & (line < stops)
        return self.gated(gate + self.gate.biases(is_of), up + self.up.biases(is_of))

    def _route(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Weights float32 [T, top_k] and ids int32 [T, top_k] of each token's experts."""
        logits = self.router(x).astype(jnp.float32)
        weights, experts = lax.top_k(jax.nn.softmax(logits, axis=-1), self.top_k)
        if self.norm_topk_prob:
            weights = weights / weights.sum(axis=-1, keepdims=True)
        return weights, experts
