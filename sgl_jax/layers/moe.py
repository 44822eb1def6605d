"""Mixture of experts: a router chooses a few feed-forward layers for each token.

The experts' inner width is split over the tensor axis, so each chip holds a slice of every expert
and all chips have the same work whatever the router chooses. That width is the last axis but one of
all three weights: a slice of it is often no multiple of the 128 lanes that a row of a TPU's memory
has, and arrays whose last axis is none are copied on their way into a kernel (docs/kernels.md).
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from sgl_jax.kernels.grouped_matmul.interface import GroupedMatmul
from sgl_jax.layers.layer_weights import project, use_stack
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
        multiply: GroupedMatmul,
    ) -> None:
        self.router = parameter((hidden_size, num_experts), dtype)
        shape = (num_experts, intermediate_size, hidden_size)
        self.gate = parameter(shape, dtype, None, TENSOR_AXIS)  # [experts, out, in]
        self.up = parameter(shape, dtype, None, TENSOR_AXIS)  # [experts, out, in]
        self.down = parameter(shape, dtype, None, TENSOR_AXIS)  # [experts, in, out]
        self.multiply = multiply
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
        gate = self._project(lines, self.gate, group_sizes, transposed=True)
        up = self._project(lines, self.up, group_sizes, transposed=True)
        out = self._project(jax.nn.silu(gate) * up, self.down, group_sizes, transposed=False)
        out = out[jnp.argsort(order)].reshape(num_tokens, self.top_k, hidden_size)
        partial_sum = jnp.einsum("tkh,tk->th", out, weights.astype(x.dtype))
        return sum_over_tensor(partial_sum)

    def _route(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Weights float32 [T, top_k] and ids int32 [T, top_k] of each token's experts."""
        logits = project(x, self.router).astype(jnp.float32)
        weights, experts = lax.top_k(jax.nn.softmax(logits, axis=-1), self.top_k)
        if self.norm_topk_prob:
            weights = weights / weights.sum(axis=-1, keepdims=True)
        return weights, experts

    def _project(
        self, lines: jax.Array, weight: nnx.Param[Any], group_sizes: jax.Array, *, transposed: bool
    ) -> jax.Array:
        """lines [n, in], grouped by expert, times each expert's matrix -> [n, out]."""

        def multiply(matrices: jax.Array, layer: jax.Array) -> jax.Array:
            return self.multiply(lines, matrices, layer, group_sizes, transposed=transposed)

        return use_stack(weight, multiply)
