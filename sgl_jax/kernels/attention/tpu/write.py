"""Writing a step's K and V into the paged cache on TPU, in place.

A TPU copies whole tiles: 8, 16 or 32 slots of a page by 128 lanes, for elements of 4, 2 or 1 bytes.
A token is smaller than a tile, so tiles are read, changed and written back. Consecutive tokens of a
row that share a tile are a *run* and are written together; a run that fills its tile reads nothing.
Several runs are in flight at once. This is safe because no two runs of one grid step access the
same tile: only one row writes to a page, and each grid step waits for its writes before it ends.
Padding and the null page, which any number of rows may share, are never written.

Grid: one step for each block of up to 512 of the step's tokens.

Buffers, with H the cache's heads (K and V, or half as many if packed), D the head_dim of a slot, a
chunk up to 128 lanes of one head's K or V, all chunks of a token C lanes together:
    new    [block, C / 2] each                      this grid step's K and V, or one [block, C] if
                                                    they share slots; copied by the grid
    runs   int32 [block] each                       in scalar memory
    rows   32 bits [chunks, block + 2 * tile, chunk]   copy of `new`, one tile further down
    tiles  [8, H, tile, D]                          of run r in r % 8; in the cache's layout

DMAs of run r: if it fills only part of its tile, read the tile, 4 runs ahead of its use; change it;
write it, and wait for that before the buffer is used again, or before the grid step ends.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from sgl_jax.kernels.attention.batch import NULL_PAGE, AttentionBatch
from sgl_jax.kernels.attention.cache_dtype import as_cached, cache_dtype_name, is_packed, new_slots
from sgl_jax.kernels.tpu_chip import LANES, VMEM_LIMIT_BYTES, tile_slots

BLOCK_TOKENS = 512  # tokens of one step of the grid
IN_FLIGHT = 8  # runs with tiles being read or written
READ_AHEAD = 4  # runs between the start of a read and its use


class _Tokens(NamedTuple):
    """The tokens of the step, in scalar memory."""

    layers: Any  # int32 [1]: the current layer
    token_rows: Any  # int32 [T]
    positions: Any  # int32 [T]
    pages: Any  # int32 [T] the page of each token
    q_offsets: Any  # int32 [B + 1]

    @property
    def num_tokens(self) -> jax.Array:
        """Return the number of tokens of all rows, without padding."""
        return self.q_offsets[self.q_offsets.shape[0] - 1]


class _Runs(NamedTuple):
    token: Any  # first token, as an index in this step's block
    length: Any
    page: Any
    slot: Any  # slot of the first token in its page


class _Kernel(NamedTuple):
    layer: Any
    new: tuple[Any, ...]
    cache: Any  # [layers, pages, H, page_size, D] in HBM
    rows: Any
    tiles: Any
    read_sem: Any  # [8]
    write_sem: Any  # [8]
    runs: _Runs

    @property
    def tile(self) -> int:
        return self.tiles.shape[2]

    def is_partial(self, run: Any) -> Any:
        """Return True for a run that does not fill its tile."""
        return self.runs.length[run] < self.tile


def _find_runs(tokens: _Tokens, runs: _Runs, block: int, page_size: int, tile: int) -> jax.Array:
    """Fill `runs` with this grid step's runs; return their number."""
    start = pl.program_id(0) * block
    stop = jnp.minimum(start + block, tokens.num_tokens)

    def next_run(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        token, count = state
        row, position = tokens.token_rows[token], tokens.positions[token]
        slot = lax.rem(position, jnp.int32(page_size))
        row_left = jnp.minimum(tokens.q_offsets[row + 1], stop) - token
        length = jnp.minimum(tile - lax.rem(slot, jnp.int32(tile)), row_left)
        page = tokens.pages[token]
        runs.token[count] = token - start
        runs.length[count] = length
        runs.page[count] = page
        runs.slot[count] = slot
        return token + length, count + jnp.where(page == NULL_PAGE, 0, 1)

    _, count = lax.while_loop(lambda state: state[0] < stop, next_run, (start, jnp.int32(0)))
    return count


def _tile_of(kernel: _Kernel, run: Any) -> Any:
    """Return a run's tile in the cache: [H, tile, D]."""
    first = lax.div(kernel.runs.slot[run], jnp.int32(kernel.tile)) * kernel.tile
    slots = pl.ds(pl.multiple_of(first, kernel.tile), kernel.tile)
    return kernel.cache.at[kernel.layer, kernel.runs.page[run], :, slots]


def _read(kernel: _Kernel, run: Any) -> Any:
    at = lax.rem(run, jnp.int32(IN_FLIGHT))
    source = _tile_of(kernel, run)
    return pltpu.make_async_copy(source, kernel.tiles.at[at], kernel.read_sem.at[at])


def _write(kernel: _Kernel, run: Any) -> Any:
    at = lax.rem(run, jnp.int32(IN_FLIGHT))
    target = _tile_of(kernel, run)
    return pltpu.make_async_copy(kernel.tiles.at[at], target, kernel.write_sem.at[at])


def _change_tile(kernel: _Kernel, run: Any) -> None:
    at, runs, tiles = lax.rem(run, jnp.int32(IN_FLIGHT)), kernel.runs, kernel.tiles
    chunks, _, width = kernel.rows.shape
    first = lax.rem(runs.slot[run], jnp.int32(kernel.tile))
    # The tile's slots in order. The run fills some of them; the rows around it are another run's.
    source = pl.ds(runs.token[run] + kernel.tile - first, kernel.tile)
    slot = lax.broadcasted_iota(jnp.int32, (kernel.tile, width), 0)
    is_new = (slot >= first) & (slot < first + runs.length[run])
    per_head = tiles.shape[3] // width
    for chunk in range(chunks):
        head, lanes = chunk // per_head, pl.ds(chunk % per_head * width, width)
        old = tiles[at, head, :, lanes].astype(kernel.rows.dtype)
        new = jnp.where(is_new, kernel.rows[chunk, source], old)
        tiles[at, head, :, lanes] = new.astype(tiles.dtype)


def _stage(kernel: _Kernel) -> None:
    """Copy this step's K and V by chunks to a buffer that can be loaded from any row on.

    Only 32-bit rows can be loaded from any row on; converting to 32 bits and back is exact.
    """
    width = kernel.rows.shape[2]
    chunks = (
        part[:, first : first + width]
        for part in kernel.new
        for first in range(0, part.shape[1], width)
    )
    for chunk, rows in enumerate(chunks):
        kernel.rows[chunk, pl.ds(kernel.tile, len(rows))] = rows.astype(kernel.rows.dtype)


def _kernel(tokens: _Tokens, new: tuple[Any, ...], _old: Any, *memory: Any) -> None:
    kernel, block = _Kernel(tokens.layers[0], new, *memory), new[0].shape[0]

    def start_read(run: jax.Array) -> None:
        pl.when(run >= IN_FLIGHT)(lambda: _write(kernel, run - IN_FLIGHT).wait())
        pl.when(kernel.is_partial(run))(lambda: _read(kernel, run).start())

    def finish(run: jax.Array) -> None:
        pl.when(kernel.is_partial(run))(lambda: _read(kernel, run).wait())
        _change_tile(kernel, run)
        _write(kernel, run).start()

    @pl.when(pl.program_id(0) * block < tokens.num_tokens)
    def _() -> None:
        count = _find_runs(tokens, kernel.runs, block, kernel.cache.shape[3], kernel.tile)
        _stage(kernel)

        @pl.loop(0, count + READ_AHEAD)
        def _(n: jax.Array) -> None:
            pl.when(n < count)(lambda: start_read(n))
            pl.when(n >= READ_AHEAD)(lambda: finish(n - READ_AHEAD))

        @pl.loop(jnp.maximum(count - IN_FLIGHT, 0), count)
        def _(run: jax.Array) -> None:
            _write(kernel, run).wait()


def write_kv(
    k: jax.Array, v: jax.Array, kv_cache: jax.Array, layer: jax.Array, batch: AttentionBatch
) -> jax.Array:
    """Write k, v [T, kv_heads, head_dim] into their slots of the cache, in place if it is donated.

    Raises ValueError if pages do not hold whole tiles.
    """
    if is_packed(kv_cache, k.shape[2]):
        new = [new_slots(k, v, kv_cache)]
    else:
        new = as_cached(kv_cache.dtype, k, v)
    return write_slots(new, kv_cache, layer, batch)


def write_slots(
    slots: list[jax.Array], kv_cache: jax.Array, layer: jax.Array, batch: AttentionBatch
) -> jax.Array:
    """Write slots in the cache's layout, [T, heads, head_dim] arrays with its first heads first.

    Raises ValueError if pages do not hold whole tiles.
    """
    page_size, head_dim = kv_cache.shape[3:]
    tile = tile_slots(kv_cache.dtype)
    if page_size % tile:
        raise ValueError(
            f"on TPU, page_size must be a multiple of {tile} for a "
            f"{cache_dtype_name(kv_cache.dtype)} cache, got {page_size}"
        )
    num_tokens = slots[0].shape[0]
    block = min(BLOCK_TOKENS, num_tokens)
    new = tuple(x.reshape(num_tokens, -1) for x in slots)
    wide = jnp.int32 if jnp.issubdtype(kv_cache.dtype, jnp.integer) else jnp.float32
    width = LANES if head_dim % LANES == 0 else head_dim
    chunks = sum(x.shape[1] for x in new) // width
    sems = pltpu.SemaphoreType.DMA((IN_FLIGHT,))
    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    kernel = pl.pallas_call(
        _kernel,
        name="paged_write",
        out_shape=jax.ShapeDtypeStruct(kv_cache.shape, kv_cache.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(-(-num_tokens // block),),
            in_specs=[
                tuple(pl.BlockSpec((block, x.shape[1]), lambda i, _: (i, 0)) for x in new),
                in_hbm,
            ],
            out_specs=in_hbm,
            scratch_shapes=[
                pltpu.VMEM((chunks, block + 2 * tile, width), wide),
                pltpu.VMEM((IN_FLIGHT, kv_cache.shape[2], tile, head_dim), kv_cache.dtype),
                sems,
                sems,
                _Runs(*[pltpu.SMEM((block,), jnp.int32)] * len(_Runs._fields)),
            ],
        ),
        input_output_aliases={len(_Tokens._fields) + len(new): 0},
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=VMEM_LIMIT_BYTES),
    )
    # Pages are looked up here: the whole page table might not fit into scalar memory.
    pages = batch.page_table[batch.token_rows, batch.positions // page_size]
    tokens = _Tokens(layer.reshape(1), batch.token_rows, batch.positions, pages, batch.q_offsets)
    return kernel(tokens, new, kv_cache)
