"""The TPU's own compiler accepts the grouped product, and copies no matrix for it."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import pytest

from sgl_jax.kernels.grouped_matmul.interface import GroupMatrices
from sgl_jax.kernels.grouped_matmul.tpu import tpu_grouped_matmul
from tests.support.long import long_but
from tests.tpu.compiling import MAX_COMPILE_S, compile_on, generations, struct

LAYERS = 4


class Shape(NamedTuple):
    """What one chip multiplies in a layer."""

    lines: int = 512
    groups: int = 128
    inputs: int = 2048
    outputs: int = 192
    transposed: bool = True
    dtype: Any = jnp.bfloat16
    is_int8: bool = False  # of the matrices, with a scale for each output

    @property
    def matrices(self):
        outwards = (self.outputs, self.inputs) if self.transposed else (self.inputs, self.outputs)
        return LAYERS, self.groups, *outwards


def assert_compiles_without_copies(shape, mesh):
    def run(lines, matrices, layer, sizes, *scales):
        own = GroupMatrices(matrices, *scales, None, "int8") if scales else GroupMatrices(matrices)
        return tpu_grouped_matmul(lines, own, layer, sizes, transposed=shape.transposed)

    stored = jnp.int8 if shape.is_int8 else shape.dtype
    scales = [struct(jnp.float32, LAYERS, shape.groups, 1, shape.outputs)] if shape.is_int8 else []

    compiled, seconds = compile_on(
        mesh,
        run,
        struct(shape.dtype, shape.lines, shape.inputs),
        struct(stored, *shape.matrices),
        struct(jnp.int32),
        struct(jnp.int32, shape.groups),
        *scales,
    )
    memory = compiled.memory_analysis()
    itemsize = jnp.dtype(shape.dtype).itemsize
    matrix_bytes = shape.inputs * shape.outputs * jnp.dtype(stored).itemsize
    activation_bytes = shape.lines * (shape.inputs + shape.outputs) * itemsize
    all_matrices = LAYERS * shape.groups * matrix_bytes
    # Stored as they are, not padded to whole rows of lanes.
    assert memory.argument_size_in_bytes < 1.01 * all_matrices + 2 * activation_bytes
    # At most some lines: the matrices of one layer would be more.
    assert memory.temp_size_in_bytes < shape.groups * matrix_bytes / 8
    assert seconds < MAX_COMPILE_S


INWARDS = Shape()
OUTWARDS = Shape(inputs=192, outputs=2048, transposed=False)


@pytest.mark.parametrize("generation", generations("v5e"))
@pytest.mark.parametrize("shape", [INWARDS, OUTWARDS], ids=["inwards", "outwards"])
def test_every_generation_reads_the_stacked_experts_in_place(shape, generation, tpu_mesh):
    assert_compiles_without_copies(shape, tpu_mesh(generation))


SHAPES = {
    "a chunk of 2,048 tokens": INWARDS._replace(lines=16384),
    "a chunk outwards": OUTWARDS._replace(lines=16384),
    "whole experts": INWARDS._replace(outputs=768),
    "whole experts outwards": OUTWARDS._replace(inputs=768),
    "one token": INWARDS._replace(lines=8),
    "few and large experts": INWARDS._replace(groups=8, inputs=4096, outputs=14336, lines=4096),
    "few and large experts outwards": OUTWARDS._replace(
        groups=8, inputs=14336, outputs=4096, lines=4096
    ),
    "an eighth of 1,408": INWARDS._replace(groups=64, outputs=176, lines=96),
    "whole experts of int8": INWARDS._replace(groups=32, outputs=768, is_int8=True),
    "whole experts of int8 outwards": OUTWARDS._replace(groups=32, inputs=768, is_int8=True),
    "float32": INWARDS._replace(dtype=jnp.float32),
    "float32 outwards": OUTWARDS._replace(dtype=jnp.float32),
}
# By default most of those inwards: outwards it is the same kernel.
BY_DEFAULT = [name for name in SHAPES if "outwards" not in name and "1,408" not in name]


# The oldest generation knows the fewest operations and has the least memory.
@pytest.mark.parametrize("generation", generations("v5e"))
@pytest.mark.parametrize("name", long_but(SHAPES, *BY_DEFAULT))
def test_other_shapes_compile(name, generation, tpu_mesh):
    assert_compiles_without_copies(SHAPES[name], tpu_mesh(generation))
