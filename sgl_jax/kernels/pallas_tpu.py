"""Common parts of Pallas kernels for TPU: DMAs, products, compiler options.

Only kernels import this file, so that a process without kernels does not import Pallas, which is
slow.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from sgl_jax.kernels.quantized_matmul.numbers import sums_dtype
from sgl_jax.kernels.tpu_chip import VMEM_LIMIT_BYTES

# For kernels with DMAs to pages or slots by their ids. The memory manager provides valid ids: a
# bounds check of each DMA would cost more than the DMA.
UNCHECKED = pltpu.CompilerParams(disable_bounds_checks=True, vmem_limit_bytes=VMEM_LIMIT_BYTES)


Call = TypeVar("Call", bound=Callable[..., Any])


def simulated(call: Call) -> Call:
    """Wrap `call` to interpret its kernels on a CPU with their DMAs and semaphores, slowly."""

    @wraps(call)
    def run(*args: Any, **kwargs: Any) -> Any:
        with pltpu.force_tpu_interpret_mode():
            return call(*args, **kwargs)

    return cast(Call, run)


def start(copy: Any) -> None:
    copy.start()


def wait(copy: Any) -> None:
    copy.wait()


def call(
    kernel: Callable[..., None],
    name: str,
    scalars: tuple[Any, ...],
    in_vmem: tuple[Any, ...],
    in_hbm: Any,
    num_results: int,
    scratch: list[Any],
) -> list[jax.Array]:
    """Run kernel(*scalars, *in_vmem, in_hbm, *results, *scratch), all of them references.

    `scalars` are in scalar memory, `in_vmem` in vector memory. The results use the memory of the
    last `num_results` arrays of `in_hbm`, and initially hold their content.
    """
    vmem, hbm = (pl.BlockSpec(memory_space=space) for space in (pltpu.VMEM, pl.ANY))
    inputs = (*scalars, *in_vmem, in_hbm)
    arrays = jax.tree.leaves(inputs)
    first = len(arrays) - num_results
    run = pl.pallas_call(
        kernel,
        name=name,
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays[first:]],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            in_specs=[
                *jax.tree.map(lambda _: vmem, in_vmem),
                jax.tree.map(lambda _: hbm, in_hbm),
            ],
            out_specs=[hbm] * num_results,
            scratch_shapes=scratch,
        ),
        input_output_aliases={first + i: i for i in range(num_results)},
        compiler_params=UNCHECKED,
    )
    results: list[jax.Array] = run(*inputs)
    return results


def for_each_run(
    length: jax.Array, sizes: tuple[int, ...], most: int, do: Callable[[Any, int], None]
) -> None:
    """Call do(first, size) for runs that make up `length` tokens, with the `sizes` up to `most`.

    A DMA has a static size: if it were longer than the row, it would reach into the next row.
    """
    done = jnp.int32(0)
    for size in sizes:
        if size > most:
            continue
        count = lax.div(length - done, jnp.int32(size))

        @pl.loop(0, count)
        def _(i: jax.Array, done: jax.Array = done, size: int = size) -> None:
            do(done + i * size, size)

        done += count * size


def product(x: jax.Array, y: jax.Array, axes: tuple[int, int]) -> jax.Array:
    """Multiply the matrices x and y, contracting one axis of each.

    The result is float32, or int32 if both are int8. Float32 inputs are not rounded.
    """
    return lax.dot_general(
        x,
        y,
        (((axes[0],), (axes[1],)), ((), ())),
        precision=lax.Precision.HIGHEST if y.dtype == jnp.float32 else None,
        preferred_element_type=sums_dtype(x.dtype),
    )


def bfloat16_parts(x: jax.Array, count: int) -> list[jax.Array]:
    """Split x, float32, into `count` arrays of bfloat16 with x as their sum, 8 bits each."""
    parts: list[jax.Array] = []
    for _ in range(count):
        parts.append(x.astype(jnp.bfloat16))
        x = x - parts[-1].astype(jnp.float32)
    return parts
