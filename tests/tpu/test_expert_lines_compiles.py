"""The TPU's own compiler accepts the moves of experts' lines, for few tokens and for many."""

import jax.numpy as jnp
import pytest

from sgl_jax.kernels.expert_lines.lines import UNDIVIDED_TOKENS
from sgl_jax.kernels.expert_lines.tpu import tpu_add, tpu_choose, tpu_gate, tpu_gather, tpu_sort
from sgl_jax.layers.moe import silu_gated
from sgl_jax.planner.topology import CHIPS
from tests.tpu.compiling import MAX_COMPILE_S, compile_on, generations, num_kernels, struct

TOP_K, EXPERTS, OWN = 8, 128, 32


def routed(x, logits, is_token, first):
    """All that a chip does with lines of its experts, but their products."""
    weights, experts = tpu_choose(logits, is_token, TOP_K, norm_topk_prob=True)
    lines = tpu_sort(experts, first, OWN)
    gathered = tpu_gather(x, lines)
    return tpu_add(tpu_gate(silu_gated, gathered, gathered, lines), weights, lines)


def assert_compiles(mesh, num_tokens, width=2048, dtype=jnp.bfloat16):
    x, logits = struct(dtype, num_tokens, width), struct(jnp.float32, num_tokens, EXPERTS)
    is_token, first = struct(jnp.bool_, num_tokens), struct(jnp.int32)
    compiled, seconds = compile_on(mesh, routed, x, logits, is_token, first)
    assert num_kernels(compiled) == 5
    assert " sort(" not in compiled.as_text()
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
