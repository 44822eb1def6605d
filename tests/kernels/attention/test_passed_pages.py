"""Pages that a window has passed are not read: they are another's, here NaN."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.tpu import force_tpu_interpret_mode

from sgl_jax.kernels.attention import tpu, xla
from tests.kernels.attention.problems import (
    LAYER,
    Case,
    Program,
    build,
    expected,
    make_batch,
    without_passed_pages,
)
from tests.kernels.simulation import MODES, assert_close, simulate
from tests.support.long import long

PROGRAMS = (
    Program(page_size=16, kv_heads=2, group=4, sliding_window=40),
    Program(page_size=16, kv_heads=1, group=8, sliding_window=17, sinks=True, max_drafts=2),
    Program(page_size=64, kv_heads=2, group=2, sliding_window=64, max_len=640, dtype=jnp.bfloat16),
)
# Rows whose window begins in the midst of a page, at its border, or before their first token.
DECODES = ((150, 1), (55, 1), (56, 1), (20, 1))
PREFILLS = ((100, 24), (0, 17))


def attend(program, how):
    @jax.jit
    def run(problem):
        options = program.options._replace(sinks=problem.sinks)
        arrays = (problem.q, problem.k, problem.v, problem.kv_cache, jnp.int32(LAYER))
        batch = make_batch(problem, program)
        if how == "xla":
            return xla.ragged_paged_attention(*arrays, batch, options)
        with force_tpu_interpret_mode(MODES[how]):
            return tpu.ragged_paged_attention(*arrays, batch, options)

    return run


# The simulation finds races of these kernels elsewhere.
@pytest.mark.parametrize("how", ["xla", *long("lazy", "eager")])
@pytest.mark.parametrize(
    "program",
    [PROGRAMS[0], *long(*PROGRAMS[1:])],
    ids=lambda program: f"window{program.sliding_window}",
)
def test_what_a_window_has_passed_is_not_read(program, how):
    drafts = 1 + program.max_drafts
    last = program.max_len - 30
    case = Case(program, [(last, drafts), *DECODES[:3]], list(PREFILLS), 0, seed=11)
    problem = build(case)
    poisoned = without_passed_pages(problem, program)
    assert (poisoned.page_table != problem.page_table).sum() > 8
    run = attend(program, how)
    out = run(poisoned)[0] if how == "xla" else simulate(run, poisoned)[0]
    want, _ = expected(problem, program)
    num_tokens = problem.q_lens.sum()
    assert np.isfinite(np.asarray(out[:num_tokens], np.float32)).all()
    assert_close(out[:num_tokens], want[:num_tokens], program.dtype)
