#!/usr/bin/env python
"""Static costs of products over a ring, without a TPU.

    python -m benchmarks.kernels.ring_cost [--chips v5e v6e v5p tpu7x]

Bundles of the schedules for a chip with 1,024 columns of the hidden states: of the loop that
multiplies a block, for 2**20 numbers of the matrix; for each chip of the ring; and of the rest.
"""

import argparse
from typing import Any

# Before jax: it has the compiler write its schedules.
from benchmarks.kernels.compiled_kernel import compile_schedules  # isort: skip
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from sgl_jax.kernels.ring_products.matrices import RingMatrix
from sgl_jax.kernels.ring_products.tpu import (
    block_width,
    tpu_gather_multiply,
    tpu_multiply_scatter,
)
from sgl_jax.planner.topology import CHIPS, Topology, topology_mesh

LAYERS, COLUMNS = 4, 1024
MI = 2**20
# On a chip: matrices, and outputs of each, or inputs of the one that scatters.
PRODUCTS = {"gate and up": (2, 3584), "Q, K and V": (1, 1280), "down": (0, 3584)}


def lower(mesh: Mesh, tokens: int, count: int, width: int, dtype: Any) -> jax.stages.Lowered:
    chips = mesh.size

    def array(spec: P, *dims: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(mesh, spec))

    def matrix(spec: P, of_scales: P, inputs: int, outputs: int) -> Any:
        values: Any = array(spec, LAYERS, inputs, outputs, dtype=dtype)
        scales: Any = array(of_scales, LAYERS, 1, outputs, dtype=jnp.float32)
        return RingMatrix(values, scales if dtype == jnp.int8 else None)

    def gather(x: Any, norm: Any, layer: Any, matrices: Any) -> jax.Array:
        gated: Any = (lambda gate, up: jax.nn.silu(gate) * up) if count == 2 else lambda qkv: qkv
        return tpu_gather_multiply(x, norm, 1e-5, matrices, layer, gated, "tensor")

    def scatter(x: Any, residual: Any, layer: Any, matrices: Any) -> jax.Array:
        return tpu_multiply_scatter(x, matrices[0], layer, residual, "tensor")

    hidden, split = chips * COLUMNS, P(None, "tensor")
    x, layer = array(split, tokens, hidden), array(P(), dtype=jnp.int32)
    by_output, by_input = P(None, None, "tensor"), P(None, "tensor", None)
    arguments: Any
    if count:
        own = matrix(by_output, by_output, hidden, chips * width)
        arguments = (x, array(P(), hidden, dtype=jnp.float32), layer, (own,) * count)
    else:
        own = matrix(by_input, P(), chips * width, hidden)
        arguments = (array(split, tokens, chips * width), x, layer, (own,))
    specs = jax.tree.map(lambda own: own.sharding.spec, arguments)
    run: Any = gather if count else scatter
    run = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=split, check_vma=False)
    with jax.set_mesh(mesh):
        return jax.jit(run).lower(*arguments)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chips", nargs="+", default=["v6e"], choices=list(CHIPS))
    words = parser.parse_args()
    print("| product | tokens | type | chip | a block, of 2**20 | each chip | the rest |")
    print("|---|---|---|---|---|---|---|")
    for chip in words.chips:
        mesh = topology_mesh(Topology(chip, (2, 2, 1) if "p" in chip else (2, 2)), 1, 4)
        for tokens in (8, 128, 512):
            for name, (count, width) in PRODUCTS.items():
                for dtype in (jnp.bfloat16, jnp.int8):
                    lowered = lower(mesh, tokens, count, width, dtype)
                    _, schedules, _ = compile_schedules(lowered)
                    (found,) = (own for own in schedules if "ring" in own.kernel)
                    loops = {own.depth: own.bundles for own in found.loops}
                    block = max(count, 1) * COLUMNS * block_width(width, COLUMNS)
                    rest = found.bundles - loops[2] - loops[1]
                    print(
                        f"| {name} | {tokens} | {jnp.dtype(dtype).name} | {chip} "
                        f"| {loops[2] * MI / block:,.0f} | {loops[1]:,} | {rest:,} |"
                    )


if __name__ == "__main__":
    main()
