"""The call of a kernel over a ring, and the steps that both kernels have in common."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from sgl_jax.kernels.pallas_tpu import product
from sgl_jax.kernels.ring_products.blocks import TokenBlocks
from sgl_jax.kernels.tpu_chip import device_kind, most_vmem_bytes

# The kernels' names in compiled programs.
GATHER_NAME, SCATTER_NAME = "ring_gather_multiply", "ring_multiply_scatter"
_COLLECTIVE_IDS = {GATHER_NAME: 8, SCATTER_NAME: 9}


def multiplied(x: jax.Array, values: jax.Array) -> jax.Array:
    """X times a block of a matrix, both in 8 bits, or as numbers of x's type."""
    return product(x, values if values.dtype == x.dtype else values.astype(x.dtype), (1, 0))


def for_rows(num_tokens: int, size: int, do: Callable[[Any], None]) -> None:
    """do(rows) for so many rows at a time."""
    if num_tokens == size:
        do(pl.ds(0, size))
    else:
        pl.loop(0, num_tokens // size)(lambda n: do(pl.ds(pl.multiple_of(n * size, size), size)))


def call(
    kernel: Any,
    name: str,
    layer: jax.Array,
    by_token: list[jax.Array],
    norms: list[jax.Array],
    scales: list[jax.Array],
    matrices: list[jax.Array],
    result: jax.ShapeDtypeStruct,
    cut: TokenBlocks,
    scratch: list[Any],
) -> jax.Array:
    """Run kernel(layer, by_token, norms, scales, matrices, out, *scratch) for each block of tokens;
    scales are the layer's own."""

    def of_tokens(array: Any) -> pl.BlockSpec:
        return pl.BlockSpec((cut.tokens, array.shape[1]), lambda block, _: (block, 0))

    def of_layer(stack: jax.Array) -> pl.BlockSpec:
        shape = (1, *stack.shape[1:])
        return pl.BlockSpec(shape, lambda _, layer: (layer[0], *[0] * (stack.ndim - 1)))

    vmem, hbm = (pl.BlockSpec(memory_space=space) for space in (pltpu.VMEM, pl.ANY))
    num_tokens, width = result.shape
    if num_tokens < cut.padded:
        more = ((0, cut.padded - num_tokens), (0, 0))
        by_token = [jnp.pad(array, more) for array in by_token]
    padded = jax.ShapeDtypeStruct((cut.padded, width), result.dtype)
    run = pl.pallas_call(
        kernel,
        name=name,
        out_shape=padded,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(cut.number,),
            in_specs=[
                list(map(of_tokens, by_token)),
                [vmem for _ in norms],
                list(map(of_layer, scales)),
                [hbm for _ in matrices],
            ],
            out_specs=of_tokens(padded),
            scratch_shapes=scratch,
        ),
        compiler_params=pltpu.CompilerParams(
            collective_id=_COLLECTIVE_IDS[name],
            vmem_limit_bytes=most_vmem_bytes(device_kind()),
            has_side_effects=True,
        ),
    )
    out: jax.Array = run(layer.astype(jnp.int32)[None], by_token, norms, scales, matrices)
    return out[:num_tokens]
