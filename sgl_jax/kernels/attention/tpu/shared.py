"""Common parts of the decode and the prefill kernel: rows, pages, their DMAs, softmax.

Both loop over the rows of a step. First a row's page ids are copied to scalar memory. With them,
its pages are copied into one of two buffers, one DMA each, while the kernel computes on the pages
in the other buffer. The softmax is online (arXiv 2205.14135), in float32. Results replace the
queries in HBM.

Reading 8 bits: chips without float8 take more instructions to convert it than the rest of decode's
loop has. But its sign, 4 exponent bits and 3 mantissa bits fit into a bfloat16's; only the
exponent's bias differs, so every number comes out 2^-120 times too small, and the products are
scaled to compensate. This is exact except for subnormals, which the cache does not hold
(`cache_dtype.as_cached`), and NaN, which comes out as a number and is detected separately
(`nan_flags`). A word holds four float8 elements, in the order of keys, or two bfloat16 elements:
the even keys of a block are read first, then the odd keys. Attention does not depend on the order
of keys.
"""

from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from sgl_jax.kernels.attention.batch import AttentionBatch, ScoreOptions
from sgl_jax.kernels.attention.cache_dtype import FLOAT8, is_narrow, product_dtype
from sgl_jax.kernels.tpu_chip import LANES, SUBLANES, converts_float8

# Half of the factor by which keys and values read by moving bits are too small. The other operand
# is multiplied by it before the product, so that small products are not lost, and the product
# afterwards.
HALF_BIAS = 2.0**60
LOG2_E = 1.4426950408889634

_SIGNS = -0x7FFF8000  # bits 31 and 15
_NUMBERS = 0x07F007F0
_MAGNITUDES, _ONES, _FLAGS = 0x7F7F7F7F, 0x01010101, -0x7F7F7F80  # for the four elements of a word


class Rows(NamedTuple):
    """Places of the tokens of B rows: arrays outside a kernel, in scalar memory inside."""

    layers: Any  # int32 [1]: the current layer
    sizes: Any  # int32 [2]: num_decode, num_rows
    kv_starts: Any  # int32 [B]
    q_offsets: Any  # int32 [B + 1]

    @classmethod
    def of(cls, batch: AttentionBatch, layer: jax.Array) -> "Rows":
        # XLA computes these once, outside the loop over layers.
        sizes = jnp.stack([batch.num_decode, batch.num_rows]).astype(jnp.int32)
        return cls(layer.reshape(1), sizes, batch.kv_starts, batch.q_offsets)

    @property
    def layer(self) -> jax.Array:
        return self.layers[0]

    @property
    def num_decode(self) -> jax.Array:
        return self.sizes[0]

    @property
    def num_rows(self) -> jax.Array:
        """Return the number of rows up to the last row with queries."""
        return self.sizes[1]

    def q_len(self, row: Any) -> jax.Array:
        return self.q_offsets[row + 1] - self.q_offsets[row]

    def kv_len(self, row: Any) -> jax.Array:
        """Return the number of a row's tokens in the cache, including this step's."""
        return self.kv_starts[row] + self.q_len(row)


class Spans(NamedTuple):
    """The n spans of each row (`AttentionBatch.spans`), in scalar memory like `Rows`."""

    bounds: Any  # int32 [B * n * 2]: first and end of each
    met: Any  # int32 [B * 2]: the first span after the row's cached keys, and its first later one

    @classmethod
    def of(cls, batch: AttentionBatch) -> "Spans | None":
        if batch.spans is None:
            return None
        firsts, ends = batch.spans[..., 0], batch.spans[..., 1]
        begin, end = batch.kv_starts[:, None], (batch.kv_starts + batch.q_lens)[:, None]
        met = [jnp.sum(ends <= begin, axis=1), jnp.sum(firsts < end, axis=1)]
        return cls(batch.spans.reshape(-1), jnp.stack(met, axis=1).astype(jnp.int32).reshape(-1))

    def last_seen(self, row: Any, positions: Any, kv_len: Any) -> Any:
        """Return the last keys that queries of `row`, which has `kv_len` keys, see."""
        num = self.bounds.shape[0] // self.met.shape[0]

        def widen(i: Any, lasts: Any) -> Any:
            at = 2 * (row * num + i)
            first, end = self.bounds[at], jnp.minimum(self.bounds[at + 1], kv_len)
            is_inside = (positions >= first) & (positions < end)
            return jnp.where(is_inside, end - 1, lasts)

        return lax.fori_loop(self.met[2 * row], self.met[2 * row + 1], widen, positions)


class CacheSlots(NamedTuple):
    """The places of keys and values in a cache."""

    packed: bool  # whether a slot holds a head's K and V side by side, or in the same lanes
    value_dim: int | None = None  # leading lanes of a slot with values; None: all lanes


KEYS_THEN_VALUES = CacheSlots(packed=False)  # a page holds K heads, then V heads


class Expansion(NamedTuple):
    """Matrices that compute each head's keys and values from slots shared by all heads.

    A slot's first `rank` lanes are multiplied; a key's other lanes are the slot's other lanes.
    """

    keys: Any  # [heads, lanes of a key, rank]
    values: Any  # [heads, rank, lanes of a value]


class Shape(NamedTuple):
    """The static sizes of a cache and of the queries that read it."""

    kv_heads: int
    group: int  # queries per KV head
    page_size: int
    head_dim: int  # of queries and keys
    value_dim: int  # of a head's values and results
    parts: int  # heads that share a cached head's keys and values, each with a part of its queries
    packed: bool  # see `CacheSlots`
    product_dtype: jnp.dtype  # dtype of the matrix unit's inputs

    @classmethod
    def of(cls, q: jax.Array, kv_cache: jax.Array, slots: CacheSlots) -> "Shape":
        """Return the sizes of q [T, q_heads, head_dim] and of a KV cache in the layout of `api`."""
        (_, q_heads, head_dim), (heads, page_size) = q.shape, kv_cache.shape[2:4]
        kv_heads = heads if slots.packed else heads // 2
        group, value_dim = q_heads // kv_heads, slots.value_dim or head_dim
        dtype = product_dtype(q.dtype, kv_cache.dtype)
        return cls(kv_heads, group, page_size, head_dim, value_dim, 1, slots.packed, dtype)

    def split(self, parts: int) -> "Shape":
        """Split each head's queries into `parts`, as if each part had a KV head."""
        return self._replace(kv_heads=self.kv_heads * parts, group=self.group // parts, parts=parts)

    @property
    def cached_heads(self) -> int:
        return self.kv_heads // self.parts

    def keys_of(self, head: Any) -> Any:
        return head if self.parts == 1 else div(head, self.parts)

    def values_of(self, head: Any) -> Any:
        return self.keys_of(head) + (0 if self.packed else self.cached_heads)


class PagedArrays(NamedTuple):
    """The inputs of a kernel that stay in HBM."""

    table: Any  # int32 [B, 1, W] page ids of each row
    kv: Any  # [layers, pages, 2 * kv_heads, page_size, head_dim], or kv_heads if packed
    q: Any  # [T, ...]; the result replaces it in the same memory, and kernels read it there


class PageBuffers(NamedTuple):
    """Buffers of page ids and pages."""

    table: Any  # int32 [tables, 1, W] in scalar memory: page ids of some rows
    kv: Any  # [2, block_pages, *one page] in vector memory
    table_sem: Any
    kv_sem: Any  # [2]

    @classmethod
    def scratch(
        cls, kv_cache: jax.Array, table_width: int, tables: int, block_pages: int
    ) -> "PageBuffers":
        return cls(
            table=pltpu.SMEM((tables, 1, table_width), jnp.int32),
            kv=pltpu.VMEM((2, block_pages, *kv_cache.shape[2:]), kv_cache.dtype),
            table_sem=pltpu.SemaphoreType.DMA,
            kv_sem=pltpu.SemaphoreType.DMA((2,)),
        )


class TokenBuffers(NamedTuple):
    """Buffers of queries and results; the kernels' modules list their dimensions."""

    q: Any
    out: Any
    q_sem: Any
    out_sem: Any


class Softmax(NamedTuple):
    """Queries, and the online softmax over the keys so far; the modules list the dimensions."""

    q: Any
    m: Any  # float32 greatest score in powers of two, repeated in all 128 lanes
    l: Any  # float32 denominator: the sum of 2^(score - m), as partial sums in 128 lanes
    acc: Any  # float32 numerator: values, weighted by 2^(score - m)

    @classmethod
    def scratch(cls, rows: tuple[int, ...], q: jnp.dtype, q_width: int, width: int) -> "Softmax":
        """Return scratch shapes for `rows` of queries of dtype `q`, and values `width` wide."""
        lanes = pltpu.VMEM((*rows, LANES), jnp.float32)
        acc = pltpu.VMEM((*rows, width), jnp.float32)
        return cls(pltpu.VMEM((*rows, q_width), q), lanes, lanes, acc)


class PageBlock(NamedTuple):
    """Adjacent pages of a row, and the buffers of its page ids and of these pages."""

    table: Any  # index into `PageBuffers.table`
    first: Any  # first page, counted from the row's start
    num_pages: Any  # at most the pages that fit a buffer
    buffer: Any  # index into `PageBuffers.kv`


class Pages(NamedTuple):
    """Copies page ids and pages of one layer from HBM into buffers."""

    rows: Rows
    hbm: PagedArrays
    buffers: PageBuffers

    @property
    def block_pages(self) -> int:
        return self.buffers.kv.shape[1]

    def table_copy(self, row: Any, table: Any) -> Any:
        return pltpu.make_async_copy(
            self.hbm.table.at[row], self.buffers.table.at[table], self.buffers.table_sem
        )

    def page_copy(self, block: PageBlock, i: Any) -> Any:
        page_id = self.buffers.table[block.table, 0, block.first + i]
        return pltpu.make_async_copy(
            self.hbm.kv.at[self.rows.layer, page_id],
            self.buffers.kv.at[block.buffer, i],
            self.buffers.kv_sem.at[block.buffer],
        )

    def start(self, block: PageBlock, *, unrolled: bool = False) -> None:
        """Start the DMAs of a block's pages.

        `unrolled` saves instructions for each page of a whole block, and adds a few to other loops.
        """
        in_loop = block.num_pages
        if unrolled:
            is_whole = block.num_pages == self.block_pages
            in_loop = jnp.where(is_whole, 0, block.num_pages)

            @pl.when(is_whole)
            def _() -> None:
                for i in range(self.block_pages):
                    self.page_copy(block, i).start()

        pl.loop(0, in_loop)(lambda i: self.page_copy(block, i).start())

    def wait(self, block: PageBlock) -> None:
        """Wait until all pages of a block have arrived; a wait counts bytes, from any DMAs."""
        here, sem = self.buffers.kv.at[block.buffer], self.buffers.kv_sem.at[block.buffer]

        def wait_for(part: Any) -> None:
            pltpu.make_async_copy(part, part, sem).wait()

        pl.when(block.num_pages == self.block_pages)(lambda: wait_for(here))

        @pl.when(block.num_pages < self.block_pages)
        def _() -> None:
            pl.loop(0, block.num_pages)(lambda i: wait_for(here.at[i]))

    def clear_values(self, shape: Shape, buffer: Any, page: Any, first: Any, stop: Any) -> None:
        """Zero V in the slots of one page of a buffer outside [first, stop); `first` may be None.

        The weight of these slots is zero, but they may hold another row's values or garbage, and
        zero times NaN is NaN. K need not be cleared: a masked score is replaced even if it is NaN.
        """
        kv = self.buffers.kv
        slot = lax.broadcasted_iota(jnp.int32, kv.shape[3:], 0)
        kept = slot < stop
        if first is not None:
            kept &= slot >= first
        for head in map(shape.values_of, range(0, shape.kv_heads, shape.parts)):
            values = kv[buffer, page, head]
            kv[buffer, page, head] = jnp.where(kept, values, jnp.zeros_like(values))


def scaled(scores: jax.Array, options: ScoreOptions) -> jax.Array:
    """Convert products of queries and keys to scores in powers of two."""
    if options.soft_cap is None:
        return scores * (options.scale * LOG2_E)
    scores = jnp.tanh(scores * (options.scale / options.soft_cap))
    return scores * (options.soft_cap * LOG2_E)


def across(x: jax.Array, width: int) -> jax.Array:
    """Return x [rows, 128], equal in all lanes, as [rows, width]."""
    if width <= LANES:
        return x[:, :width]
    return jnp.concatenate([x] * (width // LANES), axis=1)


def sum_by_lane(x: jax.Array) -> jax.Array:
    """Sum x [rows, keys] to [rows, 128] without moving data between lanes."""
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % LANES)))
    return reduce(jnp.add, [x[:, i : i + LANES] for i in range(0, x.shape[1], LANES)])


def div(a: Any, b: int) -> jax.Array:
    """Return a // b for a >= 0, which costs less than a signed division."""
    return lax.div(jnp.int32(a), jnp.int32(b))


def converted(cached: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Convert a part [keys, lanes] of a cache to `dtype` by the chip's or compiler's cast."""
    return (pltpu.bitcast(cached, FLOAT8) if is_narrow(cached.dtype) else cached).astype(dtype)


def should_move_bits(cache_dtype: jnp.dtype, dtype: jnp.dtype) -> bool:
    """Return True if products of `dtype` must read the cache with `even_then_odd`."""
    return is_narrow(cache_dtype) and dtype == jnp.bfloat16 and not converts_float8()


def even_then_odd(cached: jax.Array) -> jax.Array:
    """Return a part [keys, lanes] of an 8-bit cache as bfloat16 * 2^-120: even keys, then odd."""
    words = pltpu.bitcast(cached, jnp.int32)
    even = ((words << 8) & _SIGNS) | ((words << 4) & _NUMBERS)
    odd = (words & _SIGNS) | ((words >> 4) & _NUMBERS)
    return jnp.concatenate([pltpu.bitcast(half, jnp.bfloat16) for half in (even, odd)], axis=0)


def nan_flags(cached: jax.Array) -> jax.Array:
    """Collect flags for `has_nan` from a part [keys, lanes] of an 8-bit cache: int32 [8, 128].

    The magnitude of NaN has all seven bits set, so adding one carries into the eighth. This takes
    three instructions a word; producing a NaN for each number would take eleven.
    """
    words = pltpu.bitcast(cached, jnp.int32)
    sums = (words & _MAGNITUDES) + _ONES
    rows, lanes = (
        range(0, size, step) for size, step in zip(sums.shape, (SUBLANES, LANES), strict=True)
    )
    return reduce(
        jnp.bitwise_or, [sums[i : i + SUBLANES, j : j + LANES] for i in rows for j in lanes]
    )


def has_nan(flags: jax.Array) -> jax.Array:
    """Return bool [1, 1]: True if `flags`, an OR of `nan_flags`, came from a part with NaN."""
    found = jnp.where((flags & _FLAGS) != 0, 1.0, 0.0)
    return jnp.max(jnp.max(found, axis=0, keepdims=True), axis=1, keepdims=True) > 0


def positions(tile: tuple[int, int]) -> jax.Array:
    """Return int32 [rows, keys], the key at each column in the order of `even_then_odd`."""
    column, half = lax.broadcasted_iota(jnp.int32, tile, 1), tile[1] // 2
    return 2 * column - jnp.where(column < half, 0, tile[1] - 1)
