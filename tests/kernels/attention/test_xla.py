"""The XLA attention against float64, on ragged batches drawn at random."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_jax.kernels.attention.batch import AttentionBatch, ScoreOptions
from sgl_jax.kernels.attention.xla import attend_invariantly, ragged_paged_attention
from tests.kernels.attention import problems, reference
from tests.kernels.attention.problems import as_float8
from tests.support.long import long

LAYERS, PAGES, HEAD_DIM, KV_HEADS = 2, 2048, 8, 2
ROWS, TOKENS = 6, 320  # buckets, so that few programs are compiled
MAX_DRAFTS = 4
LONGEST = 150  # tokens of a chunk
MAX_LEN = 400  # tokens of a row: more than one block of keys


class Program(NamedTuple):
    """What a compiled program depends on."""

    page_size: int
    group: int  # queries per KV head
    sliding_window: int | None
    soft_cap: float | None
    sinks: bool


PROGRAMS = (
    Program(1, 3, None, None, False),
    Program(16, 3, None, None, False),
    Program(4, 1, 5, None, True),
    Program(16, 1, 100, 2.0, False),
    Program(1, 3, 70, 2.0, True),
)


class Case(NamedTuple):
    program: Program
    decodes: list[tuple[int, int]]  # kv_start, queries: one, and the drafts after it
    prefills: list[tuple[int, int]]  # kv_start, q_len; empty rows among them
    shared_prefix: int  # pages that the first two rows have in common
    seed: int


@st.composite
def cases(draw):
    program = draw(st.sampled_from(PROGRAMS))
    border = st.integers(0, 12).map(lambda n: n * program.page_size)
    starts = st.one_of(st.integers(0, MAX_LEN - LONGEST), border)
    # Blocks of every size, alone and after larger ones.
    lengths = st.one_of(
        st.integers(0, 70), st.integers(128, LONGEST), st.just(64), st.just(program.page_size)
    )
    return Case(
        program,
        draw(st.lists(st.tuples(starts, st.integers(1, 1 + MAX_DRAFTS)), max_size=3)),
        draw(st.lists(st.tuples(starts, lengths), max_size=2)),
        draw(st.integers(0, 8)),
        draw(st.integers(0, 2**32 - 1)),
    )


class Problem(NamedTuple):
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    cache: np.ndarray
    page_table: np.ndarray
    kv_starts: np.ndarray
    q_lens: np.ndarray
    num_decode: int
    sinks: np.ndarray | None


def build(case: Case) -> Problem:
    page_size = case.program.page_size
    rng = np.random.default_rng(case.seed)
    rows = case.decodes + case.prefills
    kv_starts, q_lens = np.zeros((2, ROWS), np.int32)
    for i, (start, length) in enumerate(rows):
        kv_starts[i], q_lens[i] = start, length
    width = -(-MAX_LEN // page_size)
    # The shuffled table wastes no page on padding rows, which stay at the null page.
    table = np.zeros((ROWS, width), np.int32)
    pages = 1 + rng.permutation(PAGES - 1).astype(np.int32)
    used = -(-(kv_starts + q_lens) // page_size)
    taken = 0
    for i in range(len(rows)):
        table[i, : used[i]] = pages[taken : taken + used[i]]
        taken += used[i]
    if len(rows) > 1:  # pages full of earlier tokens in both rows may be shared
        shared = min(case.shared_prefix, *(kv_starts[:2] // page_size))
        table[1, :shared] = table[0, :shared]
    cache = np.full((LAYERS, PAGES, 2 * KV_HEADS, page_size, HEAD_DIM), np.nan, np.float32)
    for i in range(len(rows)):
        for position in range(kv_starts[i]):
            slot = (1, table[i, position // page_size], slice(None), position % page_size)
            if np.isnan(cache[slot]).any():
                cache[slot] = rng.normal(size=(2 * KV_HEADS, HEAD_DIM))
    q_heads = KV_HEADS * case.program.group
    q = rng.normal(size=(TOKENS, q_heads, HEAD_DIM)).astype(np.float32)
    k, v = rng.normal(size=(2, TOKENS, KV_HEADS, HEAD_DIM)).astype(np.float32)
    sinks = rng.normal(size=q_heads).astype(np.float32) if case.program.sinks else None
    return Problem(q, k, v, cache, table, kv_starts, q_lens, len(case.decodes), sinks)


@jax.jit(static_argnames=("sliding_window", "soft_cap"))
def attend(problem, sliding_window, soft_cap):
    batch = AttentionBatch.build(
        problem.page_table,
        problem.kv_starts,
        problem.q_lens,
        problem.num_decode,
        TOKENS,
        MAX_DRAFTS,
    )
    return ragged_paged_attention(
        problem.q,
        problem.k,
        problem.v,
        problem.cache,
        jnp.int32(1),
        batch,
        ScoreOptions(0.3, sliding_window, soft_cap, problem.sinks),
    )


@settings(max_examples=8, deadline=None)
@given(cases())
def test_agrees_with_float64_on_any_ragged_batch(case):
    """Unused slots and the null page hold NaN, so any read of them would show."""
    problem = build(case)
    out, cache = attend(problem, case.program.sliding_window, case.program.soft_cap)
    expected_out, expected_cache = reference.ragged_paged_attention(
        problem.q,
        problem.k,
        problem.v,
        problem.cache,
        1,
        problem.page_table,
        problem.kv_starts,
        problem.q_lens,
        scale=0.3,
        sliding_window=case.program.sliding_window,
        soft_cap=case.program.soft_cap,
        sinks=problem.sinks,
    )
    num_tokens = problem.q_lens.sum()
    np.testing.assert_allclose(out[:num_tokens], expected_out[:num_tokens], rtol=0, atol=2e-5)
    assert np.isfinite(out).all()
    # All pages but the null page, which padding may fill with anything.
    np.testing.assert_allclose(cache[:, 1:], expected_cache[:, 1:], rtol=0, atol=1e-6)


@pytest.mark.parametrize("window", [50, *long(None)])
@pytest.mark.parametrize("attend", [None, *long(attend_invariantly)])
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_queries_see_the_later_keys_of_their_spans(window, attend, data):
    program = problems.Program(
        *(16, 2, 2, 8), sliding_window=window, rows=4, tokens=256, max_len=280, num_spans=4
    )
    case = data.draw(problems.cases([program], max_decodes=1, max_prefills=3, max_chunk=80))
    problem = problems.build(case)
    batch = problems.make_batch(problem, program)
    out, _ = jax.jit(ragged_paged_attention, static_argnums=(6,), static_argnames="attend")(
        *problem[:4], jnp.int32(problems.LAYER), batch, program.options, attend=attend
    )
    want, _ = problems.expected(problem, program)
    num_tokens = problem.q_lens.sum()
    np.testing.assert_allclose(out[:num_tokens], want[:num_tokens], rtol=0, atol=2e-5)


def test_bfloat16_accumulates_in_float32():
    case = Case(PROGRAMS[1], [(300, 1), (17, 1)], [(100, 60)], 0, seed=3)
    problem = build(case)
    halves = jax.tree.map(
        lambda a: jnp.asarray(a, jnp.bfloat16) if a.dtype == np.float32 else a,
        problem._replace(num_decode=np.int32(2), sinks=None),
    )
    out, cache = attend(halves, None, None)
    assert out.dtype == cache.dtype == jnp.bfloat16
    arrays = [np.asarray(x, np.float32) for x in halves[:4]]
    expected, _ = reference.ragged_paged_attention(*arrays, 1, *problem[4:7], scale=0.3)  # type: ignore[misc]
    np.testing.assert_allclose(np.asarray(out[:62], np.float32), expected[:62], atol=0.02)


def test_a_cache_of_8_bits_is_attended_to_as_what_it_holds():
    """Beyond the type's range lies its greatest value, not NaN."""
    problem = build(Case(PROGRAMS[1], [(300, 1), (17, 1)], [(100, 60)], 0, seed=3))
    values = np.array(problem.v)
    values[:, 0] *= 200
    k, v = (np.asarray(jnp.asarray(x, jnp.bfloat16), np.float32) for x in (problem.k, values))
    assert (abs(v) > 464).any()  # what a cast alone would make NaN
    cached = [as_float8(x) for x in (k, v, problem.cache)]
    out, cache = attend(problem._replace(k=k, v=v, cache=cached[2].view(np.int8)), None, None)
    arrays = [np.asarray(x, np.float32) for x in (problem.q, *cached)]
    expected, expected_cache = reference.ragged_paged_attention(  # type: ignore[misc]
        *arrays, 1, *problem[4:7], scale=0.3
    )
    np.testing.assert_allclose(out[:62], expected[:62], rtol=1e-6, atol=2e-5)
    found = np.asarray(cache).view(jnp.float8_e4m3fn).astype(np.float64)
    np.testing.assert_array_equal(found[:, 1:], expected_cache[:, 1:])


def test_a_cache_with_keys_and_values_side_by_side_gives_the_same():
    problem = build(Case(PROGRAMS[1], [(300, 2), (17, 1)], [(100, 60)], 1, seed=5))

    def pack(cache):
        return np.concatenate(np.split(cache, 2, axis=2), axis=4)

    out, cache = attend(problem, 20, None)
    packed_out, packed_cache = attend(problem._replace(cache=pack(problem.cache)), 20, None)
    np.testing.assert_array_equal(packed_out, out)
    np.testing.assert_array_equal(packed_cache[:, 1:], pack(np.asarray(cache))[:, 1:])


@pytest.mark.parametrize("dtype", [np.float32, np.int8])
def test_the_cache_is_updated_in_place(dtype):
    """A donated cache is not copied: temporary memory stays far below its size."""
    problem = build(Case(PROGRAMS[1], [(30, 2)], [(10, 20)], 0, seed=0))
    problem = problem._replace(cache=np.zeros(problem.cache.shape, dtype))
    arrays = jax.tree.map(jnp.asarray, problem._replace(num_decode=np.int32(1), sinks=None))

    def layers(cache, rest):
        def body(carry, _):
            out, cache = attend(rest._replace(cache=carry[1]), None, None)
            return (carry[0] + out, cache), None

        start = (jnp.zeros_like(rest.q), cache)
        return jax.lax.scan(body, start, None, length=4)[0]

    rest = arrays._replace(cache=jnp.zeros(0))
    compiled = jax.jit(layers, donate_argnums=0).lower(arrays.cache, rest).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == arrays.cache.nbytes
    assert memory.temp_size_in_bytes < 0.8 * arrays.cache.nbytes
