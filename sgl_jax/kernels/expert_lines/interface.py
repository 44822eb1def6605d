"""Tokens to lines of their experts and back, and the one place that chooses the implementation."""

from typing import NamedTuple, Protocol

import jax

from sgl_jax.kernels.expert_lines.lines import ExpertLines, Gated
from sgl_jax.kernels.expert_lines.xla import xla_add, xla_gate, xla_gather


class GatherLines(Protocol):
    """Copy tokens to their lines."""

    def __call__(self, x: jax.Array, lines: ExpertLines) -> jax.Array:
        """x [T, width] -> [lines, width]; arbitrary from `lines.num_used` on."""
        ...


class GateLines(Protocol):
    """Apply the experts' gates."""

    def __call__(
        self, gated: Gated, gate: jax.Array, up: jax.Array, lines: ExpertLines
    ) -> jax.Array:
        """`gated` of gate and up, [lines, width] all; arbitrary from `lines.num_used` on."""
        ...


class AddLines(Protocol):
    """Add each token's lines, times its weights."""

    def __call__(self, results: jax.Array, weights: jax.Array, lines: ExpertLines) -> jax.Array:
        """Results [lines, width] and weights float32 [top_k, T] -> [T, width].

        Results are arbitrary from `lines.num_used` on. A token without lines gets zeros.
        """
        ...


class LineMoves(NamedTuple):
    gather: GatherLines
    gate: GateLines
    add: AddLines


XLA_MOVES = LineMoves(xla_gather, xla_gate, xla_add)


def line_moves_implementation(platform: str, *, simulate: bool = False) -> LineMoves:
    """The implementation for `platform` ("cpu", "gpu", "tpu"): kernels on a TPU, which a CPU
    interprets with `simulate`; XLA elsewhere."""
    if platform == "tpu" or (platform == "cpu" and simulate):
        # Here and not above: without Pallas, its import is not waited for.
        from sgl_jax.kernels.expert_lines.tpu import tpu_add, tpu_gate, tpu_gather
        from sgl_jax.kernels.pallas_tpu import simulated

        if platform == "tpu":
            return LineMoves(tpu_gather, tpu_gate, tpu_add)
        return LineMoves(simulated(tpu_gather), simulated(tpu_gate), simulated(tpu_add))
    return XLA_MOVES
