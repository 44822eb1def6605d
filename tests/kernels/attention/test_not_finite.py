"""No row of attention changes another row's result, whatever values it, or unused memory, has."""

from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.tpu import force_tpu_interpret_mode

from sgl_jax.kernels.attention import tpu, xla
from tests.kernels.attention.problems import LAYER, Case, Program, build, make_batch
from tests.kernels.not_finite import BAD, assert_same_bits, check_rows, row_tokens
from tests.kernels.simulation import LAZY, simulate
from tests.support.long import long, long_but

PROGRAMS = (
    Program(kv_heads=2, group=2, max_drafts=2),
    Program(kv_heads=2, group=2, sliding_window=40, sinks=True),
    Program(kv_heads=2, group=2, page_size=32, dtype=jnp.bfloat16, soft_cap=5.0),
    Program(kv_heads=2, group=2, page_size=32, dtype=jnp.bfloat16, cache_dtype=jnp.int8),
)
ROWS = {"decode": 1, "short decode": 2, "prefill": 4}


def name_of(program):
    names = [np.dtype(program.cache_dtype or program.dtype).name]
    return "-".join(names + ["window"] * (program.sliding_window is not None))


@lru_cache
def compiled(program, how):
    @jax.jit
    def run(problem):
        options = program.options._replace(sinks=problem.sinks)
        arrays = (problem.q, problem.k, problem.v, problem.kv_cache, jnp.int32(LAYER))
        batch = make_batch(problem, program)
        if how == "xla":
            return xla.ragged_paged_attention(*arrays, batch, options)
        with force_tpu_interpret_mode(LAZY):
            return tpu.ragged_paged_attention(*arrays, batch, options)

    return run if how == "xla" else lambda problem: simulate(run, problem)


def case_of(program):
    """Four decode rows, which share turns of XLA's loop, and prompts after them."""
    drafts = 1 + program.max_drafts
    return Case(program, [(100, drafts), (50, 1), (17, 1), (63, 1)], [(10, 20), (0, 17)], 0, 5)


def with_unused(problem, program, value):
    """The problem with `value` wherever no token lies: unused slots, pages, and the null page."""
    cache = problem.kv_cache
    is_unused = np.isnan(program.numbers(cache))
    if cache.dtype == np.int8:
        stored = np.int8(0x7F) if value else np.int8(0)
        return problem._replace(kv_cache=np.where(is_unused, stored, cache))
    return problem._replace(kv_cache=np.where(is_unused, cache.dtype.type(value), cache))


def with_new(problem, row, names, value):
    """The problem with `value` in some inputs of a row's tokens."""
    changed = {}
    for name in names:
        changed[name] = np.array(getattr(problem, name))
        changed[name][row_tokens(problem.q_lens, row)] = value
    return problem._replace(**changed)


def with_cached(problem, program, row, value):
    """The problem with `value` in the last cached token of a row, in one KV head's K and V."""
    position, cache = int(problem.kv_starts[row]) - 1, np.array(problem.kv_cache)
    page, slot = (
        problem.page_table[row, position // program.page_size],
        position % program.page_size,
    )
    stored = np.int8(0x7F) if cache.dtype == np.int8 else value
    cache[LAYER, page, [0, program.kv_heads], slot, 3] = stored
    return problem._replace(kv_cache=cache)


@pytest.mark.parametrize("how", ["xla", *long("pallas")])
@pytest.mark.parametrize("program", long_but(PROGRAMS, PROGRAMS[1], PROGRAMS[3]), ids=name_of)
def test_a_row_that_is_not_finite_leaves_the_others_alone(program, how):
    for row in ROWS.values():
        for value in BAD:
            check_row(program, how, row, value, ("qkv", "kv", "v"))


@pytest.mark.parametrize(
    ("program", "row"),
    [(PROGRAMS[3], "prefill"), pytest.param(PROGRAMS[0], "decode", marks=pytest.mark.long)],
)
def test_a_row_that_is_nan_leaves_the_others_alone_in_the_kernels(program, row):
    check_row(program, "pallas", ROWS[row], np.nan, ("qkv",))


@pytest.mark.parametrize("row", long_but(ROWS, "decode"))
def test_a_kernel_sees_nan_in_a_cache_of_8_bits(row):
    """Decode reads such a cache by moving bits, which makes a number of NaN."""
    check_row(PROGRAMS[3], "pallas", ROWS[row], np.nan, ())


def check_row(program, how, row, value, inputs):
    """A value in a row's last cached token; then, in turn, in each of these inputs of its own."""
    clean = with_unused(build(case_of(program)), program, 0)
    run = compiled(program, how)
    want, _ = run(clean)
    for bad in [
        with_cached(clean, program, row, value),
        *(with_new(clean, row, names, value) for names in inputs),
    ]:
        got, _ = run(bad)
        check_rows(got, want, clean.q_lens, row)


@pytest.mark.parametrize("how", ["xla", *long("pallas")])
@pytest.mark.parametrize("program", long_but(PROGRAMS, PROGRAMS[1], PROGRAMS[3]), ids=name_of)
def test_memory_without_tokens_is_selected_away(program, how):
    """Slots of a partly filled page that another request left behind, free pages, the null page."""
    problem = build(case_of(program))
    run = compiled(program, how)
    clean = with_unused(problem, program, 0)
    want, _ = run(clean)
    num_tokens = clean.q_lens.sum()
    for value in BAD:
        got, _ = run(with_unused(problem, program, value))
        assert_same_bits(got[:num_tokens], want[:num_tokens])


@pytest.mark.parametrize("program", long_but(PROGRAMS, PROGRAMS[1], PROGRAMS[3]), ids=name_of)
def test_what_padding_writes_to_the_null_page_is_not_read_in_the_next_step(program):
    clean = with_unused(build(case_of(program)), program, 0)
    run, padding = compiled(program, "xla"), slice(int(clean.q_lens.sum()), None)
    bad = clean
    for name in "qkv":
        array = np.array(getattr(bad, name))
        array[padding] = np.nan
        bad = bad._replace(**{name: array})
    want, cache = run(clean)
    got, bad_cache = run(bad)
    assert_same_bits(got[: padding.start], want[: padding.start])
    assert np.isnan(program.numbers(np.asarray(bad_cache))[LAYER, 0]).any()
    want, _ = run(clean._replace(kv_cache=np.asarray(cache)))
    got, _ = run(clean._replace(kv_cache=np.asarray(bad_cache)))
    assert_same_bits(got[: padding.start], want[: padding.start])
