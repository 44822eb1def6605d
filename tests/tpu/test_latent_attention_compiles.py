"""The TPU's own compiler accepts latent attention for every generation of chip, and in place."""

import jax.numpy as jnp
import pytest

from sgl_jax.kernels.attention.batch import AttentionBatch
from sgl_jax.kernels.latent_attention.chosen import ATTENDING_TOKENS
from sgl_jax.kernels.latent_attention.latents import (
    IndexQueries,
    LatentQueries,
    UpProjections,
    latent_row_size,
)
from sgl_jax.kernels.latent_attention.tpu import latent_attention
from sgl_jax.planner.program_cost import dearest_cycles
from tests.tpu.compiling import (
    MAX_COMPILE_S,
    compile_on,
    generations,
    num_bytes,
    num_kernels,
    struct,
)

RANK, ROPE_DIM, HEAD_DIM = 512, 64, 128  # DeepSeek-V3's
ROWS, PAGES = 64, 32
KEY_DIM, TOP_K = 128, 2048  # of DeepSeek-V3.2's indexer


def assert_compiles_in_place(
    mesh, tokens, heads, *, dtype=jnp.bfloat16, cache_dtype=None, page_size=128, max_drafts=0
):
    """The call of one layer, its cache donated. Temporaries are arrays of tokens, never a copy of
    the cache or of a few tokens' matrices."""

    def run(queries, latents, up, cache, layer, *rows):
        batch = AttentionBatch.build(*rows, tokens, max_drafts)
        return latent_attention(queries, latents, up, cache, layer, batch, 0.1)

    row_size, row = latent_row_size(RANK, ROPE_DIM), struct(jnp.int32, ROWS)
    cache = struct(cache_dtype or dtype, 2, 1 + ROWS * PAGES, 1, page_size, row_size)
    absorbed = struct(dtype, tokens, heads, row_size)
    compiled, seconds = compile_on(
        mesh,
        run,
        LatentQueries(
            struct(dtype, tokens, heads, HEAD_DIM), struct(dtype, tokens, heads, ROPE_DIM)
        ),
        struct(dtype, tokens, RANK + ROPE_DIM),
        UpProjections(struct(dtype, heads, HEAD_DIM, RANK), struct(dtype, heads, RANK, HEAD_DIM)),
        cache,
        struct(jnp.int32),
        struct(jnp.int32, ROWS, PAGES),
        *(row, row, struct(jnp.int32)),
        donated=3,
    )
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= num_bytes(cache)
    assert memory.temp_size_in_bytes < 3 * num_bytes(absorbed) + 2**21
    assert num_kernels(compiled) == 3  # write, decode, prefill
    assert seconds < 3 * MAX_COMPILE_S


@pytest.mark.parametrize("generation", generations("v5e"))
@pytest.mark.parametrize("heads", [16, *(pytest.param(128, marks=pytest.mark.long),)])
def test_every_generation_compiles_a_step_of_few_tokens(heads, generation, tpu_mesh):
    assert_compiles_in_place(tpu_mesh(generation), 64, heads)


@pytest.mark.parametrize("generation", generations())
@pytest.mark.parametrize("heads", [16, 128])
def test_every_generation_compiles_an_expanded_step(heads, generation, tpu_mesh):
    assert_compiles_in_place(tpu_mesh(generation), 2048, heads)


def assert_chosen_tokens_are_attended_to_in_place(
    mesh, tokens, heads, *, dtype=jnp.bfloat16, max_drafts=0
):
    """The same with an indexer of 64 heads: temporaries are scores and chosen latents."""

    def run(queries, latents, up, index, cache, layer, *rows):
        batch = AttentionBatch.build(*rows, tokens, max_drafts)
        index = IndexQueries(*index, TOP_K)
        return latent_attention(queries, latents, up, cache, layer, batch, 0.1, index)

    row_size, row = latent_row_size(RANK, ROPE_DIM, KEY_DIM), struct(jnp.int32, ROWS)
    cache = struct(dtype, 2, 1 + ROWS * PAGES, 1, 128, row_size)
    compiled, seconds = compile_on(
        mesh,
        run,
        LatentQueries(
            struct(dtype, tokens, heads, HEAD_DIM), struct(dtype, tokens, heads, ROPE_DIM)
        ),
        struct(dtype, tokens, RANK + ROPE_DIM),
        UpProjections(struct(dtype, heads, HEAD_DIM, RANK), struct(dtype, heads, RANK, HEAD_DIM)),
        (
            struct(dtype, tokens, 64, KEY_DIM),
            struct(jnp.float32, tokens, 64),
            struct(dtype, tokens, KEY_DIM),
        ),
        cache,
        struct(jnp.int32),
        struct(jnp.int32, ROWS, PAGES),
        *(row, row, struct(jnp.int32)),
        donated=4,
    )
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= num_bytes(cache)
    by_token = struct(dtype, tokens, heads, row_size), struct(jnp.int32, tokens, TOP_K)
    latents = struct(jnp.float32, ATTENDING_TOKENS, TOP_K, row_size)
    most = 3 * sum(map(num_bytes, by_token)) + 2 * num_bytes(latents)
    assert memory.temp_size_in_bytes < most < num_bytes(cache)
    # Write, decode, prefill; scores and choices of either; attention to what is gathered.
    assert num_kernels(compiled) == 3 + 4 + 1
    # Rows that are gathered one after another, in a loop, take 8,500 cycles each.
    assert dearest_cycles(compiled) < 40 * ATTENDING_TOKENS * TOP_K
    assert seconds < 6 * MAX_COMPILE_S


@pytest.mark.parametrize("generation", generations())
@pytest.mark.parametrize("sizes", [(64, 16), (1024, 16)])
def test_every_generation_compiles_attention_to_chosen_tokens(sizes, generation, tpu_mesh):
    assert_chosen_tokens_are_attended_to_in_place(tpu_mesh(generation), *sizes)


@pytest.mark.long
@pytest.mark.parametrize("generation", ["v5e", "tpu7x"])
def test_chosen_tokens_of_drafts_compile(generation, tpu_mesh):
    assert_chosen_tokens_are_attended_to_in_place(tpu_mesh(generation), 256, 16, max_drafts=3)


@pytest.mark.long
@pytest.mark.parametrize(
    "sizes",
    [
        {"tokens": 64, "heads": 16, "cache_dtype": jnp.int8, "page_size": 32},
        {"tokens": 2048, "heads": 16, "cache_dtype": jnp.int8},
        {"tokens": 256, "heads": 8, "max_drafts": 3, "page_size": 16},
        {"tokens": 320, "heads": 20, "page_size": 256},
        {"tokens": 1024, "heads": 4, "dtype": jnp.float32},
    ],
    ids=str,
)
@pytest.mark.parametrize("generation", ["v5e", "tpu7x"])
def test_other_shapes_compile(sizes, generation, tpu_mesh):
    assert_compiles_in_place(tpu_mesh(generation), **sizes)
