"""Latent attention's TPU kernels, simulated on the CPU, against float64."""

from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from jax.experimental.pallas.tpu import force_tpu_interpret_mode

from sgl_jax.kernels.attention.tpu import prefill, query_blocks, stacks, write
from sgl_jax.kernels.attention.tpu.shared import Pages
from sgl_jax.kernels.attention.tpu.tuned import DecodeBlocks, PrefillBlocks
from sgl_jax.kernels.latent_attention import choice, index_scores, tpu
from sgl_jax.kernels.pallas_tpu import wait
from tests.kernels.attention.problems import LAYER, Case, as_float8, cases
from tests.kernels.latent_attention.problems import (
    SCALE,
    LatentProgram,
    build,
    expected,
    make_batch,
)
from tests.kernels.simulation import MODES, SimulationError, simulate
from tests.support.long import long

MAX_CHUNK = 40
# Values in all lanes of a row, and in some; heads that do not fill a tile.
PLAIN = LatentProgram(heads=4, rank=128, rope_dim=16, rows=5, max_len=280, tokens=96)
PROGRAMS = (
    PLAIN,
    LatentProgram(heads=6, max_drafts=2, rows=5, page_size=64, max_len=280, tokens=96),
)
# Keys and values of a head in whole rows of lanes: such steps prefill in the expanded form.
EXPANDED = PLAIN._replace(nope_dim=128, value_dim=128)
BFLOAT16 = PLAIN._replace(heads=8, dtype=jnp.bfloat16, max_drafts=1)
EIGHT_BITS = BFLOAT16._replace(page_size=32, cache_dtype=jnp.int8)
# Rows shorter and longer than `top_k`; their keys in several blocks.
INDEXED = PLAIN._replace(rank=32, index_heads=8, key_dim=24, top_k=50, max_drafts=2)
INDEXED_16 = INDEXED._replace(heads=8, dtype=jnp.bfloat16, key_dim=128, page_size=32)
INDEXED_8 = INDEXED_16._replace(cache_dtype=jnp.int8)
TOLERANCE = {jnp.dtype(jnp.float32): 2e-5, jnp.dtype(jnp.bfloat16): 0.03}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Rows of a few hundred keys have several blocks, and queries of several parts."""
    monkeypatch.setattr(tpu, "DECODE_BLOCKS", DecodeBlocks(block_keys=64, part_keys=32))
    monkeypatch.setattr(stacks, "TURN_KEYS", 32)
    blocks = PrefillBlocks(32, 16, keys=256, part_keys=128, heads=1, parts=2)
    monkeypatch.setattr(tpu, "latent_prefill_blocks", lambda *_: blocks)
    monkeypatch.setattr(tpu, "expanded_prefill_blocks", lambda *_: blocks)
    monkeypatch.setattr(tpu, "EXPANDED_HEADS", 2)
    monkeypatch.setattr(tpu, "EXPANDED_TOKENS", 96)
    monkeypatch.setattr(index_scores, "BLOCK_KEYS", 128)
    monkeypatch.setattr(index_scores, "PART_KEYS", 64)


def attend(program, mode):
    @jax.jit
    def run(problem):
        with force_tpu_interpret_mode(MODES[mode]):
            return tpu.latent_attention(
                problem.queries,
                problem.latents,
                problem.up,
                problem.kv_cache,
                jnp.int32(LAYER),
                make_batch(problem, program),
                SCALE,
                problem.static_index(program),
            )

    return run


compiled = lru_cache(attend)


def check(case, run):
    """Results, and all of the cache but the null page: other layers and unused slots too."""
    problem, program = build(case), case.program
    out, cache, _ = simulate(run, problem)
    want, want_cache = expected(problem, program)
    num_tokens = problem.q_lens.sum()
    found = np.asarray(out, np.float64)
    assert np.isfinite(found).all()
    atol = TOLERANCE[jnp.dtype(program.dtype)]
    np.testing.assert_allclose(found[:num_tokens], want[:num_tokens], rtol=0, atol=atol)
    cached = program.numbers(np.asarray(cache))[:, 1:]
    np.testing.assert_allclose(cached, want_cache[:, 1:], rtol=0, atol=1e-6)


# Rows of several blocks of keys, two blocks of queries, a short row, an empty one.
MIXED = Case(PLAIN, [(150, 1), (63, 1)], [(190, 40), (0, 0), (0, 17)], 1, seed=4)


@pytest.mark.parametrize(
    ("program", "mode"),
    [
        pytest.param(PLAIN, "eager", id="absorbed-eager"),
        pytest.param(EXPANDED, "lazy", id="expanded-lazy"),
        pytest.param(PLAIN, "lazy", id="absorbed-lazy", marks=pytest.mark.long),
        pytest.param(EXPANDED, "eager", id="expanded-eager", marks=pytest.mark.long),
    ],
)
def test_a_mixed_step_agrees_with_float64(program, mode):
    check(MIXED._replace(program=program), compiled(program, mode))


@pytest.mark.parametrize(
    ("program", "mode"),
    [(EIGHT_BITS, "eager"), pytest.param(BFLOAT16, "lazy", marks=pytest.mark.long)],
)
def test_rows_with_drafts_in_narrow_types(program, mode):
    check(Case(program, [(150, 2), (63, 1)], [(100, 20)], 1, seed=5), compiled(program, mode))


@pytest.mark.long
@pytest.mark.parametrize(
    ("program", "mode"),
    [(INDEXED, "eager"), (INDEXED, "lazy"), (INDEXED_16, "eager"), (INDEXED_8, "lazy")],
)
def test_chosen_tokens_are_attended_to(program, mode):
    rows = Case(program, [(150, 3), (230, 1), (0, 1)], [(190, 40)], 1, seed=4)
    check(rows, compiled(program, mode))
    short = Case(program, [(30, 3)], [(0, 40)], 0, seed=4)
    check(short, compiled(program, mode))


@pytest.mark.parametrize("mode", long("lazy", "eager"))
def test_a_step_without_decode_or_without_prefill_or_without_rows(mode):
    program = PROGRAMS[1]
    check(Case(program, [(100, 3), (15, 1), (0, 1)], [], 0, seed=5), compiled(program, mode))
    check(Case(program, [], [(0, 24), (0, 0), (31, 2)], 0, seed=6), compiled(program, mode))
    check(Case(program, [], [], 0, seed=7), compiled(program, mode))


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=100, deadline=None)
@given(case=cases((*PROGRAMS, EXPANDED, BFLOAT16, EIGHT_BITS), max_chunk=MAX_CHUNK))
def test_any_step_agrees_with_float64(mode, case):
    check(case, compiled(case.program, mode))


def test_a_page_of_less_than_a_tile_is_refused():
    program = BFLOAT16._replace(page_size=8)
    with pytest.raises(ValueError, match="multiple of 16 for a bfloat16 cache, got 8"):
        attend(program, "lazy")(build(Case(program, [(3, 1)], [], 0, seed=0)))


def no_wait_for_pages(pages, block):
    """Compute on what the buffer holds, arrived or not."""


def a_key_too_many_in_decode(kernel, row, position, seen=stacks.seen_keys):
    return seen(kernel, row, position - 1)


def a_key_too_many_in_prefill(kernel, work, seen=query_blocks.seen_keys):
    return seen(kernel, work._replace(first=work.first + 1))


def scores_in_powers_of_e(scores, options):
    return scores * options.scale


def the_same_turn_twice(turns):
    return [(turn, turn) for turn in turns]


def values_of_unused_slots(*_):
    """Leave NaN where no token lies."""


def results_not_waited_for(kernel, block, do, out_copies=prefill.out_copies):  # type: ignore[attr-defined]
    out_copies(kernel, block, lambda copy: None if do is wait else do(copy))


def the_next_page(kernel, row, block, at, act, own=index_scores._Kernel.for_each_page):
    own(kernel, row, block + 1, at, act)


def write_another_page(kernel, run, tile_of=write._tile_of):
    runs = kernel.runs._replace(page=kernel.runs.slot)
    return tile_of(kernel._replace(runs=runs), run)


@pytest.mark.long
@pytest.mark.parametrize(
    ("module", "part", "fault"),
    [
        (Pages, "wait", no_wait_for_pages),
        *(
            pytest.param(*own, marks=pytest.mark.long)
            for own in (
                (stacks, "with_following", the_same_turn_twice),
                (stacks, "seen_keys", a_key_too_many_in_decode),
                (stacks, "scaled", scores_in_powers_of_e),
                (query_blocks, "seen_keys", a_key_too_many_in_prefill),
                (query_blocks, "scaled", scores_in_powers_of_e),
                (Pages, "clear_values", values_of_unused_slots),
                (write, "_tile_of", write_another_page),
            )
        ),
    ],
)
def test_a_seeded_fault_gives_wrong_results(module, part, fault, monkeypatch):
    monkeypatch.setattr(module, part, fault)
    with pytest.raises(AssertionError):
        check(MIXED, attend(PLAIN, "lazy"))


@pytest.mark.long
@pytest.mark.parametrize(
    ("module", "part", "fault"),
    [
        (Pages, "wait", no_wait_for_pages),
        pytest.param(prefill, "out_copies", results_not_waited_for, marks=pytest.mark.long),
    ],
)
def test_a_missing_wait_is_a_race(module, part, fault, monkeypatch):
    monkeypatch.setattr(module, part, fault)
    with pytest.raises(SimulationError, match="race"):
        check(MIXED, attend(PLAIN, "eager"))


@pytest.mark.long
def test_keys_made_for_another_head_are_noticed(monkeypatch):
    make = query_blocks.keys_and_values
    monkeypatch.setattr(
        query_blocks, "keys_and_values", lambda kernel, work, head: make(kernel, work, 0)
    )
    with pytest.raises(AssertionError):
        check(MIXED._replace(program=EXPANDED), attend(EXPANDED, "lazy"))


def check_scores(mode, cache_dtype=jnp.float32):
    """Score whole numbers with rows of several blocks, of one, and without keys."""
    rng, page_size, lens = np.random.default_rng(0), 32, np.array([150, 0, 33, 128], np.int32)
    queries, weights = rng.integers(-3, 4, (4, 2, 8, 24)), rng.integers(-3, 4, (4, 2, 8))
    keys, cache = rng.integers(-3, 4, (4, 160, 24)), np.full((2, 21, 1, page_size, 256), np.nan)
    table = np.where(np.arange(5) * page_size < lens[:, None], 1 + np.arange(20).reshape(4, 5), -1)
    for row, page in np.argwhere(table > 0):
        cache[LAYER, table[row, page]] = 0
        own = keys[row, page * page_size : (page + 1) * page_size]
        cache[LAYER, table[row, page], 0, :, 128:152] = own
    numbers = as_float8(cache).view(np.int8) if cache_dtype == jnp.int8 else cache
    arrays = np.float32(queries), np.float32(weights), table, lens
    arrays = (*map(jnp.asarray, arrays), jnp.asarray(numbers, cache_dtype))

    @jax.jit
    def run(arrays):
        with force_tpu_interpret_mode(MODES[mode]):
            return index_scores.index_scores(*arrays, jnp.int32(LAYER))

    found = np.asarray(simulate(run, arrays))
    products = np.maximum(np.einsum("gnhd,gkd->gnhk", queries, keys), 0)
    expected = np.einsum("gnhk,gnh->gnk", products, weights)
    for row, length in enumerate(lens):
        assert found[row, :, :length].tolist() == expected[row, :, :length].tolist()


@pytest.mark.parametrize(
    "case", [("eager", jnp.float32), *long(("lazy", jnp.bfloat16), ("lazy", jnp.int8))], ids=str
)
def test_scores_of_cached_keys_are_those_of_the_indexer(case):
    check_scores(*case)


@pytest.mark.parametrize("sizes", [(300, 7), *long((2500, 300), (17000, 2048))], ids=str)
def test_the_greatest_scores_are_found_with_ties_and_what_is_not_finite(sizes):
    """In one group of blocks and in several; the places of a stable sort."""
    n, k = sizes
    rng = np.random.default_rng(k)
    scores = rng.integers(-4, 4, (4, n)) * rng.choice([0.0, -1, 1e-30, 3], (4, 1))
    scores[0, rng.integers(0, n, 9)] = np.nan
    scores[1, rng.integers(0, n, n // 2)] = -np.inf
    scores[2] = rng.normal(size=n)
    scores[3, k // 2 :] = -np.inf
    with force_tpu_interpret_mode(MODES["lazy"]):
        found = np.asarray(choice.positions_of_greatest(jnp.asarray(scores, jnp.float32), k))
    for own, places in zip(scores.astype(np.float32), found, strict=True):
        ranked = np.where(np.isnan(own), np.inf, own)
        order = np.argsort(-ranked, kind="stable")[:k]
        right = np.sort(order[ranked[order] > -np.inf])
        assert places[: len(right)].tolist() == right.tolist()
        assert (places[len(right) :] == -1).all()


def test_keys_of_another_block_are_noticed(monkeypatch):
    monkeypatch.setattr(index_scores._Kernel, "for_each_page", the_next_page)
    with pytest.raises(AssertionError):
        check_scores("lazy")


@pytest.mark.long
def test_a_block_of_keys_that_is_not_waited_for_is_a_race(monkeypatch):
    def started_only(kernel, row, block, at, act, own=index_scores._Kernel.for_each_page):
        own(kernel, row, block, at, lambda copy: None if act is wait else act(copy))

    monkeypatch.setattr(index_scores._Kernel, "for_each_page", started_only)
    with pytest.raises(SimulationError, match="race"):
        check_scores("eager")
