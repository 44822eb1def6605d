"""The TPU's own compiler accepts each attention kernel by itself: in place, and soon."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import pytest

from sgl_jax.kernels.attention.batch import AttentionBatch, ScoreOptions
from sgl_jax.kernels.attention.tpu.decode import decode_attention
from sgl_jax.kernels.attention.tpu.prefill import prefill_attention
from sgl_jax.kernels.attention.tpu.shared import CacheSlots
from sgl_jax.kernels.attention.tpu.write import write_kv
from sgl_jax.kernels.tpu_chip import LANES
from sgl_jax.mem_cache.device_pool import KVPoolLayout
from tests.tpu.compiling import (
    MAX_COMPILE_S,
    compile_on,
    generations,
    num_bytes,
    num_kernels,
    struct,
)


class Shape(NamedTuple):
    """What one chip sees of a layer, and its bucket."""

    page_size: int = 128
    kv_heads: int = 8
    group: int = 4
    head_dim: int = 128
    tokens: int = 2048
    rows: int = 64
    table_width: int = 32
    dtype: Any = jnp.bfloat16
    sliding_window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False

    @property
    def cache(self):
        page = KVPoolLayout(2, self.kv_heads, self.page_size, self.head_dim, self.dtype).page_shape
        return struct(self.dtype, 2, 64, *page)

    @property
    def row_arrays(self):
        """Page table, KV starts, query lengths, number of decode rows."""
        row = struct(jnp.int32, self.rows)
        return struct(jnp.int32, self.rows, self.table_width), row, row, struct(jnp.int32)

    @property
    def table_bytes(self):
        """As a TPU lays the page table out."""
        return self.rows * max(self.table_width, LANES) * 4


def compile_write(shape, mesh):
    """The compiled kernel, the seconds of work, what is changed in place, temporaries it may have.

    These are K and V, before and after they are turned, and some of the tokens' indices as columns,
    of which each is padded to a row of lanes.
    """

    def run(k, v, cache, layer, *rows):
        return write_kv(k, v, cache, layer, AttentionBatch.build(*rows, shape.tokens))

    kv, layer = struct(shape.dtype, shape.tokens, shape.kv_heads, shape.head_dim), struct(jnp.int32)
    compiled = compile_on(mesh, run, kv, kv, shape.cache, layer, *shape.row_arrays, donated=2)
    return *compiled, shape.cache, 4 * num_bytes(kv) + 3 * shape.tokens * LANES * 4


def compile_attention(attend, shape, mesh):
    """As `compile_write`, of decode or prefill; these have none of their own."""
    q_heads, width = shape.kv_heads * shape.group, shape.cache.shape[-1]

    def run(q, cache, layer, sinks, *rows):
        return attend(
            q,
            cache,
            layer,
            AttentionBatch.build(*rows, shape.tokens),
            ScoreOptions(shape.head_dim**-0.5, shape.sliding_window, shape.soft_cap, sinks),
            slots=CacheSlots(packed=width > shape.head_dim),
        )

    q = struct(shape.dtype, shape.tokens, q_heads, width)
    sinks = struct(jnp.float32, q_heads) if shape.sinks else None
    arguments = (q, shape.cache, struct(jnp.int32), sinks, *shape.row_arrays)
    return *compile_on(mesh, run, *arguments, donated=0), q, 0


def assert_compiles_in_place(kernel, shape, mesh, may_turn=False):
    """And soon. `may_turn`: queries of which a KV head's do not fill a tile may be laid out anew,
    in a tile each."""
    if kernel == "write":
        compiled, seconds, changed, temp_bytes = compile_write(shape, mesh)
    else:
        attend = {"decode": decode_attention, "prefill": prefill_attention}[kernel]
        compiled, seconds, changed, temp_bytes = compile_attention(attend, shape, mesh)
        temp_bytes += 2 * num_bytes(changed) if may_turn else 0
    assert num_kernels(compiled) == 1
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= num_bytes(changed)
    assert memory.temp_size_in_bytes < 2 * shape.table_bytes + temp_bytes + 3 * 2**17
    assert seconds < MAX_COMPILE_S


KERNELS = ("write", "decode", "prefill")


# The oldest generation knows the fewest operations, so it refuses most.
@pytest.mark.parametrize("generation", generations("v5e"))
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_generation_compiles_it_in_place_and_soon(kernel, generation, tpu_mesh):
    assert_compiles_in_place(kernel, Shape(), tpu_mesh(generation))


SHAPES = {
    "small pages": Shape(page_size=16),
    "large pages, head_dim 256": Shape(page_size=256, head_dim=256, soft_cap=50.0),
    "head_dim 64, window and sinks": Shape(
        page_size=64, head_dim=64, group=8, sliding_window=128, sinks=True
    ),
    "four KV heads": Shape(kv_heads=4),
    "one KV head of 16 queries": Shape(kv_heads=1, group=16, tokens=64),
    "one KV head of 7 queries": Shape(kv_heads=1, group=7),
    "two heads, one query each": Shape(kv_heads=2, group=1, tokens=1, rows=1),
    "many heads of their own": Shape(kv_heads=32, group=1),
    "float32": Shape(dtype=jnp.float32, page_size=16),
    "float32, head_dim 256": Shape(dtype=jnp.float32, head_dim=256, kv_heads=2),
    "256 rows of 1024 pages": Shape(page_size=16, rows=256, table_width=1024),
    "rows of 8192 pages": Shape(page_size=16, rows=64, table_width=8192),
}
# Of prefill; `test_kernels_compile.py` has others, of all three.
BY_DEFAULT = {"one KV head of 7 queries"}


@pytest.mark.parametrize("generation", generations("v5e"))
@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        pytest.param(
            kernel,
            name,
            marks=() if kernel == "prefill" and name in BY_DEFAULT else pytest.mark.long,
        )
        for kernel in KERNELS
        for name in SHAPES
    ],
)
def test_other_shapes_and_options_compile(kernel, name, generation, tpu_mesh):
    # For these two the compiler does it in HBM, for the others in vector memory.
    may_turn = generation in ("v5p", "tpu7x")
    assert_compiles_in_place(kernel, SHAPES[name], tpu_mesh(generation), may_turn)
