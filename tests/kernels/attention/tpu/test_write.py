"""The TPU's KV write, simulated on the CPU: every slot of the cache is compared."""

from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from jax.experimental.pallas.tpu import force_tpu_interpret_mode

from sgl_jax.kernels.attention import xla
from sgl_jax.kernels.attention.cache_dtype import as_cached, new_slots
from sgl_jax.kernels.attention.tpu import write as module
from tests.kernels.attention.problems import (
    LAYER,
    Case,
    Program,
    build,
    cases,
    make_batch,
    with_new_tokens,
)
from tests.kernels.not_finite import assert_same_bits
from tests.kernels.simulation import EAGER, LAZY, MODES, NoWait, simulate
from tests.support.long import long, long_but

PROGRAMS = (
    Program(page_size=16, kv_heads=2, group=1, tokens=64),
    Program(page_size=64, kv_heads=1, group=1, head_dim=256, max_drafts=3, tokens=70),
    Program(page_size=16, kv_heads=2, group=1, dtype=jnp.bfloat16, max_drafts=3, tokens=64),
    Program(page_size=128, kv_heads=1, group=1, dtype=jnp.bfloat16, tokens=64, max_len=300),
)

EIGHT_BITS = Program(page_size=64, kv_heads=2, group=1, dtype=jnp.bfloat16, cache_dtype=jnp.int8)


def write(program, interpret):
    @jax.jit
    def run(problem):
        batch = make_batch(problem, program)
        with force_tpu_interpret_mode(interpret):
            return module.write_kv(problem.k, problem.v, problem.kv_cache, jnp.int32(LAYER), batch)

    return run


compiled = lru_cache(write)


def check(case, run):
    check_problem(build(case), case.program, run)


def check_problem(problem, program, run):
    """Old and new tokens, other layers, unused slots and the null page: all as they should be."""
    cache = simulate(run, problem)
    np.testing.assert_array_equal(
        np.asarray(cache, np.float32), np.asarray(with_new_tokens(problem, program), np.float32)
    )


def check_in_both_modes(case):
    """Trace anew, as a fault that was just seeded needs."""
    for mode in MODES.values():
        check(case, write(case.program, mode))


# By default in one mode: a fixed case is tried in both.
@pytest.mark.parametrize("mode", ["lazy", *long("eager")])
@settings(max_examples=4, deadline=None)
@given(case=cases(PROGRAMS))
def test_new_tokens_land_in_their_slots_and_nothing_else_changes(mode, case):
    check(case, compiled(case.program, MODES[mode]))


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=200, deadline=None)
@given(case=cases((*PROGRAMS, EIGHT_BITS)))
def test_new_tokens_land_in_their_slots_however_often_it_is_tried(mode, case):
    check(case, compiled(case.program, MODES[mode]))


MANY_TILES = Case(PROGRAMS[0], [(15, 1), (31, 1), (8, 1), (0, 1)], [(5, 24), (16, 24)], 0, seed=1)


@pytest.mark.parametrize("mode", ["eager", *long("lazy")])
@pytest.mark.parametrize("block_tokens", [16, *long(24)])
def test_a_step_of_several_blocks_of_tokens(block_tokens, mode, monkeypatch):
    """A row that crosses from one grid step to the next may share a tile with itself; the last
    block may hold fewer tokens than the others."""
    monkeypatch.setattr(module, "BLOCK_TOKENS", block_tokens)
    check(MANY_TILES, write(MANY_TILES.program, MODES[mode]))


@pytest.mark.parametrize("mode", ["lazy", *long("eager")])
def test_rows_on_the_null_page_write_nothing(mode):
    """As when buckets are compiled: every row's pages are the null page, and all tokens valid."""
    problem = build(MANY_TILES)
    problem = problem._replace(page_table=np.zeros_like(problem.page_table))
    cache = simulate(compiled(MANY_TILES.program, MODES[mode]), problem)
    np.testing.assert_array_equal(cache, problem.kv_cache)


@pytest.mark.parametrize("mode", ["eager", *long("lazy")])
def test_a_cache_of_8_bits_holds_its_greatest_value_for_what_is_beyond_it(mode):
    """Two tiles to a page; runs that begin and end anywhere in them, one that fills its tile."""
    problem = build(Case(EIGHT_BITS, [(31, 1), (64, 1), (0, 1)], [(5, 24), (32, 35)], 0, seed=2))
    problem = problem._replace(k=problem.k * problem.k.dtype.type(300))
    new_keys = np.asarray(problem.k, np.float32)
    assert (abs(new_keys) > 464).any()  # what a cast alone would make NaN
    check_problem(problem, EIGHT_BITS, compiled(EIGHT_BITS, MODES[mode]))


ANY_BITS = [
    Program(page_size=32, kv_heads=2, group=1, dtype=dtype, cache_dtype=cache)
    for dtype, cache in [
        (jnp.bfloat16, jnp.bfloat16),
        (jnp.bfloat16, jnp.int8),
        (jnp.float32, jnp.int8),
        (jnp.float32, jnp.bfloat16),
        (jnp.float32, jnp.float32),
    ]
]


def any_numbers(rng, shape, dtype):
    """Numbers of any bits; some near the bounds of 8 bits, infinite, NaN, or subnormal there."""
    size = np.dtype(dtype).itemsize
    numbers = rng.integers(0, 256, size=(*shape, size), dtype=np.uint8).view(dtype)[..., 0]
    bounds = [448, 449, 463, 464, 465, 480, 1e30, np.inf, np.nan, 0]
    bounds += [2.0**-6, 2.0**-7, 2.0**-7 * 1.01, 2.0**-10, 2.0**-6 * 0.99, 1e-30]
    some = rng.choice([*bounds, *np.negative(bounds)], size=shape).astype(dtype)
    return np.where(rng.random(shape) < 0.5, some, numbers)


@pytest.mark.parametrize(
    "program", ANY_BITS, ids=lambda own: f"{own.dtype.__name__}-{own.cache_dtype.__name__}"
)
def test_the_kernel_writes_the_bits_that_xla_writes(program):
    """NaN, infinities and overflow too; a NaN of 16 or 32 bits may be any of them."""
    problem = build(Case(program, [(31, 1), (64, 1), (0, 1)], [(5, 24), (32, 35)], 0, seed=2))
    rng = np.random.default_rng(3)
    k, v = (any_numbers(rng, x.shape, program.dtype) for x in (problem.k, problem.v))
    problem = problem._replace(k=k, v=v)
    got = np.asarray(simulate(compiled(program, LAZY), problem))
    want = np.asarray(by_xla(problem, program))
    if want.dtype == np.int8:
        np.testing.assert_array_equal(got[:, 1:], want[:, 1:])
    else:
        assert_same_bits(got[:, 1:], want[:, 1:])


@partial(jax.jit, static_argnames="program")
def by_xla(problem, program):
    batch = make_batch(problem, program)
    slots = new_slots(problem.k, problem.v, problem.kv_cache)
    return xla.write_slots(slots, problem.kv_cache, jnp.int32(LAYER), batch)


def test_8_bits_hold_nan_where_a_key_or_value_is_not_finite_and_saturate_elsewhere():
    """NaN lies in the same places of keys and values: the decode kernel looks at values alone."""
    k = jnp.array([1.0, np.nan, 2.0, -np.inf, 1e30, -465.0, np.inf, 2.0**-7, 0.9 * 2.0**-7])
    v = jnp.array([1.0, 2.0, -np.nan, 3.0, 464.0, 1.0, np.nan, -(2.0**-8), 448.0])
    keys, values = (np.asarray(x).view(jnp.float8_e4m3fn) for x in as_cached(jnp.int8, k, v))
    nan = np.nan
    np.testing.assert_array_equal(keys.astype(float), [1, nan, nan, nan, 448, -448, nan, 0, 0])
    np.testing.assert_array_equal(values.astype(float), [1, nan, nan, nan, 448, 1, nan, 0, 448])
    assert {*keys.view(np.uint8)[[1, 2, 3, 6]], *values.view(np.uint8)[[1, 2, 3, 6]]} == {0x7F}


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (Program(page_size=8, dtype=jnp.bfloat16), "multiple of 16 for a bfloat16 cache, got 8"),
        (EIGHT_BITS._replace(page_size=16), "multiple of 32 for a fp8_e4m3 cache, got 16"),
    ],
)
def test_a_page_of_less_than_a_tile_is_refused(program, words):
    problem = build(Case(program, [(3, 1)], [], 0, seed=0))
    with pytest.raises(ValueError, match=words):
        write(program, EAGER)(problem)


def forget_read_wait(monkeypatch):
    read = module._read
    monkeypatch.setattr(module, "_read", lambda *args: NoWait(read(*args)))


def forget_write_wait(monkeypatch):
    write = module._write
    monkeypatch.setattr(module, "_write", lambda *args: NoWait(write(*args)))


def change_another_buffer(monkeypatch):
    change = module._change_tile
    monkeypatch.setattr(module, "_change_tile", lambda kernel, run: change(kernel, run // 2))


def write_whole_tiles_without_reading(monkeypatch):
    monkeypatch.setattr(module._Kernel, "is_partial", lambda *_: False)


def write_another_page(monkeypatch):
    tile_of = module._tile_of

    def wrong(kernel, run):
        runs = kernel.runs._replace(page=kernel.runs.slot)
        return tile_of(kernel._replace(runs=runs), run)

    monkeypatch.setattr(module, "_tile_of", wrong)


def start_a_row_late(monkeypatch):
    find = module._find_runs

    def wrong(tokens, runs, *sizes):
        return find(tokens._replace(positions=tokens.token_rows), runs, *sizes)

    monkeypatch.setattr(module, "_find_runs", wrong)


FAULTS = (
    forget_read_wait,
    forget_write_wait,
    change_another_buffer,
    write_whole_tiles_without_reading,
    write_another_page,
    start_a_row_late,
)


# Each traces and compiles the kernel anew.
@pytest.mark.parametrize("fault", long_but(FAULTS, forget_read_wait, write_another_page))
def test_a_seeded_fault_is_noticed(fault, monkeypatch):
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        check_in_both_modes(MANY_TILES)
