#!/usr/bin/env python
"""Static costs of routing for a mixture of experts, without a TPU.

    python -m benchmarks.kernels.expert_lines_cost [--chips v5e v6e]

A layer of Qwen3-30B-A3B, whole experts over four chips: the places of lines by two sorts and by
counting, and the moves of lines by XLA and by kernels. The TPU's compiler gives cycles for most of
XLA's operations; for sorts, gathers and kernels the table has the bundles of their schedules, and
of their longest loop, of which a turn gathers 64 or 128 rows.
"""

import argparse
from collections.abc import Callable
from typing import Any

# Before jax: it has the compiler write its schedules.
from benchmarks.kernels.compiled_kernel import compile_schedules  # isort: skip
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from sgl_jax.kernels.expert_lines.lines import ExpertLines, lines_at_once, sort_lines
from sgl_jax.kernels.expert_lines.tpu import tpu_add, tpu_gate, tpu_gather
from sgl_jax.kernels.expert_lines.xla import xla_add, xla_gather
from sgl_jax.layers.moe import silu_gated
from sgl_jax.planner.program_cost import program_cost
from sgl_jax.planner.topology import CHIPS, Topology, topology_mesh

EXPERTS, CHIPS_OF_EXPERTS, TOP_K, HIDDEN, INNER, BLOCK = 128, 4, 8, 2048, 768, 256
# Operations that have no estimate.
UNCOUNTED = ("sort", "gather_fusion", "gather_expert", "gate_expert", "add_expert")


def count_places(experts: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Places and sizes of groups by comparisons and products with a triangle of ones."""
    is_own = experts[:, None] == jnp.arange(EXPERTS)[:, None]  # [top_k, experts, tokens]
    chosen = jnp.sum(is_own, axis=0, dtype=jnp.int32)
    blocks = chosen.reshape(EXPERTS, -1, BLOCK)
    earlier = jnp.triu(jnp.ones((BLOCK, BLOCK), jnp.bfloat16), k=1)
    within = jnp.einsum(
        "ebt,tu->ebu", blocks.astype(jnp.bfloat16), earlier, preferred_element_type=jnp.float32
    )
    sums = blocks.sum(axis=2, dtype=jnp.int32)
    before = jnp.cumsum(sums, axis=1) - sums
    sizes = chosen.sum(axis=1, dtype=jnp.int32)
    starts = jnp.cumsum(sizes) - sizes
    table = within.astype(jnp.int32) + (before + starts[:, None])[:, :, None]
    return jnp.where(is_own, table.reshape(EXPERTS, -1), 0).sum(axis=1), sizes


def pieces(tokens: int) -> dict[str, tuple[Callable[..., Any], list[Any]]]:
    size = lines_at_once(tokens, TOP_K, CHIPS_OF_EXPERTS)
    ids = jax.ShapeDtypeStruct((TOP_K, tokens), jnp.int32)
    weights = jax.ShapeDtypeStruct((TOP_K, tokens), jnp.float32)
    own = EXPERTS // CHIPS_OF_EXPERTS
    arrays: Any = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((size,), ids.shape, (own,))]
    lines = ExpertLines(*arrays)
    x, results = (jax.ShapeDtypeStruct((n, HIDDEN), jnp.bfloat16) for n in (tokens, size))
    inner = jax.ShapeDtypeStruct((size, INNER), jnp.bfloat16)
    return {
        "places by two sorts": (lambda ids: sort_lines(ids, EXPERTS)[1:], [ids]),
        "places by counting": (count_places, [ids]),
        "gather by XLA": (xla_gather, [x, lines]),
        "gather": (tpu_gather, [x, lines]),
        "gate": (lambda a, b, lines: tpu_gate(silu_gated, a, b, lines), [inner, inner, lines]),
        "add by XLA": (xla_add, [results, weights, lines]),
        "add": (tpu_add, [results, weights, lines]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chips", nargs="+", default=["v5e", "v6e"], choices=list(CHIPS))
    words = parser.parse_args()
    print("| piece | tokens | chip | cycles, by the compiler | bundles (longest loop) of others |")
    print("|---|---|---|---|---|")
    for chip in words.chips:
        mesh = topology_mesh(Topology.all_of(chip)[0], 1, 1)
        for tokens in (256, 2048):
            for name, (function, arguments) in pieces(tokens).items():
                whole = NamedSharding(mesh, P())
                placed = jax.tree.map(lambda a, whole=whole: a.update(sharding=whole), arguments)
                with jax.set_mesh(mesh):
                    lowered = jax.jit(function).lower(*placed)
                compiled, schedules, _ = compile_schedules(lowered)
                others = [
                    f"{own.bundles:,} ({max((loop.bundles for loop in own.loops), default=0):,})"
                    for own in schedules
                    if own.kernel.startswith(UNCOUNTED)
                ]
                cycles = program_cost(compiled).estimated_cycles
                print(f"| {name} | {tokens} | {chip} | {cycles:,} | {', '.join(others)} |")


if __name__ == "__main__":
    main()
