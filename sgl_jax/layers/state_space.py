"""Mamba-2: a layer with a state space model instead of attention (arXiv 2405.21060).

Adjacent heads form groups with the same keys (B) and queries (C). The tensor axis splits the layer
by groups, or by the heads of a group, whose keys and queries are then on several chips. The
channels of the convolution and of its state are ordered by a chip's groups: values, keys, queries.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from sgl_jax.core.layer_configs import StateSpaceConfig
from sgl_jax.kernels.gated_delta.batch import DeltaInputs, StateBatch
from sgl_jax.kernels.row_blocks import row_wise
from sgl_jax.kernels.state_space.api import StateSpace
from sgl_jax.layers.gated_delta_net import DepthwiseConv
from sgl_jax.layers.linear import Linear
from sgl_jax.layers.mesh_axes import TENSOR_AXIS, concatenate_over
from sgl_jax.layers.parameter import parameter
from sgl_jax.layers.sources import Source
from sgl_jax.mem_cache.device_pool import LayerStates


class GroupedNorm(nnx.Module):
    """x / rms(x) * weight over each of `num_groups` groups of adjacent values on all chips."""

    def __init__(self, weight: Source, eps: float, dtype: DTypeLike, num_groups: int) -> None:
        self.weight = parameter(weight, dtype, TENSOR_AXIS, initial="ones")
        self.eps = eps
        self.num_groups = num_groups

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalise this chip's values x, float32 [T, size]."""
        chips = lax.axis_size(TENSOR_AXIS)
        parts = max(chips // self.num_groups, 1)  # chips that share a group
        own = x.reshape(len(x), max(self.num_groups // chips, 1), -1)
        total = row_wise(lambda x: jnp.sum(x * x, axis=-1), own)
        if parts > 1:
            of_chips = concatenate_over(TENSOR_AXIS, total, axis=1)
            first = lax.axis_index(TENSOR_AXIS) // parts * parts
            total = jnp.sum(lax.dynamic_slice_in_dim(of_chips, first, parts, 1), 1, keepdims=True)

        def scaled(own: jax.Array, total: jax.Array) -> jax.Array:
            unit = own * lax.rsqrt(total / (own.shape[-1] * parts) + self.eps)[..., None]
            return unit.reshape(len(own), -1) * self.weight[...]

        result: jax.Array = row_wise(scaled, own, total)
        return result


class Mamba2(nnx.Module):
    """Projections, a short convolution, the recurrence, a gate, and a norm by groups."""

    def __init__(
        self,
        inputs: Linear,
        gate: Linear,
        steps: Linear,
        conv: DepthwiseConv,
        a_log: Source,
        dt_bias: Source,
        skip: Source,
        norm: GroupedNorm,
        output: Linear,
        *,
        sizes: StateSpaceConfig,
        recur: StateSpace,
    ) -> None:
        """Declare the layer.

        Args:
            inputs: [hidden, channels], split by its outputs: for each group or part of it the
                values of its heads, its keys and its queries.
            gate: [hidden, heads * head_dim], split by its outputs.
            steps: [hidden, heads], split by its outputs: a token's step for each head (dt).
            conv: convolution of the result of `inputs`.
            a_log, dt_bias: [heads].
            skip: [heads], the factor of a head's values in its output (D).
            norm: norm of the gated outputs of all heads.
            output: [heads * head_dim, hidden], split by its inputs.
            sizes: sizes over all chips.
            recur: the kernel.
        """
        self.inputs = inputs
        self.gate = gate
        self.steps = steps
        self.conv = conv
        self.a_log = parameter(a_log, jnp.float32, TENSOR_AXIS)
        self.dt_bias = parameter(dt_bias, jnp.float32, TENSOR_AXIS)
        self.skip = parameter(skip, jnp.float32, TENSOR_AXIS)
        self.norm = norm
        self.output = output
        self.sizes = sizes
        self.recur = recur

    def __call__(
        self, x: jax.Array, batch: StateBatch, states: LayerStates, layer: jax.Array
    ) -> tuple[jax.Array, LayerStates]:
        """Map x [T, hidden] to (result [T, hidden], new states); `layer` indexes `states`."""
        own, num_tokens = self.sizes, len(x)
        mixed, conv_states = self.conv(self.inputs(x), states.conv, layer, batch)
        by_group = mixed.reshape(num_tokens, own.chip_groups(lax.axis_size(TENSOR_AXIS)), -1)
        num_values = by_group.shape[-1] - 2 * own.state_dim
        values, k, q = jnp.split(by_group, (num_values, num_values + own.state_dim), axis=-1)
        values = values.reshape(num_tokens, -1, own.packed_heads * own.head_dim)
        # After the barrier, what follows cannot reach the product, see `layers.qkv_heads`.
        raw_steps = lax.optimization_barrier(self.steps(x)).astype(jnp.float32)
        tokens = DeltaInputs(q, k, values, *row_wise(self._rates, raw_steps))
        found, recurrent_states = self.recur(tokens, states.recurrent, layer, batch)
        skip = jnp.repeat(self.skip[...], own.head_dim).reshape(values.shape[1:])
        found = (found.astype(jnp.float32) + skip * values).reshape(num_tokens, -1)
        gated = found * jax.nn.silu(self.gate(x).astype(jnp.float32))
        out = self.output(self.norm(gated).astype(x.dtype))
        return out, LayerStates(conv_states, recurrent_states)

    def _rates(self, raw_steps: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return log decay and beta of `DeltaInputs` for tokens' steps before softplus."""
        steps = jax.nn.softplus(raw_steps + self.dt_bias[...])
        steps = jnp.clip(steps, self.sizes.min_step, self.sizes.max_step)
        return (-jnp.exp(self.a_log[...]) * steps)[..., None], steps
