"""An indexer's scores of cached tokens on TPU: products of queries and keys, summed over heads.

The rows of a call are processed in order. A block of a row's pages is in flight while the scores of
the block before it are computed; of a page only the lanes of the indexer's keys are copied.

Grid: none. Buffers, with G rows of n queries, H heads, D lanes of a key:
    queries  [G, n * H, D], weights float32 [G, H, n]   in vector memory
    keys     [2, block_pages, page_size, D]             of block c in c % 2
    scores   float32 [2, n, block_keys]                 of block c in c % 2
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from sgl_jax.kernels.attention.batch import NULL_PAGE
from sgl_jax.kernels.attention.cache_dtype import product_dtype
from sgl_jax.kernels.attention.tpu.shared import converted
from sgl_jax.kernels.latent_attention.latents import latent_row_size
from sgl_jax.kernels.pallas_tpu import UNCHECKED, product, start, wait
from sgl_jax.kernels.tpu_chip import LANES

BLOCK_KEYS = 2048  # in flight together
PART_KEYS = 512  # whose scores are in registers together


class _Rows(NamedTuple):
    """The rows of a call, in scalar memory."""

    layers: Any  # int32 [1]
    num_pages: Any  # int32 [G], at least 1
    table: Any  # int32 [G, W] page ids


class _Kernel(NamedTuple):
    first_lane: int
    rows: _Rows
    queries: Any
    weights: Any
    cache: Any  # [layers, pages, 1, page_size, row_size] in HBM
    out: Any  # float32 [G, n, tokens] in HBM
    keys: Any
    scores: Any
    key_sem: Any  # [2]
    score_sem: Any  # [2]

    @property
    def block_pages(self) -> int:
        return self.keys.shape[1]

    def num_blocks(self, row: Any) -> jax.Array:
        return lax.div(self.rows.num_pages[row] + self.block_pages - 1, jnp.int32(self.block_pages))

    def for_each_page(self, row: Any, block: Any, at: Any, act: Any) -> None:
        """Call `act` with the copy of each page of a row's block to buffer `at`."""
        first = block * self.block_pages
        lanes = pl.ds(self.first_lane, self.keys.shape[3])

        @pl.loop(0, jnp.minimum(self.rows.num_pages[row] - first, self.block_pages))
        def _(i: jax.Array) -> None:
            page = self.rows.table[row, first + i]
            source = self.cache.at[self.rows.layers[0], page, 0, :, lanes]
            act(pltpu.make_async_copy(source, self.keys.at[at, i], self.key_sem.at[at]))

    def score_copy(self, row: Any, block: Any, at: Any) -> Any:
        size = self.scores.shape[2]
        tokens = pl.ds(pl.multiple_of(block * size, size), size)
        target = self.out.at[row, :, tokens]
        return pltpu.make_async_copy(self.scores.at[at], target, self.score_sem.at[at])


def index_scores(
    queries: jax.Array,
    weights: jax.Array,
    page_table: jax.Array,
    kv_lens: jax.Array,
    kv_cache: jax.Array,
    layer: jax.Array,
) -> jax.Array:
    """Implement `chosen.IndexScores`."""
    (num_rows, n, heads, key_dim), page_size = queries.shape, kv_cache.shape[3]
    width = latent_row_size(key_dim, 0)
    dtype = product_dtype(queries.dtype, kv_cache.dtype)
    block_pages = min(max(1, BLOCK_KEYS // page_size), page_table.shape[1])
    block_keys = block_pages * page_size
    block_keys += -block_keys % LANES
    num_blocks = -(-page_table.shape[1] // block_pages)
    padded = jnp.pad(queries, ((0, 0), (0, 0), (0, 0), (0, width - key_dim)))
    num_pages = jnp.maximum(-(-kv_lens // page_size), 1)
    # A row without keys reads the null page.
    table = jnp.where(kv_lens[:, None] > 0, page_table, NULL_PAGE)
    rows = _Rows(layer.reshape(1), num_pages, table)
    vmem, hbm = (pl.BlockSpec(memory_space=space) for space in (pltpu.VMEM, pl.ANY))
    sems = pltpu.SemaphoreType.DMA((2,))

    def kernel(*refs: Any) -> None:
        _run(_Kernel(kv_cache.shape[4] - width, _Rows(*refs[:3]), *refs[3:]))

    scores = pl.pallas_call(
        kernel,
        name="index_scores",
        out_shape=jax.ShapeDtypeStruct((num_rows, n, num_blocks * block_keys), jnp.float32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(rows),
            in_specs=[vmem, vmem, hbm],
            out_specs=hbm,
            scratch_shapes=[
                pltpu.VMEM((2, block_pages, page_size, width), kv_cache.dtype),
                pltpu.VMEM((2, n, block_keys), jnp.float32),
                sems,
                sems,
            ],
        ),
        compiler_params=UNCHECKED,
    )(
        *rows,
        padded.astype(dtype).reshape(num_rows, n * heads, width),
        weights.swapaxes(1, 2),
        kv_cache,
    )
    by_block = scores.reshape(num_rows, n, num_blocks, block_keys)
    return by_block[..., : block_pages * page_size].reshape(num_rows, n, -1)


def _run(kernel: _Kernel) -> None:
    num_rows = kernel.out.shape[0]
    kernel.for_each_page(0, 0, 0, start)

    def score_row(row: jax.Array, count: jax.Array) -> jax.Array:
        return lax.fori_loop(
            0, kernel.num_blocks(row), lambda i, count: _score_block(kernel, row, i, count), count
        )

    count = lax.fori_loop(0, num_rows, score_row, jnp.int32(0))
    # A wait counts bytes, and all copies of scores have as many.
    pl.when(count > 1)(lambda: kernel.score_copy(0, 0, lax.rem(count, 2)).wait())
    kernel.score_copy(0, 0, lax.rem(count - 1, 2)).wait()


def _score_block(kernel: _Kernel, row: jax.Array, block: jax.Array, count: jax.Array) -> jax.Array:
    """Compute a block's scores, while the block after it, number `count` + 1, is copied."""
    at, is_last = lax.rem(count, 2), block + 1 >= kernel.num_blocks(row)
    next_row = jnp.where(is_last, row + 1, row)

    @pl.when(next_row < kernel.out.shape[0])
    def _() -> None:
        next_block = jnp.where(is_last, 0, block + 1)
        kernel.for_each_page(next_row, next_block, 1 - at, start)

    kernel.for_each_page(row, block, at, wait)
    pl.when(count >= 2)(lambda: kernel.score_copy(row, block, at).wait())
    _, page_size, width = kernel.keys.shape[1:]
    pages = max(1, PART_KEYS // page_size)
    for first in range(0, kernel.block_pages, pages):
        part = kernel.keys[at, first : first + pages]
        keys = converted(part.reshape(-1, width), kernel.queries.dtype)
        places = pl.ds(first * page_size, keys.shape[0])
        heads, n = kernel.weights.shape[1:]
        for i in range(n):
            own = product(kernel.queries[row, i * heads : (i + 1) * heads], keys, (1, 1))
            weighted = jnp.maximum(own, 0) * kernel.weights[row, :, i : i + 1]
            kernel.scores[at, i : i + 1, places] = jnp.sum(weighted, axis=0, keepdims=True)
    kernel.score_copy(row, block, at).start()
    return count + 1
