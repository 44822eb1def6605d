"""The TPU's own compiler accepts latent attention for every generation of chip, and in place."""

import jax.numpy as jnp
import pytest

from sgl_jax.kernels.attention.batch import AttentionBatch
from sgl_jax.kernels.latent_attention.latents import (
    LatentQueries,
    UpProjections,
    latent_row_size,
)
from sgl_jax.kernels.latent_attention.tpu import latent_attention
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
