#!/usr/bin/env python
"""Static costs of routing for a mixture of experts, without a TPU.

    python -m benchmarks.kernels.expert_dispatch_cost [--chips v5e v6e]

A layer of Qwen3-30B-A3B, whole experts over four chips: choices of experts, places of lines and
moves of lines, by XLA and by kernels. The TPU's compiler gives cycles for most of
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

from sgl_jax.core.layer_configs import ExpertChoice
from sgl_jax.kernels.expert_dispatch.interface import ChooseExperts
from sgl_jax.kernels.expert_dispatch.lines import ExpertDispatch, Router, lines_at_once
from sgl_jax.kernels.expert_dispatch.tpu import tpu_add, tpu_choose, tpu_gate, tpu_gather, tpu_sort
from sgl_jax.kernels.expert_dispatch.xla import (
    add_by_line,
    xla_add,
    xla_choose,
    xla_gather,
    xla_sort,
)
from sgl_jax.layers.moe import silu_gated
from sgl_jax.planner.program_cost import program_cost
from sgl_jax.planner.topology import CHIPS, Topology, topology_mesh

EXPERTS, CHIPS_OF_EXPERTS, TOP_K, HIDDEN, INNER = 128, 4, 8, 2048, 768
# Operations without an estimate.
UNCOUNTED = (
    "sort",
    "scatter",
    "top_k",
    "choose",
    "gather_fusion",
    "gather_expert",
    "gate_expert",
    "add_expert",
)


def pieces(tokens: int) -> dict[str, tuple[Callable[..., Any], list[Any]]]:
    size = lines_at_once(tokens, TOP_K, CHIPS_OF_EXPERTS)
    ids = jax.ShapeDtypeStruct((TOP_K, tokens), jnp.int32)
    weights = jax.ShapeDtypeStruct((TOP_K, tokens), jnp.float32)
    own = EXPERTS // CHIPS_OF_EXPERTS
    shapes = (size,), ids.shape, (own,), ()
    lines = ExpertDispatch._make(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes)
    matrices = jax.ShapeDtypeStruct((2, HIDDEN, EXPERTS), jnp.bfloat16)
    norm, layer = (
        jax.ShapeDtypeStruct(*own) for own in (((HIDDEN,), jnp.bfloat16), ((), jnp.int32))
    )
    choice = ExpertChoice(TOP_K, norm_topk_prob=True)
    is_token = jax.ShapeDtypeStruct((tokens,), jnp.bool_)
    x, results = (jax.ShapeDtypeStruct((n, HIDDEN), jnp.bfloat16) for n in (tokens, size))
    inner = jax.ShapeDtypeStruct((size, INNER), jnp.bfloat16)
    routed = [x, norm, matrices, layer, is_token]

    def choose_by(choose: ChooseExperts) -> Callable[..., Any]:
        def run(x: Any, norm: Any, matrices: Any, *rest: Any) -> Any:
            return choose(x, Router(choice, 1e-6, False, norm, matrices, None), *rest)

        return run

    total = jax.ShapeDtypeStruct((tokens, HIDDEN), jnp.float32)
    return {
        "choice by XLA": (choose_by(xla_choose), routed),
        "choice": (choose_by(tpu_choose), routed),
        "places by XLA's sorts": (lambda ids: xla_sort(ids, ids[0, 0], own)[1:], [ids]),
        "places": (lambda ids: tpu_sort(ids, ids[0, 0], own)[1:], [ids]),
        "gather by XLA": (xla_gather, [x, lines]),
        "gather": (tpu_gather, [x, lines]),
        "gate": (lambda a, b, lines: tpu_gate(silu_gated, a, b, lines), [inner, inner, lines]),
        "add by XLA": (xla_add, [results, weights, lines]),
        "rows scattered by XLA": (add_by_line, [total, results, weights, lines]),
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
