"""Mixture of experts: a router chooses a few feed-forward layers for each token.

The experts' inner width is split over the tensor axis, so each chip holds a slice of every expert
and all chips have the same work for any choice of the router; or, with `--ep-size`, each chip holds
some whole experts (`BuildOptions.expert_axes`). The inner width is the last axis but one of all
three weights: a slice of it is often not a multiple of the 128 lanes of a row of a TPU's memory,
and arrays without such a last axis are copied on their way into a kernel (docs/inside/kernels.md).
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from numpy.typing import NDArray

from sgl_jax.core.layer_configs import ExpertChoice
from sgl_jax.kernels.expert_dispatch.interface import XLA_MOVES, DispatchKernels
from sgl_jax.kernels.expert_dispatch.lines import (
    ExpertDispatch,
    Gated,
    Router,
    in_parts,
    lines_at_once,
)
from sgl_jax.kernels.expert_dispatch.xla import add_part
from sgl_jax.layers.layer_weights import use_stacks
from sgl_jax.layers.linear import Activation, ExpertLinear, GatedMLP, Linear
from sgl_jax.layers.mesh_axes import (
    DATA_AXIS,
    MESH_AXES,
    concatenate_over,
    own_rank_sum,
    own_share,
    scatter_sum,
    sum_over_tensor,
)
from sgl_jax.layers.norm import RMSNorm
from sgl_jax.layers.parameter import parameter
from sgl_jax.layers.sources import Source


def silu_gated(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Return silu(gate) * up (arXiv 2002.05202)."""
    return jax.nn.silu(gate) * up


def gelu_gated(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Return gelu(gate) * up, with the tanh approximation of gelu."""
    return jax.nn.gelu(gate) * up


# Keys: names in config files.
GATED: Mapping[str, Gated] = MappingProxyType({"silu": silu_gated, "gelu_pytorch_tanh": gelu_gated})


def clamped_swiglu(gate: jax.Array, up: jax.Array, *, limit: float, alpha: float) -> jax.Array:
    """Return gpt-oss's gate * sigmoid(alpha * gate) * (up + 1), gate and up clamped to `limit`."""
    gate = jnp.minimum(gate, limit)
    return gate * jax.nn.sigmoid(alpha * gate) * (jnp.clip(up, -limit, limit) + 1)


_KEY_BITS = 16
_KEY_FACTOR = 40503  # for multiplicative hashing, by the golden ratio (Knuth, vol. 3, 6.4)


class ExpertCopies(NamedTuple):
    """The slots of one layer's experts and their copies, and each token's key to select a copy."""

    slots: jax.Array  # int32 [experts, copies], numbered over all chips; -1 after an expert's last
    keys: jax.Array  # int32 [T], see `copy_keys`
    num_slots: int

    @classmethod
    def of_layer(
        cls, slots: NDArray[np.int32] | None, layer: jax.Array, keys: jax.Array | None
    ) -> "ExpertCopies | None":
        """Select one layer of `slots` [layers, experts, copies]; None if experts are in order."""
        if slots is None or keys is None:
            return None
        return cls(jnp.asarray(slots)[layer], keys, int(slots.max()) + 1)

    def chosen(self, experts: jax.Array) -> jax.Array:
        """Return the slots, int32 [top_k, T], of each token's experts; `num_slots` for padding.

        By comparisons, since a TPU is slow at gathering single numbers.
        """
        num_copies = jnp.sum(self.slots >= 0, axis=1)
        copy = self.keys * num_copies[:, None] >> _KEY_BITS  # [experts, T]
        slot = jnp.zeros_like(copy)
        for number, own in enumerate(self.slots.T):
            slot = jnp.where(copy == number, own[:, None], slot)
        is_chosen = experts[:, None] == jnp.arange(len(self.slots))[:, None]
        chosen = jnp.sum(jnp.where(is_chosen, slot, 0), axis=1)
        slots: jax.Array = jnp.where(experts < len(self.slots), chosen, self.num_slots)
        return slots


def copy_keys(token_ids: jax.Array, positions: jax.Array) -> jax.Array:
    """Return numbers in [0, 2**16) that spread tokens over copies of experts, int32 [T].

    Both inputs are int32 [T]. Chips sum their parts of a token's result, so another copy may round
    it differently. A key depends only on the token and its position: if a token is computed again,
    its result has the same bits.
    """
    keys: jax.Array = (token_ids + positions) * _KEY_FACTOR & (2**_KEY_BITS - 1)
    return keys


def count_experts(chosen: Sequence[jax.Array | None], num_experts: int | None) -> jax.Array | None:
    """Count how many tokens chose each expert: int32 [layers, experts].

    `chosen` has each layer's result of `MixtureOfExperts`, None for a dense layer, which gets
    zeros. If `num_experts` is None, experts are not counted.
    """
    if num_experts is None:
        return None
    numbers = jnp.arange(num_experts, dtype=jnp.int32)
    counts = [
        jnp.zeros_like(numbers) if own is None else jnp.sum(own == numbers[:, None, None], (1, 2))
        for own in chosen
    ]
    return jnp.stack(counts).astype(jnp.int32)


def stack_experts(
    chosen: Sequence[jax.Array | None], top_k: int | None, num_tokens: int
) -> jax.Array | None:
    """Stack each layer's experts of `chosen`, as in `count_experts`: int16 [layers, top_k, T]. If
    `top_k` is None, they are not reported."""
    if top_k is None:
        return None
    none = jnp.zeros((top_k, num_tokens), jnp.int16)
    return jnp.stack([none if own is None else own.astype(jnp.int16) for own in chosen])


def join_layers(parts: Sequence[jax.Array | None]) -> jax.Array | None:
    """Join parts [iterations, layers of an iteration, ...] in order to [layers, ...]."""
    own = [part.reshape(-1, *part.shape[2:]) for part in parts if part is not None]
    return jnp.concatenate(own) if own else None


class SharedExpert(nnx.Module):
    """An expert that serves every token, weighted by a gate in some models."""

    def __init__(self, expert: GatedMLP, gate: Linear | None) -> None:
        """Declare the expert; `gate` is [hidden, 1]."""
        self.expert = expert
        self.gate = gate

    def own_part(self, x: jax.Array) -> jax.Array:
        """Return this chip's part of the expert's result, [T, hidden] for x [T, hidden]."""
        own = self.expert.own_part(x)
        return own if self.gate is None else jax.nn.sigmoid(self.gate(x)) * own


class MixtureOfExperts(nnx.Module):
    """The weighted sum of each token's `top_k` best experts, and of a shared expert if any."""

    def __init__(
        self,
        router: Linear,
        gate: ExpertLinear | None,
        up: ExpertLinear,
        down: ExpertLinear,
        *,
        num_experts: int,
        choice: ExpertChoice,
        choice_bias: Source | None = None,
        moves: DispatchKernels = XLA_MOVES,
        gated: Gated = silu_gated,
        activation: Activation = jax.nn.silu,
        shared: SharedExpert | None = None,
        scatters: bool = False,
        weighs_inputs: bool = False,
        input_norm: RMSNorm | None = None,
        router_scale: float = 1.0,
        expert_scales: Source | None = None,
    ) -> None:
        """Declare the layer.

        `router` is [hidden, experts]; `gate` and `up` are transposed, `down` is not. Either all
        three have biases or none; without `gate`, `activation` is in place of `gated`. Their rows
        may be padded from hidden with zeros. `choice_bias`, [experts], is added to the router's
        scores only for the choice. `scatters`: each chip gets its share of the tokens' sums.
        `weighs_inputs`: weights multiply experts' inputs, not their results. `input_norm`
        normalises experts' inputs if they have another norm than the router. `router_scale`
        multiplies the router's inputs, `expert_scales`, [experts], its weights.
        """
        self.router = router
        self.gate = gate
        self.up = up
        self.down = down
        self.num_experts = num_experts
        self.choice = choice
        self.choice_bias = None if choice_bias is None else parameter(choice_bias, jnp.float32)
        self.moves = moves
        self.gated = gated
        self.activation = activation
        self.shared = shared
        self.scatters = scatters
        self.weighs_inputs = weighs_inputs
        self.input_norm = input_norm
        self.router_scale = router_scale
        self.expert_scales = (
            None if expert_scales is None else parameter(expert_scales, jnp.float32, initial="ones")
        )

    def __call__(
        self,
        x: jax.Array,
        norm: RMSNorm,
        is_token: jax.Array,
        copies: ExpertCopies | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Map x [T, hidden] to (the sums [T, hidden], the tokens' experts, int32 [top_k, T]).

        The sums are of this chip's share of the tokens (`own_share`) if it `scatters`.
        `norm` normalises the inputs of router and experts, or only the router's. Padding, where
        `is_token` bool [T] is False, gets the number `num_experts` instead of experts, so that none
        are loaded for it.
        `copies` are the slots of the experts; None if they are in order.
        """
        normed, weights, experts = self._choose(x, norm, is_token)
        x = normed if self.input_norm is None else self.input_norm(x)
        own_part = self._own_experts(x, weights, experts, copies)
        if self.shared is not None:
            own_part = own_part + self.shared.own_part(x)
        total = scatter_sum(own_part) if self.scatters else sum_over_tensor(own_part)
        if self.down.bias is None:
            return total, experts
        is_chosen = experts[:, None] == jnp.arange(self.num_experts)[:, None]
        shares = jnp.sum(jnp.where(is_chosen, weights[:, None], 0), axis=0).T
        own_shares = own_share(shares) if self.scatters else shares
        return total + self.down.biases(own_shares), experts

    def _choose(
        self, x: jax.Array, norm: RMSNorm, is_token: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return the normalised x [T, hidden], and the tokens' weights and experts [top_k, T]."""
        router, biases = self.router.weight, (self.router.bias, self.choice_bias)
        assert isinstance(router, nnx.Param)

        def choose(matrices: jax.Array, layer: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
            constants = self.choice, norm.eps, norm.from_one
            arrays = [None if bias is None else bias[...] for bias in biases]
            factors = norm.weight[...] * self.router_scale
            own = Router(*constants, factors, matrices, *arrays)
            return self.moves.choose(x, own, layer, is_token)

        normed, weights, experts = use_stacks((router,), choose)
        if self.expert_scales is not None:  # by comparisons, as in `ExpertCopies.chosen`
            is_chosen = experts[:, None] == jnp.arange(self.num_experts)[:, None]
            weights *= jnp.sum(jnp.where(is_chosen, self.expert_scales[...][:, None], 0), axis=1)
        return normed, weights, experts

    def _own_experts(
        self, x: jax.Array, weights: jax.Array, experts: jax.Array, copies: ExpertCopies | None
    ) -> jax.Array:
        """Sum the results of this chip's experts, or of its slices of all experts: [T, hidden].

        `weights` and `experts` are [top_k, T]. If experts are distributed over ranks, each chip
        gets all ranks' tokens, and each rank gets the sums of its tokens. A token is sent once to
        each rank, not once for each of its experts: up to about top_k chips, this takes no more
        bytes, and the memory does not depend on the router's choice.
        """
        axes = self.up.expert_axes
        if axes is None:
            return self._sums(x, weights, experts, jnp.int32(0), self.num_experts)
        num_slots, slots = self.num_experts, experts
        if copies is not None:
            num_slots, slots = copies.num_slots, copies.chosen(experts)
        num_chips = lax.axis_size(axes)
        num_own = -(-num_slots // num_chips)
        if num_own * num_chips > num_slots:  # or padding would use spare slots of the last chip
            slots = jnp.where(experts < self.num_experts, slots, num_own * num_chips)
        over_ranks = axes == MESH_AXES
        if over_ranks:
            x = concatenate_over(DATA_AXIS, x)
            weights, slots = (concatenate_over(DATA_AXIS, a, axis=1) for a in (weights, slots))
        sums = self._sums(x, weights, slots, lax.axis_index(axes) * num_own, num_own)
        return own_rank_sum(sums) if over_ranks else sums

    def _sums(
        self, x: jax.Array, weights: jax.Array, slots: jax.Array, first: jax.Array, num_own: int
    ) -> jax.Array:
        """Sum each token's results of slots [first, first + num_own), weighted: [T, hidden]."""
        if not self.weighs_inputs:
            return self._sums_of_lines(x, weights, slots, first, num_own)
        # Each token becomes a token for each of its experts.
        inputs = (x * weights[..., None]).astype(x.dtype).reshape(-1, x.shape[1])
        ones = jnp.ones((1, len(inputs)), weights.dtype)
        results = self._sums_of_lines(inputs, ones, slots.reshape(1, -1), first, num_own)
        return jnp.sum(results.reshape(*slots.shape, -1), axis=0)

    def _sums_of_lines(
        self, x: jax.Array, weights: jax.Array, slots: jax.Array, first: jax.Array, num_own: int
    ) -> jax.Array:
        lines, hidden_size = self.moves.sort(slots, first, num_own), x.shape[1]
        padded = jnp.pad(x, ((0, 0), (0, self.up.row_size - hidden_size)))

        def results(part: ExpertDispatch) -> jax.Array:
            inner = self._inner(self.moves.gather(padded, part), part)
            return self.down(inner, part.group_sizes)

        axes = self.up.expert_axes
        num_chips = 1 if axes is None else lax.axis_size(axes)
        size = lines_at_once(len(x), len(slots), num_chips)
        if size == lines.num_lines:
            return self.moves.add(results(lines), weights, lines)[:, :hidden_size]

        def add(total: jax.Array, part: ExpertDispatch) -> jax.Array:
            return add_part(total, results(part), weights, part)

        total = in_parts(lines, size, add, jnp.zeros(padded.shape, jnp.float32))
        return total[:, :hidden_size].astype(x.dtype)

    def _inner(self, x: jax.Array, lines: ExpertDispatch) -> jax.Array:
        """Return the inputs [n, width] of the experts' last product for lines x [n, hidden]."""
        sizes = lines.group_sizes
        if self.gate is None:
            return self.activation(self.up(x, sizes))
        gate, up = self.gate(x, sizes), self.up(x, sizes)
        if self.gate.bias is not None:
            stops = jnp.cumsum(sizes)
            line = jnp.arange(len(x))[:, None]
            is_of = (line >= stops - sizes) & (line < stops)
            gate, up = gate + self.gate.biases(is_of), up + self.up.biases(is_of)
        return self.moves.gate(self.gated, gate, up, lines)


class MLPWithExperts(nnx.Module):
    """The sum of a dense feed-forward layer and of experts, both normalised, of the same input."""

    def __init__(
        self,
        mlp: GatedMLP,
        mlp_norm: RMSNorm,
        experts: MixtureOfExperts,
        router_norm: RMSNorm,
        experts_norm: RMSNorm,
    ) -> None:
        """Declare the layer; `mlp_norm` and `experts_norm` normalise results."""
        self.mlp = mlp
        self.mlp_norm = mlp_norm
        self.experts = experts
        self.router_norm = router_norm
        self.experts_norm = experts_norm

    def __call__(
        self,
        x: jax.Array,
        norm: RMSNorm,
        is_token: jax.Array,
        copies: ExpertCopies | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Map x as `MixtureOfExperts` does; `norm` normalises the dense layer's input."""
        dense = self.mlp_norm(self.mlp(norm(x)))
        sums, experts = self.experts(x, self.router_norm, is_token, copies)
        return dense + self.experts_norm(sums), experts
