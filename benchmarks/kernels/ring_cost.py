#!/usr/bin/env python
"""Static costs of products over a ring, without a TPU.

    python -m benchmarks.kernels.ring_cost [--chips v5e v6e v5p tpu7x]

Bundles of the schedules for a chip with 1,024 columns of the hidden states: of the loop that
multiplies a block with a tile of tokens, for 2**20 numbers of the matrix; of each other loop, after
its depth; and of the rest.
"""

import argparse
from typing import Any

# Before jax: it has the compiler write its schedules.
from benchmarks.kernels.compiled_kernel import compile_schedules  # isort: skip
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from sgl_jax.core.quantization import ActivationFormat
from sgl_jax.kernels.ring_products.blocks import block_width
from sgl_jax.kernels.ring_products.matrices import RingMatrix
from sgl_jax.kernels.ring_products.tpu.gather import tpu_gather_multiply
from sgl_jax.kernels.ring_products.tpu.scatter import tpu_multiply_scatter
from sgl_jax.planner.topology import CHIPS, Topology, topology_mesh

LAYERS, COLUMNS = 4, 1024
MI = 2**20
# On a chip: matrices, and outputs of each, or inputs of the one that scatters.
PRODUCTS = {"gate and up": (2, 3584), "down": (0, 3584)}
# Tokens in one tile, and in two.
TOKENS = (8, 128, 512, 1024)
# The type of the matrix, and the activations' format if they are quantized.
FORMATS: tuple[tuple[Any, ActivationFormat | None], ...] = (
    (jnp.bfloat16, None),
    (jnp.int8, None),
    (jnp.int8, "int8"),
    (jnp.float8_e4m3fn, "fp8"),
)


def lower(
    mesh: Mesh,
    tokens: int,
    count: int,
    width: int,
    dtype: Any,
    activation: ActivationFormat | None = None,
) -> jax.stages.Lowered:
    chips = mesh.size

    def array(spec: P, *dims: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(mesh, spec))

    def matrix(spec: P, of_scales: P, inputs: int, outputs: int) -> Any:
        values: Any = array(spec, LAYERS, inputs, outputs, dtype=dtype)
        scales: Any = array(of_scales, LAYERS, 1, outputs, dtype=jnp.float32)
        return RingMatrix(values, scales if dtype != jnp.bfloat16 else None)

    def gather(x: Any, norm: Any, layer: Any, matrices: Any) -> jax.Array:
        gated: Any = (lambda gate, up: jax.nn.silu(gate) * up) if count == 2 else lambda qkv: qkv
        rest = (gated, "tensor", activation)
        return tpu_gather_multiply(x, norm, 1e-5, matrices, layer, *rest)

    def scatter(x: Any, residual: Any, layer: Any, matrices: Any) -> jax.Array:
        return tpu_multiply_scatter(x, matrices[0], layer, residual, "tensor", activation)

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
    print("| product | tokens | type | chip | multiplied, of 2**20 | other loops | the rest |")
    print("|---|---|---|---|---|---|---|")
    for chip in words.chips:
        mesh = topology_mesh(Topology(chip, (2, 2, 2) if "p" in chip else (2, 4)), 1, 8)
        for name, (count, width) in PRODUCTS.items():
            for dtype, activation in FORMATS:
                for tokens in TOKENS:
                    lowered = lower(mesh, tokens, count, width, dtype, activation)
                    _, schedules, _ = compile_schedules(lowered)
                    (found,) = (own for own in schedules if "ring" in own.kernel)
                    hot, *others = found.hot_loops
                    block = (
                        max(count, 1)
                        * COLUMNS
                        * block_width(width, COLUMNS, max(count, 1) * jnp.dtype(dtype).itemsize)
                    )
                    in_others = ", ".join(f"{own.depth}: {own.bundles}" for own in others)
                    rest = found.bundles - sum(own.bundles for own in found.loops)
                    print(
                        f"| {name} | {tokens} | {jnp.dtype(dtype).name}, {activation} | {chip} "
                        f"| {hot.bundles * MI / block:,.0f} "
                        f"| {in_others} | {rest:,} |",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
