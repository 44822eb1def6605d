"""Ragged batches for latent attention: drawn, built, and judged by float64."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from sgl_jax.kernels.attention.batch import AttentionBatch
from sgl_jax.kernels.latent_attention.latents import (
    IndexQueries,
    LatentQueries,
    ReusedChoice,
    UpProjections,
    latent_row_size,
)
from tests.kernels.attention.problems import LAYER, LAYERS, NO_PAGE, Case, as_float8
from tests.kernels.latent_attention import reference

SCALE = 0.3


class LatentProgram(NamedTuple):
    """The sizes that a compiled program depends on; rows and lengths as in `attention.problems`."""

    page_size: int = 16
    heads: int = 4
    nope_dim: int = 16
    rope_dim: int = 8
    rank: int = 32
    value_dim: int = 16
    dtype: Any = jnp.float32
    cache_dtype: Any = None  # None: as `dtype`; int8 holds 8-bit floats
    max_drafts: int = 0
    rows: int = 6
    tokens: int = 64
    max_len: int = 160  # tokens of a row
    index_heads: int = 0  # 0: no indexer
    key_dim: int = 0
    top_k: int = 0

    @property
    def width(self) -> int:
        return self.rank + self.rope_dim

    def as_cached(self, x: np.ndarray) -> np.ndarray:
        """x as the cache's array holds it."""
        dtype = jnp.dtype(self.cache_dtype or self.dtype)
        return as_float8(x).view(dtype) if dtype == jnp.int8 else np.asarray(x, dtype)

    def numbers(self, x: np.ndarray) -> np.ndarray:
        """float64 of x as the cache's array holds it."""
        return np.asarray(x.view(jnp.float8_e4m3fn) if x.dtype == jnp.int8 else x, np.float64)


class LatentProblem(NamedTuple):
    """The arrays of a case."""

    queries: LatentQueries
    latents: np.ndarray
    up: UpProjections
    kv_cache: np.ndarray  # NaN wherever no token lies: in unused slots, pages, and the null page
    page_table: np.ndarray
    kv_starts: np.ndarray
    q_lens: np.ndarray
    num_decode: np.int32
    index: IndexQueries | ReusedChoice | None = None

    def static_index(
        self, program: LatentProgram, is_reused: bool = False
    ) -> IndexQueries | ReusedChoice | None:
        """The index, with what is not traced."""
        if isinstance(self.index, IndexQueries):
            return self.index._replace(top_k=program.top_k, is_reused=is_reused)
        return self.index


def build(case: Case) -> LatentProblem:
    """Draw the arrays of a case, of a `LatentProgram`, from its seed."""
    program, rng = case.program, np.random.default_rng(case.seed)
    rows = case.decodes + case.prefills
    kv_starts, q_lens = np.zeros((2, program.rows), np.int32)
    for i, (start, length) in enumerate(rows):
        kv_starts[i], q_lens[i] = start, length
    width = -(-program.max_len // program.page_size)
    num_pages = 2 + width * program.rows
    table = np.zeros((program.rows, width), np.int32)
    pages = iter(rng.permutation(np.arange(1, num_pages, dtype=np.int32)))
    for i in range(len(rows)):
        table[i] = [next(pages) for _ in range(width)]
    if len(rows) > 1:  # pages full of earlier tokens in both rows may be shared
        shared = min(case.shared_prefix, *(kv_starts[:2] // program.page_size))
        table[1, :shared] = table[0, :shared]
    row_size = latent_row_size(program.rank, program.rope_dim, program.key_dim)  # type: ignore[attr-defined]
    cache = np.full((LAYERS, num_pages, 1, program.page_size, row_size), np.nan, np.float32)
    for i in range(len(rows)):
        for start in range(0, kv_starts[i], program.page_size):
            used = min(program.page_size, kv_starts[i] - start)
            page = cache[LAYER, table[i, start // program.page_size], 0, :used]
            drawn = np.zeros(page.shape)
            drawn[:, : program.width] = _bounded(rng, (used, program.width))  # type: ignore[attr-defined]
            first = row_size - latent_row_size(program.key_dim, 0)  # type: ignore[attr-defined]
            drawn[:, first : first + program.key_dim] = _whole(rng, (used, program.key_dim))  # type: ignore[attr-defined]
            page[...] = np.where(np.isnan(page), drawn, page)

    def drawn_as(*shape: int, size: float = 1.0) -> np.ndarray:
        return np.asarray(_bounded(rng, shape) * size, program.dtype)

    index = None
    if program.index_heads:  # type: ignore[attr-defined]
        sizes = program.tokens, program.index_heads, program.key_dim  # type: ignore[attr-defined]
        index = IndexQueries(
            np.asarray(_whole(rng, sizes), program.dtype),
            np.asarray(_whole(rng, sizes[:2]), np.float32),
            np.asarray(_whole(rng, (sizes[0], sizes[2])), program.dtype),
            program.top_k,  # type: ignore[attr-defined]
        )
    heads, rank, tokens = program.heads, program.rank, program.tokens  # type: ignore[attr-defined]
    return LatentProblem(
        LatentQueries(
            drawn_as(tokens, heads, program.nope_dim),  # type: ignore[attr-defined]
            drawn_as(tokens, heads, program.rope_dim),  # type: ignore[attr-defined]
        ),
        drawn_as(tokens, program.width),  # type: ignore[attr-defined]
        UpProjections(
            drawn_as(heads, program.nope_dim, rank, size=rank**-0.5),  # type: ignore[attr-defined]
            drawn_as(heads, rank, program.value_dim, size=rank**-0.5),  # type: ignore[attr-defined]
        ),
        program.as_cached(cache),
        table,
        kv_starts,
        q_lens,
        np.int32(len(case.decodes)),
        index,
    )


def _bounded(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Numbers of variance one."""
    return rng.uniform(-(3**0.5), 3**0.5, size=shape)


def _whole(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Small whole numbers: sums of their products are exact in any type, and some are equal."""
    return rng.integers(-3, 4, shape)


def make_batch(problem: LatentProblem, program: LatentProgram) -> AttentionBatch:
    """The batch of a problem; traceable. Beyond a row's last page its table names none."""
    used = -(-(problem.kv_starts + problem.q_lens) // program.page_size)
    columns = jnp.arange(problem.page_table.shape[1])
    return AttentionBatch.build(
        jnp.where(columns < used[:, None], problem.page_table, NO_PAGE),
        problem.kv_starts,
        problem.q_lens,
        problem.num_decode,
        program.tokens,
        program.max_drafts,
    )


def expected(problem: LatentProblem, program: LatentProgram) -> tuple[np.ndarray, np.ndarray]:
    """(out [T, heads, value_dim], kv_cache) in float64 by the reference, of what is cached."""
    latents = program.numbers(program.as_cached(problem.latents))
    return reference.latent_attention(
        *problem.queries,
        latents,
        *problem.up,
        program.numbers(problem.kv_cache),
        LAYER,
        *problem[4:7],
        problem.index and (*map(np.asarray, problem.index[:3]), program.top_k),
        scale=SCALE,
    )
