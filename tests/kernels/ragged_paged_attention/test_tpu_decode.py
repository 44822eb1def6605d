"""Decode attention for TPU, simulated on the CPU, against float64."""

from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from sgl_jax.kernels.ragged_paged_attention import tpu_decode
from tests.kernels.ragged_paged_attention.interpret_harness import (
    LAYER,
    MODES,
    Case,
    Program,
    SimulationError,
    assert_close,
    build,
    cases,
    expected,
    make_batch,
    simulate,
    with_new_tokens,
)

PROGRAMS = (
    Program(page_size=16, kv_heads=2, group=4, rows=6, tokens=32),
    Program(page_size=64, kv_heads=1, group=3, max_drafts=2, sliding_window=40, rows=5, tokens=32),
    Program(
        page_size=16,
        kv_heads=8,
        group=1,
        soft_cap=2.0,
        sinks=True,
        dtype=jnp.bfloat16,
        rows=5,
        tokens=32,
        max_drafts=3,
        sliding_window=70,
    ),
)
BLOCK_PAGES = {16: 4, 64: 2}


def attend(program, interpret):
    """The kernel of a program, compiled; it reads the cache as it is after this step's write."""

    @jax.jit
    def run(problem, cache):
        batch = make_batch(problem, program)
        return tpu_decode.decode_attention(
            problem.q,
            cache,
            jnp.int32(LAYER),
            batch,
            sinks=problem.sinks,
            block_pages=BLOCK_PAGES[program.page_size],
            interpret=interpret,
            **program.options,
        )

    return run


compiled = lru_cache(attend)


def check(case, run):
    problem, program = build(case), case.program
    out = simulate(run, problem, with_new_tokens(problem, program))
    want, _ = expected(problem, program)
    decode_tokens = problem.q_lens[: problem.num_decode].sum()
    assert_close(out[:decode_tokens], want[:decode_tokens], program.dtype)
    np.testing.assert_array_equal(out[decode_tokens:], problem.q[decode_tokens:])


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=12, deadline=None)
@given(case=cases(PROGRAMS, max_prefills=1, max_chunk=4))
def test_decode_rows_agree_with_float64_without_races(mode, case):
    check(case, compiled(case.program, MODES[mode]))
