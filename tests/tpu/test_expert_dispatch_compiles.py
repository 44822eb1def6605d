"""The TPU's own compiler accepts the moves of experts' lines, for few tokens and for many."""

from functools import partial

import jax.numpy as jnp
import pytest

from sgl_jax.core.layer_configs import ExpertChoice
from sgl_jax.kernels.expert_dispatch.lines import UNDIVIDED_TOKENS, Router
from sgl_jax.kernels.expert_dispatch.tpu import tpu_add, tpu_choose, tpu_gate, tpu_gather, tpu_sort
from sgl_jax.layers.moe import silu_gated
from tests.tpu.compiling import MAX_COMPILE_S, compile_on, generations, num_kernels, struct

EXPERTS = 128
CHOICE = ExpertChoice(top_k=8, norm_topk_prob=True)


def routed(num_own, x, norm, matrices, layer, is_token, first):
    """All that a chip does with lines of its experts, but their products."""
    router = Router(CHOICE, 1e-6, False, norm, matrices, bias=None)
    x, weights, experts = tpu_choose(x, router, layer, is_token)
    lines = tpu_sort(experts, first, num_own)
    gathered = tpu_gather(x, lines)
    return tpu_add(tpu_gate(silu_gated, gathered, gathered, lines), weights, lines)


def assert_compiles(mesh, num_tokens, width=2048, dtype=jnp.bfloat16, num_own=32):
    x, norm = struct(dtype, num_tokens, width), struct(dtype, width)
    matrices, number = struct(dtype, 4, width, EXPERTS), struct(jnp.int32)
    is_token = struct(jnp.bool_, num_tokens)
    compiled, seconds = compile_on(
        mesh, partial(routed, num_own), x, norm, matrices, number, is_token, number
    )
    assert num_kernels(compiled) == 5
    assert " sort(" not in compiled.as_text()
    assert seconds < MAX_COMPILE_S


@pytest.mark.parametrize("generation", generations("v5e"))
def test_every_generation_moves_the_lines_of_a_decode_step(generation, tpu_mesh):
    assert_compiles(tpu_mesh(generation), 256)


@pytest.mark.parametrize("generation", generations("v5e"))
@pytest.mark.parametrize(
    ("num_tokens", "width", "dtype", "num_own"),
    [
        pytest.param(1, 2048, jnp.bfloat16, 32, marks=pytest.mark.long),
        pytest.param(64, 2048, jnp.bfloat16, 1, marks=pytest.mark.long),
        pytest.param(UNDIVIDED_TOKENS, 2944, jnp.bfloat16, 32, marks=pytest.mark.long),
        pytest.param(UNDIVIDED_TOKENS, 7168, jnp.bfloat16, 128, marks=pytest.mark.long),
        (64, 2048, jnp.float32, 32),
    ],
)
def test_other_shapes_compile(num_tokens, width, dtype, num_own, generation, tpu_mesh):
    assert_compiles(tpu_mesh(generation), num_tokens, width, dtype, num_own)
