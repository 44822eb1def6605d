"""Choice and dispatch of experts.

A line is one token's input to one of its experts. In arrays of `top_k` numbers per token, tokens
are on the last axis, which a TPU stores in lanes.
"""

from typing import NamedTuple, Protocol

import jax

from sgl_jax.kernels.expert_dispatch.lines import ExpertDispatch, Gated, Router
from sgl_jax.kernels.expert_dispatch.xla import (
    xla_add,
    xla_choose,
    xla_gate,
    xla_gather,
    xla_sort,
)


class ChooseExperts(Protocol):
    """Normalise hidden states and choose each token's most probable experts."""

    def __call__(
        self, x: jax.Array, router: Router, layer: jax.Array, is_token: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Map x [T, hidden] and layer int32 [] to (x normalised, weights, experts).

        Weights float32 and experts int32 are [top_k, T]. The most probable expert comes first, and
        the lower number if two are equal. For padding, where `is_token` bool [T] is false, every
        expert is the number of experts.
        """
        ...


class SortLines(Protocol):
    """Sort lines by their experts."""

    def __call__(self, experts: jax.Array, first: jax.Array, num_experts: int) -> ExpertDispatch:
        """Sort the lines of a chip's experts, numbered from `first` (int32 []) on.

        Tokens' experts are int32 [top_k, T]. A token chooses an expert of the chip at most once;
        its other experts have no place below `num_used`.
        """
        ...


class GatherLines(Protocol):
    """Copy tokens to their lines."""

    def __call__(self, x: jax.Array, lines: ExpertDispatch) -> jax.Array:
        """Copy x [T, width] to [lines, width]; arbitrary from `lines.num_used` on."""
        ...


class GateLines(Protocol):
    """Apply the experts' gates."""

    def __call__(
        self, gated: Gated, gate: jax.Array, up: jax.Array, lines: ExpertDispatch
    ) -> jax.Array:
        """Return `gated(gate, up)`, all [lines, width]; arbitrary from `lines.num_used` on."""
        ...


class AddLines(Protocol):
    """Add each token's lines, times its weights."""

    def __call__(self, results: jax.Array, weights: jax.Array, lines: ExpertDispatch) -> jax.Array:
        """Sum results [lines, width], times weights float32 [top_k, T], to [T, width].

        Results are arbitrary from `lines.num_used` on. A token without lines gets zeros.
        """
        ...


class DispatchKernels(NamedTuple):
    choose: ChooseExperts
    sort: SortLines
    gather: GatherLines
    gate: GateLines
    add: AddLines


XLA_MOVES = DispatchKernels(xla_choose, xla_sort, xla_gather, xla_gate, xla_add)
