"""Ragged batches for the TPU's attention kernels: drawn, built, and judged by float64."""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax.experimental.pallas.tpu import force_tpu_interpret_mode

from sgl_jax.kernels.attention.batch import AttentionBatch, ScoreOptions
from tests.kernels.attention import reference

SCALE = 0.3
NO_PAGE = 2**30  # out of any cache's range
LAYERS, LAYER = 2, 1


class Program(NamedTuple):
    """What a compiled program depends on."""

    page_size: int = 16
    kv_heads: int = 2
    group: int = 4  # queries per KV head
    head_dim: int = 128
    dtype: Any = jnp.float32
    cache_dtype: Any = None  # None: as `dtype`; int8 holds 8-bit floats
    sliding_window: int | None = None
    is_chunked: bool = False
    soft_cap: float | None = None
    sinks: bool = False
    max_drafts: int = 0
    rows: int = 6
    tokens: int = 64
    max_len: int = 160  # tokens of a row
    num_spans: int = 0  # of each row with a chunk, at most

    def as_cached(self, x: np.ndarray) -> np.ndarray:
        """x as the cache's array holds it; 8 bits hold normal numbers alone, zero and NaN."""
        dtype = jnp.dtype(self.cache_dtype or self.dtype)
        return as_float8(x).view(dtype) if dtype == jnp.int8 else np.asarray(x, dtype)

    def numbers(self, x: np.ndarray) -> np.ndarray:
        """float64 of x as the cache's array holds it."""
        return np.asarray(x.view(jnp.float8_e4m3fn) if x.dtype == jnp.int8 else x, np.float64)

    @property
    def options(self) -> ScoreOptions:
        """The layer's, without sinks."""
        return ScoreOptions(SCALE, self.sliding_window, self.soft_cap, is_chunked=self.is_chunked)


def as_float8(x: np.ndarray) -> np.ndarray:
    """x in 8 bits: at most 448, and nothing between the smallest normal number and zero."""
    x = np.clip(np.asarray(x, np.float32), -448, 448)
    return np.where(abs(x) < 2**-6, np.rint(x * 2**6) * 2**-6, x).astype(jnp.float8_e4m3fn)


class Case(NamedTuple):
    program: Program
    decodes: list[tuple[int, int]]  # kv_start, queries: one, and the drafts after it
    prefills: list[tuple[int, int]]  # kv_start, q_len; empty rows among them
    shared_prefix: int  # pages that the first two rows have in common
    seed: int


@st.composite
def cases(draw, programs, max_decodes: int = 4, max_prefills: int = 2, max_chunk: int = 24):
    """Ragged batches: any lengths, page borders often, empty rows, shared pages."""
    program = draw(st.sampled_from(programs))
    last = program.max_len - max_chunk
    border = st.integers(0, last // program.page_size).map(lambda n: n * program.page_size)
    starts = st.one_of(st.integers(0, last), border)
    border_less_one = border.map(lambda n: max(0, n - 1))
    chunks = st.one_of(
        st.integers(0, max_chunk), st.just(min(max_chunk, program.page_size)), st.just(max_chunk)
    )
    queries = st.integers(1, 1 + program.max_drafts)
    decode = st.tuples(st.one_of(starts, border_less_one), queries)
    return Case(
        program,
        draw(st.lists(decode, max_size=min(max_decodes, program.rows - max_prefills))),
        draw(st.lists(st.tuples(starts, chunks), max_size=max_prefills)),
        draw(st.integers(0, 3)),
        draw(st.integers(0, 2**32 - 1)),
    )


class Problem(NamedTuple):
    """The arrays of a case; the first seven are the reference's arguments around the layer."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    kv_cache: (
        np.ndarray
    )  # as the cache's array; NaN wherever no token lies: in unused slots, pages, and the null page
    page_table: np.ndarray
    kv_starts: np.ndarray
    q_lens: np.ndarray
    num_decode: np.int32
    sinks: np.ndarray | None
    spans: np.ndarray | None


def build(case: Case) -> Problem:
    """Draw the arrays of a case from its seed."""
    program, rng = case.program, np.random.default_rng(case.seed)
    rows = case.decodes + case.prefills
    kv_starts, q_lens = np.zeros((2, program.rows), np.int32)
    for i, (start, length) in enumerate(rows):
        kv_starts[i], q_lens[i] = start, length
    width = -(-program.max_len // program.page_size)
    num_pages = 2 + width * program.rows
    # Beyond a row's last page lie pages full of NaN.
    table = np.zeros((program.rows, width), np.int32)
    pages = iter(rng.permutation(np.arange(1, num_pages, dtype=np.int32)))
    for i in range(len(rows)):
        table[i] = [next(pages) for _ in range(width)]
    if len(rows) > 1:  # pages full of earlier tokens in both rows may be shared
        shared = min(case.shared_prefix, *(kv_starts[:2] // program.page_size))
        table[1, :shared] = table[0, :shared]
    shape = (LAYERS, num_pages, 2 * program.kv_heads, program.page_size, program.head_dim)
    cache = np.full(shape, np.nan, np.float32)
    for i in range(len(rows)):
        for first in range(0, kv_starts[i], program.page_size):
            used = min(program.page_size, kv_starts[i] - first)
            page = cache[LAYER, table[i, first // program.page_size], :, :used]
            page[...] = np.where(np.isnan(page), _keys_and_values(rng, page.shape), page)
    q_heads = program.kv_heads * program.group
    q = rng.normal(size=(program.tokens, q_heads, program.head_dim))
    k, v = _keys_and_values(rng, (2, program.tokens, program.kv_heads, program.head_dim))
    sinks = rng.normal(size=q_heads).astype(np.float32) if program.sinks else None
    arrays = (np.asarray(x, program.dtype) for x in (q, k, v))
    return Problem(
        *arrays,
        program.as_cached(cache),
        table,
        kv_starts,
        q_lens,
        np.int32(len(case.decodes)),
        sinks,
        _spans(rng, case) if program.num_spans else None,
    )


def _spans(rng: np.random.Generator, case: Case) -> np.ndarray:
    """Spans of the rows with chunks, also in their cached tokens or across their ends."""
    spans = np.full((case.program.rows, case.program.num_spans, 2), 2**31 - 1, np.int32)
    for row, (start, length) in enumerate(case.prefills, len(case.decodes)):
        borders = rng.permutation(start + length + 1)[: 2 * case.program.num_spans]
        own = np.sort(borders)[: len(borders) // 2 * 2].reshape(-1, 2)
        spans[row, : len(own)] = own
    return spans


def _keys_and_values(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Of variance one, and in bounds: a result over 2 is rounded by 1e-2 in bfloat16."""
    return rng.uniform(-(3**0.5), 3**0.5, size=shape)


def without_passed_pages(problem: Problem, program: Program) -> Problem:
    """The problem as an engine has it: pages that the window of their row has passed are the null
    page in its table, and their memory, which may be another's by now, is NaN here."""
    assert program.sliding_window is not None
    table = problem.page_table.copy()
    for pages, start in zip(table, problem.kv_starts, strict=True):
        pages[: max(start - program.sliding_window + 1, 0) // program.page_size] = 0
    is_listed = np.zeros(problem.kv_cache.shape[1], np.bool_)
    is_listed[table] = True
    is_listed[0] = False
    cache = np.where(is_listed[:, None, None, None], problem.kv_cache, np.nan)
    return problem._replace(page_table=table, kv_cache=cache.astype(problem.kv_cache.dtype))


def make_batch(problem: Problem, program: Program) -> AttentionBatch:
    """The batch of a problem; traceable. Beyond a row's last page its table names none."""
    lengths = problem.kv_starts + problem.q_lens
    used = -(-lengths // program.page_size)
    columns = jnp.arange(problem.page_table.shape[1])
    batch = AttentionBatch.build(
        jnp.where(columns < used[:, None], problem.page_table, NO_PAGE),
        problem.kv_starts,
        problem.q_lens,
        problem.num_decode,
        program.tokens,
        program.max_drafts,
    )
    return replace(batch, spans=problem.spans)


def expected(problem: Problem, program: Program) -> tuple[np.ndarray, np.ndarray]:
    """(out [T, q_heads, head_dim], kv_cache) in float64 by the reference, of what is cached."""
    new = (program.as_cached(x) for x in (problem.k, problem.v))
    cached = (program.numbers(x) for x in (*new, problem.kv_cache))
    return reference.ragged_paged_attention(
        np.asarray(problem.q, np.float64),
        *cached,
        LAYER,
        *problem[4:7],
        **program.options._replace(sinks=problem.sinks)._asdict(),
        spans=problem.spans,
    )


def with_new_tokens(problem: Problem, program: Program) -> np.ndarray:
    """The cache after this step's K and V were written, in its own dtype."""
    _, cache = expected(problem, program)
    return program.as_cached(cache)


def pack(kv_cache: np.ndarray) -> np.ndarray:
    """The same cache with K and V of each head side by side."""
    return np.concatenate(np.split(kv_cache, 2, axis=2), axis=4)


def simulated(kernel: Any, program: Program, interpret: Any, blocks: Any) -> Any:
    """A TPU kernel of attention for `program`, compiled for the simulator: takes a problem and the
    cache as it is after this step's write."""

    @jax.jit
    def run(problem, cache):
        with force_tpu_interpret_mode(interpret):
            return kernel(
                problem.q,
                cache,
                jnp.int32(LAYER),
                make_batch(problem, program),
                program.options._replace(sinks=problem.sinks),
                blocks=blocks,
            )

    return run
