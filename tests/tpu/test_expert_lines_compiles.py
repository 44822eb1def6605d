"""The TPU's own compiler accepts the moves of experts' lines, for few tokens and for many."""

import jax.numpy as jnp
import pytest

from sgl_jax.kernels.expert_lines.lines import UNDIVIDED_TOKENS, ExpertLines
from sgl_jax.kernels.expert_lines.tpu import tpu_add, tpu_gate, tpu_gather
from sgl_jax.layers.moe import silu_gated
from sgl_jax.planner.topology import CHIPS
from tests.tpu.compiling import MAX_COMPILE_S, compile_on, generations, num_kernels, struct

TOP_K = 8


def moved(x, weights, lines):
    gathered = tpu_gather(x, lines)
    return tpu_add(tpu_gate(silu_gated, gathered, gathered, lines), weights, lines)


def assert_compiles(mesh, num_tokens, width=2048, dtype=jnp.bfloat16):
    num_lines = TOP_K * num_tokens
    lines = ExpertLines(
        struct(jnp.int32, num_lines), struct(jnp.int32, TOP_K, num_tokens), struct(jnp.int32, 32)
    )
    weights = struct(jnp.float32, TOP_K, num_tokens)
    x = struct(dtype, num_tokens, width)
    compiled, seconds = compile_on(mesh, moved, x, weights, lines)
    assert num_kernels(compiled) == 3
    assert seconds < MAX_COMPILE_S


@pytest.mark.parametrize("generation", CHIPS)
def test_every_generation_moves_the_lines_of_a_decode_step(generation, tpu_mesh):
    assert_compiles(tpu_mesh(generation), 256)


@pytest.mark.parametrize("generation", generations("v5e"))
@pytest.mark.parametrize(
    ("num_tokens", "width", "dtype"),
    [
        (1, 2048, jnp.bfloat16),
        (UNDIVIDED_TOKENS, 2944, jnp.bfloat16),
        (UNDIVIDED_TOKENS, 7168, jnp.bfloat16),
        (64, 2048, jnp.float32),
    ],
)
def test_other_shapes_compile(num_tokens, width, dtype, generation, tpu_mesh):
    assert_compiles(tpu_mesh(generation), num_tokens, width, dtype)
