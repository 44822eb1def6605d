"""The whole TPU attention call, write, decode and prefill together, simulated on the CPU."""

from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from jax.experimental.pallas.tpu import force_tpu_interpret_mode

from sgl_jax.kernels.attention.tpu import ragged_paged_attention
from tests.kernels.attention.problems import (
    LAYER,
    Case,
    Program,
    build,
    cases,
    expected,
    make_batch,
    pack,
    with_new_tokens,
)
from tests.kernels.simulation import MODES, assert_close, simulate

PROGRAMS = (
    Program(page_size=16, kv_heads=2, group=2, max_drafts=2, rows=5),
    Program(page_size=64, kv_heads=1, group=8, dtype=jnp.bfloat16, sliding_window=50, sinks=True),
)
EIGHT_BITS = Program(page_size=32, group=2, dtype=jnp.bfloat16, cache_dtype=jnp.int8, max_drafts=2)


@lru_cache
def compiled(program, mode):
    @jax.jit
    def run(problem):
        with force_tpu_interpret_mode(MODES[mode]):
            return ragged_paged_attention(
                problem.q,
                problem.k,
                problem.v,
                problem.kv_cache,
                jnp.int32(LAYER),
                make_batch(problem, program),
                program.options._replace(sinks=problem.sinks),
            )

    return run


def check(case, mode):
    problem, program = build(case), case.program
    out, cache = simulate(compiled(program, mode), problem)
    want, _ = expected(problem, program)
    num_tokens = problem.q_lens.sum()
    assert_close(out[:num_tokens], want[:num_tokens], program.dtype)
    assert np.isfinite(np.asarray(out, np.float32)).all()
    np.testing.assert_array_equal(
        np.asarray(cache, np.float32), np.asarray(with_new_tokens(problem, program), np.float32)
    )


@pytest.mark.parametrize(
    ("program", "mode"),
    [
        pytest.param(*own, marks=pytest.mark.long)
        for own in (
            *((PROGRAMS[0], "eager"), (PROGRAMS[1], "lazy")),
            *((EIGHT_BITS, "lazy"), (EIGHT_BITS, "eager")),
        )
    ],
)
def test_a_mixed_step_agrees_with_float64(program, mode):
    drafts = 1 + program.max_drafts
    check(Case(program, [(100, drafts), (63, 1)], [(10, 24), (0, 17)], 1, seed=4), mode)


@pytest.mark.parametrize(
    ("program", "mode"),
    [(PROGRAMS[0], "eager"), pytest.param(PROGRAMS[1], "lazy", marks=pytest.mark.long)],
)
def test_a_step_without_decode_or_without_prefill_or_without_rows(program, mode):
    check(Case(program, [(100, 1), (15, 1), (0, 1)], [], 0, seed=5), mode)
    check(Case(program, [], [(0, 24), (0, 0), (31, 2)], 0, seed=6), mode)
    check(Case(program, [], [], 0, seed=7), mode)


@pytest.mark.parametrize("mode", ["lazy", pytest.param("eager", marks=pytest.mark.long)])
def test_keys_and_values_of_64_share_a_row_of_memory(mode):
    """The pool packs such heads; the answer is that of the plain layout."""
    program = Program(kv_heads=2, group=2, head_dim=64, max_drafts=2, rows=5, sliding_window=90)
    problem = build(Case(program, [(100, 3), (63, 1)], [(10, 24), (0, 17)], 1, seed=8))
    packed = problem._replace(kv_cache=pack(problem.kv_cache))
    out, cache = simulate(compiled(program, mode), packed)
    want, _ = expected(problem, program)
    num_tokens = problem.q_lens.sum()
    assert_close(out[:num_tokens], want[:num_tokens], program.dtype)
    assert np.isfinite(np.asarray(out)).all()
    np.testing.assert_array_equal(cache, pack(with_new_tokens(problem, program)))


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=80, deadline=None)
@given(case=cases(PROGRAMS))
def test_any_step_agrees_with_float64(mode, case):
    check(case, mode)
