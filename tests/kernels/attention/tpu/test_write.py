"""The TPU's KV write, simulated on the CPU: every slot of the cache is compared."""

from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from jax.experimental.pallas.tpu import force_tpu_interpret_mode

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
from tests.kernels.simulation import EAGER, MODES, NoWait, simulate
from tests.long import long, long_but

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
@settings(max_examples=500, deadline=None)
@given(case=cases((*PROGRAMS, EIGHT_BITS)))
def test_new_tokens_land_in_their_slots_however_often_it_is_tried(mode, case):
    check(case, compiled(case.program, MODES[mode]))


MANY_TILES = Case(PROGRAMS[0], [(15, 1), (31, 1), (8, 1), (0, 1)], [(5, 24), (16, 24)], 0, seed=1)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("block_tokens", [16, 24])
def test_a_step_of_several_blocks_of_tokens(block_tokens, mode, monkeypatch):
    """A row that crosses from one grid step to the next may share a tile with itself; the last
    block may hold fewer tokens than the others."""
    monkeypatch.setattr(module, "BLOCK_TOKENS", block_tokens)
    check(MANY_TILES, write(MANY_TILES.program, MODES[mode]))


@pytest.mark.parametrize("mode", MODES)
def test_rows_on_the_null_page_write_nothing(mode):
    """As when buckets are compiled: every row's pages are the null page, and all tokens valid."""
    problem = build(MANY_TILES)
    problem = problem._replace(page_table=np.zeros_like(problem.page_table))
    cache = simulate(compiled(MANY_TILES.program, MODES[mode]), problem)
    np.testing.assert_array_equal(cache, problem.kv_cache)


@pytest.mark.parametrize("mode", MODES)
def test_a_cache_of_8_bits_holds_its_greatest_value_for_what_is_beyond_it(mode):
    """Two tiles to a page; runs that begin and end anywhere in them, one that fills its tile."""
    problem = build(Case(EIGHT_BITS, [(31, 1), (64, 1), (0, 1)], [(5, 24), (32, 35)], 0, seed=2))
    problem = problem._replace(k=problem.k * problem.k.dtype.type(300))
    new_keys = np.asarray(problem.k, np.float32)
    assert (abs(new_keys) > 464).any()  # what a cast alone would make NaN
    check_problem(problem, EIGHT_BITS, compiled(EIGHT_BITS, MODES[mode]))


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
@pytest.mark.parametrize(
    "fault", long_but(FAULTS, forget_read_wait, write_another_page, start_a_row_late)
)
def test_a_seeded_fault_is_noticed(fault, monkeypatch):
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        check_in_both_modes(MANY_TILES)
