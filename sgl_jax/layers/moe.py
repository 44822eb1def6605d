"""Mixture of experts: a router chooses a few feed-forward layers for each token.

The experts' inner width is split over the tensor axis, so each chip holds a slice of every expert
and all chips have the same work for any choice of the router; or, with `--ep-size`, each chip holds
some experts whole (`BuildOptions.expert_axes`). The inner width is the last axis but one
of all three weights: a slice of it is often no multiple of the 128 lanes of a row of a TPU's
memory, and arrays whose last axis is none are copied on their way into a kernel
(docs/inside/kernels.md).
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from sgl_jax.kernels.expert_lines.interface import XLA_MOVES, LineMoves
from sgl_jax.kernels.expert_lines.lines import (
    ExpertLines,
    Gated,
    in_parts,
    lines_at_once,
    sort_lines,
)
from sgl_jax.layers.linear import ExpertLinear, Linear
from sgl_jax.layers.mesh_axes import (
    DATA_AXIS,
    MESH_AXES,
    concatenate_over,
    own_rank_sum,
    sum_over_tensor,
)
from sgl_jax.layers.mlp import GatedMLP


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
        moves: LineMoves = XLA_MOVES,
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
        self.moves = moves
        self.gated = gated
        self.shared = shared

    def __call__(self, x: jax.Array, is_token: jax.Array) -> jax.Array:
        """x and the result: [T, hidden]. Padding, where `is_token` bool [T] is false, has no
        experts: it would load few of them."""
        weights, experts = self._route(x)
        experts = jnp.where(is_token, experts, self.num_experts)
        own_part = self._own_experts(x, weights, experts)
        if self.shared is not None:
            own_part = own_part + self.shared.own_part(x)
        total = sum_over_tensor(own_part)
        if self.down.bias is None:
            return total
        is_chosen = experts[:, None] == jnp.arange(self.num_experts)[:, None]
        shares = jnp.sum(jnp.where(is_chosen, weights[:, None], 0), axis=0)
        return total + self.down.biases(shares.T)

    def _own_experts(self, x: jax.Array, weights: jax.Array, experts: jax.Array) -> jax.Array:
        """The sum of this chip's experts' results, or of its slices of all: [T, hidden].

        `weights` and `experts` are [top_k, T]. If experts are dealt out over ranks, each chip gets
        all ranks' tokens, and each rank gets the sums of its own. A token is sent once to each
        rank, and not once for each of its experts: up to about top_k chips that is no more bytes,
        and needs no more room for one choice of the router than for another.
        """
        axes = self.gate.expert_axes
        if axes is None:
            return self._sums(x, weights, sort_lines(experts, self.num_experts))
        over_ranks = axes == MESH_AXES
        if over_ranks:
            x = concatenate_over(DATA_AXIS, x)
            weights, experts = (concatenate_over(DATA_AXIS, a, axis=1) for a in (weights, experts))
        num_own = -(-self.num_experts // lax.axis_size(axes))
        own = experts - lax.axis_index(axes) * num_own
        is_own = (own >= 0) & (own < num_own)
        sums = self._sums(x, weights, sort_lines(jnp.where(is_own, own, num_own), num_own))
        return own_rank_sum(sums) if over_ranks else sums

    def _sums(self, x: jax.Array, weights: jax.Array, lines: ExpertLines) -> jax.Array:
        """Each token's lines' results times their weights, added: [T, hidden] as x."""
        hidden_size = x.shape[1]
        padded = jnp.pad(x, ((0, 0), (0, self.gate.row_size - hidden_size)))

        def sums(part: ExpertLines) -> jax.Array:
            inner = self._inner(self.moves.gather(padded, part), part)
            out = self.down(inner, part.group_sizes)
            return self.moves.add(out, weights, part)[:, :hidden_size]

        axes = self.gate.expert_axes
        num_chips = 1 if axes is None else lax.axis_size(axes)
        size = lines_at_once(len(x), self.top_k, num_chips)
        return in_parts(lines, size, sums, jax.ShapeDtypeStruct(x.shape, x.dtype))

    def _inner(self, x: jax.Array, lines: ExpertLines) -> jax.Array:
        """Inputs [n, width] of the experts' last product for lines x [n, hidden]."""
        sizes = lines.group_sizes
        gate, up = self.gate(x, sizes), self.up(x, sizes)
        if self.gate.bias is not None:
            stops = jnp.cumsum(sizes)
            line = jnp.arange(len(x))[:, None]
            is_of = (line >= stops - sizes) & (line < stops)
            gate, up = gate + self.gate.biases(is_of), up + self.up.biases(is_of)
        return self.moves.gate(self.gated, gate, up, lines)

    def _route(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Weights float32 [top_k, T] and ids int32 [top_k, T] of each token's experts."""
        logits = self.router(x).astype(jnp.float32)
        if self.norm_topk_prob:  # the other experts' part of the softmax cancels
            chosen, experts = lax.top_k(logits, self.top_k)
            return jax.nn.softmax(chosen.T, axis=0), experts.T
        weights, experts = lax.top_k(jax.nn.softmax(logits, axis=-1), self.top_k)
        return weights.T, experts.T
