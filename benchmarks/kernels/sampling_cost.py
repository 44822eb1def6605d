#!/usr/bin/env python
"""The cost of drawing a decode step's tokens, by the TPU compiler's cycles; needs no TPU.

    python -m benchmarks.kernels.sampling_cost [--slices v5e-8 v6e-8 tpu7x-8] [--tp 8]

Rows of logits are split over the vocabulary of Qwen3 (151,936) by tensor parallelism, as the head
leaves them. The most expensive branch of each conditional counts. Rows are drawn at a temperature,
with all filters or with only those that need no search of a threshold. Penalties are left out, and
so is the time of the exchange of logits, for which the compiler has no cycles.
"""

import argparse
import os
from unittest import mock

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from sgl_jax.core.sampling_params import MAX_STOP_TOKEN_IDS
from sgl_jax.layers.sampling import draw, sample
from sgl_jax.layers.sampling.row_params import (
    SampledRows,
    packed_width,
    unpack_row_params,
)
from sgl_jax.layers.sampling.split_logits import SplitLogits
from sgl_jax.planner.program_cost import dearest_cycles
from sgl_jax.planner.topology import Topology, topology_mesh

VOCAB, CONTEXT = 151_936, 4096
NEUTRAL = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
CASES = {
    "temperature alone": ("top_k", "top_p", "min_p"),
    "min-p": ("top_k", "top_p"),
    "top-k, top-p, or all three": (),
}


def compile_draw(
    topology: Topology, tp: int, rows: int, unused: tuple[str, ...]
) -> jax.stages.Compiled:
    """Compile the program that draws `rows` tokens; parameters that no row uses are constants."""

    def unpack(packed):
        params = unpack_row_params(packed)
        constants = {name: jnp.full_like(getattr(params, name), NEUTRAL[name]) for name in unused}
        return params._replace(**constants)

    def local(columns, row_params, table, numbers, lengths, samples):
        where = SampledRows(numbers, lengths, samples)
        logits = SplitLogits(columns, VOCAB)
        return draw.draw_tokens(logits, row_params, table, where, jnp.zeros((), bool))[0]

    mesh = topology_mesh(topology, 1, tp)
    split = P(None, "tensor")
    sharded = jax.shard_map(
        local, mesh=mesh, in_specs=(split, *[P()] * 5), out_specs=P(), check_vma=False
    )
    shapes = (
        ((rows, -(-VOCAB // tp) * tp), jnp.float32, split),
        ((2 * rows, packed_width(MAX_STOP_TOKEN_IDS)), jnp.int32, P()),
        ((2 * rows, CONTEXT), jnp.int32, P()),
        *[((rows,), dtype, P()) for dtype in (jnp.int32, jnp.int32, jnp.bool_)],
    )
    arrays = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for shape, dtype, spec in shapes
    ]
    with (
        jax.set_mesh(mesh),
        mock.patch.object(draw, "unpack_row_params", unpack),
        mock.patch.object(sample, "needs_adjusting", lambda _, num: jnp.zeros(num.shape, bool)),
    ):
        return jax.jit(sharded).lower(*arrays).compile()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--slices", nargs="+", default=["v5e-8", "v6e-8", "tpu7x-8"])
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--tp", type=int, default=8)
    arguments = parser.parse_args()
    print("| slice, tp | filters | cycles | ms | temporaries, MiB |\n|---|---|---|---|---|")
    for name in arguments.slices:
        topology = Topology.parse(name)
        for case, unused in CASES.items():
            compiled = compile_draw(topology, arguments.tp, arguments.rows, unused)
            cycles, memory = dearest_cycles(compiled), compiled.memory_analysis()
            assert memory is not None, "libtpu reports the memory of what it compiles"
            print(
                f"| {name}, {arguments.tp} | {case} | {cycles:,} "
                f"| {cycles / topology.chip.clock_hz * 1e3:.3f} "
                f"| {memory.temp_size_in_bytes / 2**20:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
