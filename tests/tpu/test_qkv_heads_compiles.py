"""The TPU's own compiler accepts the kernel of heads, and copies nothing for it."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import pytest

from sgl_jax.kernels.qkv_heads import HeadNorm, rotated_heads
from sgl_jax.kernels.tpu_chip import LANES
from tests.support.long import long
from tests.tpu.compiling import MAX_COMPILE_S, compile_on, generations, num_kernels, struct


class Shape(NamedTuple):
    """What one chip sees of a layer."""

    tokens: int = 2048
    kv_heads: int = 8
    group: int = 4
    head_dim: int = 128
    normalised: bool = True
    dtype: Any = jnp.bfloat16
    kv_parts: int = 2


def assert_compiles(shape, mesh):
    def run(qkv, cos, sin, *weights):
        norms = [HeadNorm(weight, 1e-6) for weight in weights]
        norms += [None] * (3 - len(norms))
        sizes = {"group": shape.group, "head_dim": shape.head_dim, "num_kv_parts": shape.kv_parts}
        return rotated_heads(qkv, cos, sin, *norms, **sizes)

    width = shape.kv_heads * (shape.group + shape.kv_parts) * shape.head_dim
    half = struct(jnp.float32, shape.tokens, shape.head_dim // 2)
    num_norms = {0: 1, 1: 3, 2: 2}[shape.kv_parts] if shape.normalised else 0
    weights = [struct(shape.dtype, shape.head_dim)] * num_norms
    qkv = struct(shape.dtype, shape.tokens, width)
    compiled, seconds = compile_on(mesh, run, qkv, half, half, *weights)
    assert num_kernels(compiled) == 1
    # As arguments, which they are in no step, cosines and sines may have to be laid out anew; and
    # queries as a result, where a token's do not fill a tile.
    may_turn = 2 * shape.tokens * max(shape.head_dim // 2, LANES) * 4
    if shape.kv_heads * shape.group % 8:
        may_turn += 8 * shape.tokens * shape.head_dim * qkv.dtype.itemsize
    assert compiled.memory_analysis().temp_size_in_bytes < may_turn + 2**18
    assert seconds < MAX_COMPILE_S


@pytest.mark.parametrize("generation", generations("v5e"))
def test_every_generation_compiles_it(generation, tpu_mesh):
    assert_compiles(Shape(), tpu_mesh(generation))


SHAPES = {
    "one KV head of 8 queries, 128 tokens": Shape(tokens=128, kv_heads=1, group=8),
    "a last block that is not full": Shape(tokens=2176, kv_heads=1, group=8),
    "four queries a token, only rotated": Shape(kv_heads=1, normalised=False),
    "five queries a token": Shape(kv_heads=1, group=5, tokens=512),
    "one token": Shape(kv_heads=2, group=1, tokens=1),
    "37 tokens": Shape(kv_heads=2, group=4, tokens=37),
    "100 tokens": Shape(kv_heads=2, group=4, tokens=100),
    "161 tokens": Shape(kv_heads=2, group=4, tokens=161),
    "head_dim 256": Shape(kv_heads=2, group=2, head_dim=256),
    "queries alone": Shape(kv_heads=1, group=8, head_dim=512, kv_parts=0),
    "keys as values": Shape(kv_heads=4, group=8, head_dim=512, kv_parts=1),
    "many heads": Shape(kv_heads=16, group=8, tokens=256),
    "float32": Shape(kv_heads=4, dtype=jnp.float32),
}


# The oldest generation knows the fewest operations and has the least memory.
@pytest.mark.parametrize("generation", generations("v5e"))
@pytest.mark.parametrize(
    "name", [*list(SHAPES)[:-3], *long("keys as values", "many heads"), "float32"]
)
def test_other_shapes_compile(name, generation, tpu_mesh):
    assert_compiles(SHAPES[name], tpu_mesh(generation))
