"""The gated delta net: a layer with a recurrence instead of attention (arXiv 2412.06464).

Each key head has a group of adjacent value heads, and each value head a state. The tensor axis
splits the layer by key heads. So the results of projections are ordered by key head, and so are the
channels of the convolution and of its state.

A state decays as a whole, or each of its key's channels does (arXiv 2510.26692).
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from sgl_jax.kernels.gated_delta.api import CausalConv, GatedDelta
from sgl_jax.kernels.gated_delta.batch import DeltaInputs, StateBatch
from sgl_jax.kernels.row_blocks import row_wise
from sgl_jax.layers.layer_weights import use_weight
from sgl_jax.layers.linear import Linear
from sgl_jax.layers.mesh_axes import TENSOR_AXIS
from sgl_jax.layers.norm import RMSNorm
from sgl_jax.layers.parameter import parameter
from sgl_jax.layers.sources import Source
from sgl_jax.mem_cache.device_pool import LayerStates


class DepthwiseConv(nnx.Module):
    """A causal convolution of each channel, then silu."""

    def __init__(
        self,
        weight: Source,
        dtype: DTypeLike,
        convolve: CausalConv,
        bias: Source | None = None,
    ) -> None:
        """Declare `weight` [1, K, channels] and `bias` [channels], split by channels."""
        self.weight = parameter(weight, dtype, None, None, TENSOR_AXIS)
        self.bias = None if bias is None else parameter(bias, dtype, TENSOR_AXIS)
        self.convolve = convolve

    def __call__(
        self, u: jax.Array, states: jax.Array, layer: jax.Array, batch: StateBatch
    ) -> tuple[jax.Array, jax.Array]:
        """Map u [T, channels] to (result [T, channels], states); see `CausalConv`."""
        weight = use_weight(self.weight, lambda own: own[0])
        bias = None if self.bias is None else self.bias[...]
        return self.convolve(u, weight, states, layer, batch, bias)


class ChannelGates(nnx.Module):
    """Forget rates of each channel, from a hidden state compressed for them and the output gate."""

    def __init__(self, down: Linear, forget: Linear) -> None:
        """Declare the rates.

        `down` is [hidden, 2 * rank]: for the forget rates, then for the output gate; `forget` is
        [rank, value_heads * key_dim], split by its outputs.
        """
        self.down = down
        self.forget = forget

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Map x [T, hidden] to the output gate's inputs [T, rank], and forget rates, float32."""
        inputs, gated = jnp.split(self.down(x), 2, axis=1)
        forget = lax.optimization_barrier(self.forget(inputs))
        return gated, forget.astype(jnp.float32)


class GatedDeltaNet(nnx.Module):
    """Projections, a short convolution, the recurrence, and a gated norm of its result."""

    def __init__(
        self,
        qkv: Linear,
        output_gate: Linear,
        gates: Linear,
        conv: DepthwiseConv,
        a_log: Source,
        dt_bias: Source,
        norm: RMSNorm,
        output: Linear,
        *,
        key_dim: int,
        value_dim: int,
        group: int,
        recur: GatedDelta,
        channel_gates: ChannelGates | None = None,
    ) -> None:
        """Declare the layer.

        Args:
            qkv: [hidden, key_heads * (2 * key_dim + group * value_dim)], split by its outputs: for
                each key head its query, its key, and the values of its value heads.
            output_gate: [hidden, value_heads * value_dim], split by its outputs.
            gates: [hidden, key_heads * 2 * group], split by its outputs: the write rates of each
                key head's value heads, then their forget rates; without these if there are
                `channel_gates`.
            conv: convolution of the result of `qkv`.
            a_log, dt_bias: [value_heads]; with `channel_gates`, dt_bias is [value_heads * key_dim].
            norm: norm of a value head's output, [value_dim].
            output: [value_heads * value_dim, hidden], split by its inputs.
            key_dim, value_dim: dimensions of a head.
            group: number of value heads per key head.
            recur: the kernel.
            channel_gates: forget rates by channel. Then `output_gate` maps their compressed hidden
                state, and a sigmoid replaces its silu.
        """
        self.qkv = qkv
        self.output_gate = output_gate
        self.gates = gates
        self.conv = conv
        self.a_log = parameter(a_log, jnp.float32, TENSOR_AXIS)
        self.dt_bias = parameter(dt_bias, jnp.float32, TENSOR_AXIS)
        self.norm = norm
        self.output = output
        self.key_dim = key_dim
        self.value_dim = value_dim
        self.group = group
        self.recur = recur
        self.channel_gates = channel_gates

    def __call__(
        self, x: jax.Array, batch: StateBatch, states: LayerStates, layer: jax.Array
    ) -> tuple[jax.Array, LayerStates]:
        """Map x [T, hidden] to (result [T, hidden], new states); `layer` indexes `states`."""
        mixed, conv_states = self.conv(self.qkv(x), states.conv, layer, batch)
        num_tokens, ends = len(x), (self.key_dim, 2 * self.key_dim)
        by_head = mixed.reshape(num_tokens, -1, 2 * self.key_dim + self.group * self.value_dim)
        q, k, v = jnp.split(by_head, ends, axis=-1)
        v = v.reshape(num_tokens, -1, self.value_dim)
        gated, forget = (x, None) if self.channel_gates is None else self.channel_gates(x)
        tokens = DeltaInputs(q, k, v, *self._rates(x, forget))
        found, recurrent_states = self.recur(tokens, states.recurrent, layer, batch)
        normed = self.norm(found).reshape(x.shape[0], -1)
        gate = self.output_gate(gated).astype(jnp.float32)
        gate = jax.nn.silu(gate) if forget is None else jax.nn.sigmoid(gate)
        out = self.output((normed * gate).astype(x.dtype))
        return out, LayerStates(conv_states, recurrent_states)

    def _rates(self, x: jax.Array, forget: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """Return log decay and beta of `DeltaInputs`; `forget` are the rates by channel, if any."""
        # After the barrier, the split into heads cannot reach the product, see `layers.qkv_heads`.
        write = lax.optimization_barrier(self.gates(x)).astype(jnp.float32)
        if forget is None:
            by_head = write.reshape(x.shape[0], -1, 2, self.group)
            write, forget = (by_head[:, :, kind].reshape(x.shape[0], -1) for kind in range(2))

        def rates(write: jax.Array, forget: jax.Array) -> tuple[jax.Array, jax.Array]:
            speed = jnp.exp(self.a_log[...])[:, None]
            by_head = (forget + self.dt_bias[...]).reshape(len(write), len(speed), -1)
            return -speed * jax.nn.softplus(by_head), jax.nn.sigmoid(write)

        found: tuple[jax.Array, jax.Array] = row_wise(rates, write, forget)
        return found
