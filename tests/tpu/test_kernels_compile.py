"""The TPU's own compiler accepts every attention kernel, for every generation of chip.

Nothing runs. What can go wrong is refused here: an operation or an alignment that a generation
lacks, memory that does not suffice, a cache that is copied.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import jax.numpy as jnp
import pytest

from sgl_jax.kernels.attention.api import MAX_ROW_PAGES
from sgl_jax.kernels.attention.batch import AttentionBatch, ScoreOptions
from sgl_jax.kernels.attention.tpu import ragged_paged_attention
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

    tokens: int = 64
    rows: int = 64
    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 128
    context: int = 4096
    dtype: Any = jnp.bfloat16
    cache_dtype: Any = None  # None: as `dtype`
    max_drafts: int = 0
    sliding_window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    num_spans: int = 0  # of each row


def assert_compiles_in_place(shape, mesh):
    """The attention call of one layer, its cache donated."""

    def run(q, k, v, cache, layer, sinks, spans, *rows):
        return ragged_paged_attention(
            q,
            k,
            v,
            cache,
            layer,
            replace(AttentionBatch.build(*rows, shape.tokens, shape.max_drafts), spans=spans),
            ScoreOptions(shape.head_dim**-0.5, shape.sliding_window, shape.soft_cap, sinks),
        )

    pages = shape.context // shape.page_size
    page = KVPoolLayout(2, shape.kv_heads, shape.page_size, shape.head_dim, shape.dtype).page_shape
    cache = struct(shape.cache_dtype or shape.dtype, 2, 1 + shape.rows * pages, *page)
    kv = struct(shape.dtype, shape.tokens, shape.kv_heads, shape.head_dim)
    compiled, seconds = compile_on(
        mesh,
        run,
        struct(shape.dtype, shape.tokens, shape.q_heads, shape.head_dim),
        kv,
        kv,
        cache,
        struct(jnp.int32),
        struct(jnp.float32, shape.q_heads) if shape.sinks else None,
        struct(jnp.int32, shape.rows, shape.num_spans, 2) if shape.num_spans else None,
        struct(jnp.int32, shape.rows, pages),
        struct(jnp.int32, shape.rows),
        struct(jnp.int32, shape.rows),
        struct(jnp.int32),
        donated=3,
    )
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= num_bytes(cache)
    assert memory.temp_size_in_bytes < num_bytes(cache) / 100
    assert num_kernels(compiled) == 3  # write, decode, prefill
    assert seconds < 3 * MAX_COMPILE_S


# By default each kernel is compiled by itself: `test_single_kernels_compile.py`.
@pytest.mark.parametrize("generation", generations())
def test_every_generation_compiles_a_decode_step(generation, tpu_mesh):
    assert_compiles_in_place(Shape(tokens=64), tpu_mesh(generation))


# The oldest generation moves bits, the newest has instructions; the others are as the oldest.
@pytest.mark.parametrize("generation", generations("tpu7x"))
def test_every_generation_compiles_a_cache_of_8_bits(generation, tpu_mesh):
    shape = Shape(tokens=64, cache_dtype=jnp.int8, page_size=32)
    assert_compiles_in_place(shape, tpu_mesh(generation))


@pytest.mark.parametrize("generation", generations())
def test_every_generation_compiles_a_mixed_step(generation, tpu_mesh):
    assert_compiles_in_place(Shape(tokens=2048), tpu_mesh(generation))


@pytest.mark.long
@pytest.mark.parametrize("generation", generations())
def test_every_generation_compiles_spans(generation, tpu_mesh):
    shape = Shape(tokens=2048, sliding_window=1024, head_dim=256, q_heads=8, kv_heads=4)
    assert_compiles_in_place(shape._replace(num_spans=64), tpu_mesh(generation))


@pytest.mark.long
def test_the_least_memory_suffices_for_the_most_kv_heads(tpu_mesh):
    assert_compiles_in_place(Shape(tokens=2048, kv_heads=32), tpu_mesh("v5e"))


@pytest.mark.long
def test_the_page_ids_of_the_longest_row_fit_scalar_memory(tpu_mesh):
    shape = Shape(tokens=64, rows=2, page_size=16, context=16 * MAX_ROW_PAGES)
    assert_compiles_in_place(shape, tpu_mesh("v5e"))


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(Shape(page_size=16, kv_heads=2, q_heads=8), marks=pytest.mark.long),
        pytest.param(
            Shape(page_size=64, kv_heads=1, q_heads=8, max_drafts=4, tokens=320),
            marks=pytest.mark.long,
        ),
        Shape(page_size=256, kv_heads=1, q_heads=4, head_dim=256, soft_cap=50.0),
        pytest.param(
            Shape(kv_heads=4, q_heads=32, head_dim=512, tokens=2048), marks=pytest.mark.long
        ),
        pytest.param(
            Shape(kv_heads=8, q_heads=64, sinks=True, sliding_window=128, context=65536, rows=16),
            marks=pytest.mark.long,
        ),
        pytest.param(
            Shape(dtype=jnp.float32, kv_heads=2, q_heads=2, page_size=16, rows=256, tokens=256),
            marks=pytest.mark.long,
        ),
        pytest.param(Shape(tokens=1, rows=1, context=16384), marks=pytest.mark.long),
        pytest.param(
            Shape(rows=256, tokens=256, page_size=16, kv_heads=1, q_heads=4, context=32768),
            marks=pytest.mark.long,
        ),
        pytest.param(
            Shape(head_dim=64, q_heads=64, sinks=True, sliding_window=128), marks=pytest.mark.long
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("generation", generations("v6e"))
def test_other_shapes_and_options_compile(shape, generation, tpu_mesh):
    assert_compiles_in_place(shape, tpu_mesh(generation))
