"""Mixture of experts: a router chooses a few feed-forward layers for each token.

The experts' inner width is split over the tensor axis, so each chip holds a slice of every expert
and all chips have the same work whatever the router chooses.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from sgl_jax.kernels.grouped_matmul.interface import grouped_matmul
from sgl_jax.layers.layer_weights import project, use_weight
from sgl_jax.layers.mesh_axes import TENSOR_AXIS, sum_over_tensor
from sgl_jax.layers.parameter import parameter


class MixtureOfExperts(nnx.Module):
    """The weighted sum of each token's `top_k` most probable experts."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        top_k: int,
        *,
        norm_topk_prob: bool,
        dtype: DTypeLike,
    ) -> None:
        self.router = parameter((hidden_size, num_experts), dtype)
        inwards = (num_experts, hidden_size, intermediate_size)
        outwards = (num_experts, intermediate_size, hidden_size)
        self.gate = parameter(inwards, dtype, None, None, TENSOR_AXIS)
        self.up = parameter(inwards, dtype, None, None, TENSOR_AXIS)
        self.down = parameter(outwards, dtype, None, TENSOR_AXIS)
        self.num_experts = num_experts
        self.top_k = top_k
        self.norm_topk_prob = norm_topk_prob

    def __call__(self, x: jax.Array) -> jax.Array:
        """x and the result: [T, hidden]."""
        num_tokens, hidden_size = x.shape
        weights, experts = self._route(x)
        # One line per (token, expert), sorted by expert: the products are then grouped.
        order = jnp.argsort(experts.reshape(-1))
        group_sizes = jnp.bincount(experts.reshape(-1), length=self.num_experts).astype(jnp.int32)
        lines = x[order // self.top_k]
        gate = _project_groups(lines, self.gate, group_sizes)
        inner = jax.nn.silu(gate) * _project_groups(lines, self.up, group_sizes)
        out = _project_groups(inner, self.down, group_sizes)
        out = jnp.zeros_like(out).at[order].set(out, unique_indices=True)
        out = out.reshape(num_tokens, self.top_k, hidden_size)
        partial_sum = jnp.einsum("tkh,tk->th", out, weights.astype(x.dtype))
        return sum_over_tensor(partial_sum)

    def _route(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Weights float32 [T, top_k] and ids int32 [T, top_k] of each token's experts."""
        logits = project(x, self.router).astype(jnp.float32)
        weights, experts = lax.top_k(jax.nn.softmax(logits, axis=-1), self.top_k)
        if self.norm_topk_prob:
            weights = weights / weights.sum(axis=-1, keepdims=True)
        return weights, experts


def _project_groups(lines: jax.Array, weight: nnx.Param[Any], group_sizes: jax.Array) -> jax.Array:
    """lines [n, in], grouped by expert, times weight [experts, in, out] -> [n, out]."""
    return use_weight(weight, lambda matrices: grouped_matmul(lines, matrices, group_sizes))
