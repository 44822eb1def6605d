"""The TPU's own compiler accepts the prefill kernel in every shape that models bring."""

import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from sgl_jax.aot.chips import CHIPS
from sgl_jax.kernels.ragged_paged_attention.batch import AttentionBatch
from sgl_jax.kernels.ragged_paged_attention.tpu_prefill.call import prefill_attention

MAX_COMPILE_S = 10


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


def compile_prefill(shape, mesh):
    """The compiled kernel, its queries donated, and the seconds of work that it took."""

    def struct(dtype, *dims):
        return jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(mesh, P()))

    def run(q, cache, layer, sinks, page_table, kv_starts, q_lens, num_decode):
        return prefill_attention(
            q,
            cache,
            layer,
            AttentionBatch.build(page_table, kv_starts, q_lens, num_decode, shape.tokens),
            scale=shape.head_dim**-0.5,
            sliding_window=shape.sliding_window,
            soft_cap=shape.soft_cap,
            sinks=sinks,
        )

    q_heads = shape.kv_heads * shape.group
    cache = (2, 64, 2 * shape.kv_heads, shape.page_size, shape.head_dim)
    rows = struct(jnp.int32, shape.rows)
    with jax.set_mesh(mesh):
        lowered = jax.jit(run, donate_argnums=0).lower(
            struct(shape.dtype, shape.tokens, q_heads, shape.head_dim),
            struct(shape.dtype, *cache),
            struct(jnp.int32),
            struct(jnp.float32, q_heads) if shape.sinks else None,
            struct(jnp.int32, shape.rows, shape.table_width),
            rows,
            rows,
            struct(jnp.int32),
        )
    start = time.process_time()
    return lowered.compile(), time.process_time() - start


def assert_compiles_in_place(shape, mesh):
    """In the queries' memory, with no temporary but the rows' tables, and soon."""
    compiled, seconds = compile_prefill(shape, mesh)
    memory = compiled.memory_analysis()
    q_bytes = shape.tokens * shape.kv_heads * shape.group * shape.head_dim
    q_bytes *= jnp.dtype(shape.dtype).itemsize
    assert memory.alias_size_in_bytes >= q_bytes
    tables_bytes = shape.rows * max(shape.table_width, 128) * 4
    assert memory.temp_size_in_bytes < 2 * tables_bytes + 2**18
    assert seconds < MAX_COMPILE_S


@pytest.mark.parametrize("generation", CHIPS)
def test_every_generation_compiles_it_in_place_and_soon(generation, tpu_mesh):
    assert_compiles_in_place(Shape(), tpu_mesh(generation))


SHAPES = {
    "small pages": Shape(page_size=16),
    "large pages, head_dim 256": Shape(page_size=256, head_dim=256, soft_cap=50.0),
    "head_dim 64, window and sinks": Shape(
        page_size=64, head_dim=64, group=8, sliding_window=128, sinks=True
    ),
    "one KV head of 16 queries": Shape(kv_heads=1, group=16, tokens=64),
    "one KV head of 7 queries": Shape(kv_heads=1, group=7),
    "two heads, one query each": Shape(kv_heads=2, group=1, tokens=1, rows=1),
    "many heads of their own": Shape(kv_heads=32, group=1),
    "float32": Shape(dtype=jnp.float32, page_size=16),
    "float32, head_dim 256": Shape(dtype=jnp.float32, head_dim=256, kv_heads=2),
    "256 rows of 1024 pages": Shape(page_size=16, rows=256, table_width=1024),
    "rows of 8192 pages": Shape(page_size=16, rows=64, table_width=8192),
}


BY_DEFAULT = {
    "small pages",
    "large pages, head_dim 256",
    "head_dim 64, window and sinks",
    "one KV head of 7 queries",
    "float32",
}


# The oldest generation knows the fewest operations, so it refuses most.
@pytest.mark.parametrize(
    "generation", ["v5e", *(pytest.param(g, marks=pytest.mark.long) for g in ("v6e", "tpu7x"))]
)
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in BY_DEFAULT else pytest.mark.long) for n in SHAPES],
)
def test_other_shapes_and_options_compile(name, generation, tpu_mesh):
    assert_compiles_in_place(SHAPES[name], tpu_mesh(generation))
