"""Writing a step's K and V into the paged cache on TPU, in place.

A TPU moves and stores whole tiles: 8, 16 or 32 slots of a page by 128 lanes, for 4, 2 or 1 byte
elements. A token is less than a tile, so tiles are read, changed and written back. Consecutive
tokens of a row that share a tile are a *run* and are written together; a run that fills its tile
reads nothing. Several runs are in flight at once, which is safe because no two runs of one grid
step touch the same tile: a page that is being written has one row, and each step of the grid
waits for its own writes before it ends. Padding and the null page, which any number of rows may
share, are never written.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from sgl_jax.kernels.ragged_paged_attention.batch import NULL_PAGE, AttentionBatch
from sgl_jax.kernels.ragged_paged_attention.cache_dtype import as_cached, cache_dtype_name
from sgl_jax.kernels.tpu_chip import LANES, VMEM_LIMIT_BYTES, tile_slots

BLOCK_TOKENS = 512  # tokens of one step of the grid
IN_FLIGHT = 8  # runs whose tiles are being read or written
READ_AHEAD = 4  # runs between the start of a read and its use


class _Tokens(NamedTuple):
    """The tokens of the step, in scalar memory."""

    sizes: Any  # int32 [2]: layer, number of tokens that are not padding
    token_rows: Any  # int32 [T]
    positions: Any  # int32 [T]
    pages: Any  # int32 [T] where each token goes
    q_offsets: Any  # int32 [B + 1]


class _Runs(NamedTuple):
    """The runs of one grid step, in scalar memory; int32 [BLOCK_TOKENS] each."""

    token: Any  # the first, as this step's block counts
    length: Any
    page: Any
    slot: Any  # of the first token in its page


class _Buffers(NamedTuple):
    """Memory of the kernel. A chunk is up to 128 lanes of one head's K or V."""

    kv: Any  # [block, chunks * chunk] this step's new K and V
    cache: Any  # [layers, pages, slots, page_size, head_dim], slots: K and V of all heads
    rows: Any  # 32 bits [chunks, block + 2 * tile, chunk] the same, one tile further down
    tiles: Any  # [IN_FLIGHT, slots, tile, head_dim]
    read_sem: Any  # [IN_FLIGHT]
    write_sem: Any  # [IN_FLIGHT]

    @property
    def tile(self) -> int:
        return self.tiles.shape[2]


def _find_runs(tokens: _Tokens, runs: _Runs, block: int, page_size: int, tile: int) -> jax.Array:
    """Fill `runs` with those of this grid step; how many there are."""
    start = pl.program_id(0) * block
    stop = jnp.minimum(start + block, tokens.sizes[1])

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


def _tile_of(buffers: _Buffers, layer: Any, runs: _Runs, run: Any) -> Any:
    """Where a run's tile lies in the cache: [slots, tile, head_dim]."""
    first = lax.div(runs.slot[run], jnp.int32(buffers.tile)) * buffers.tile
    slots = pl.ds(pl.multiple_of(first, buffers.tile), buffers.tile)
    return buffers.cache.at[layer, runs.page[run], :, slots]


def _read(buffers: _Buffers, layer: Any, runs: _Runs, run: Any) -> Any:
    at = lax.rem(run, jnp.int32(IN_FLIGHT))
    source = _tile_of(buffers, layer, runs, run)
    return pltpu.make_async_copy(source, buffers.tiles.at[at], buffers.read_sem.at[at])


def _write(buffers: _Buffers, layer: Any, runs: _Runs, run: Any) -> Any:
    at = lax.rem(run, jnp.int32(IN_FLIGHT))
    target = _tile_of(buffers, layer, runs, run)
    return pltpu.make_async_copy(buffers.tiles.at[at], target, buffers.write_sem.at[at])


def _when_partial(buffers: _Buffers, runs: _Runs, run: Any) -> Any:
    """Decorates what only a run does that leaves some of its tile as it was."""
    return pl.when(runs.length[run] < buffers.tile)


def _change_tile(buffers: _Buffers, runs: _Runs, run: Any) -> None:
    """Put a run's K and V into its tile."""
    at = lax.rem(run, jnp.int32(IN_FLIGHT))
    chunks, _, width = buffers.rows.shape
    first = lax.rem(runs.slot[run], jnp.int32(buffers.tile))
    # The tile's slots in order, of which the run fills some: the rows around it are others'.
    source = pl.ds(runs.token[run] + buffers.tile - first, buffers.tile)
    slot = lax.broadcasted_iota(jnp.int32, (buffers.tile, width), 0)
    is_new = (slot >= first) & (slot < first + runs.length[run])
    per_head = buffers.tiles.shape[3] // width
    for chunk in range(chunks):
        head, lanes = chunk // per_head, pl.ds(chunk % per_head * width, width)
        old = buffers.tiles[at, head, :, lanes].astype(buffers.rows.dtype)
        new = jnp.where(is_new, buffers.rows[chunk, source], old)
        buffers.tiles[at, head, :, lanes] = new.astype(buffers.tiles.dtype)


def _stage(buffers: _Buffers) -> None:
    """Copy this step's K and V, chunk by chunk, to where any slots of them can be loaded.

    Only 32-bit rows can be loaded from any row on; there and back loses nothing.
    """
    chunks, _, width = buffers.rows.shape
    block = buffers.kv.shape[0]
    for chunk in range(chunks):
        rows = buffers.kv[:, chunk * width : (chunk + 1) * width]
        buffers.rows[chunk, pl.ds(buffers.tile, block)] = rows.astype(buffers.rows.dtype)


def _kernel(*refs: Any, page_size: int) -> None:
    tokens, buffers = _Tokens(*refs[:5]), _Buffers(refs[5], *refs[7:12])
    runs = _Runs(*refs[12:])
    layer, block = tokens.sizes[0], buffers.kv.shape[0]

    def start_read(run: jax.Array) -> None:
        pl.when(run >= IN_FLIGHT)(lambda: _write(buffers, layer, runs, run - IN_FLIGHT).wait())
        _when_partial(buffers, runs, run)(lambda: _read(buffers, layer, runs, run).start())

    def finish(run: jax.Array) -> None:
        _when_partial(buffers, runs, run)(lambda: _read(buffers, layer, runs, run).wait())
        _change_tile(buffers, runs, run)
        _write(buffers, layer, runs, run).start()

    @pl.when(pl.program_id(0) * block < tokens.sizes[1])
    def _() -> None:
        count = _find_runs(tokens, runs, block, page_size, buffers.tile)
        _stage(buffers)

        @pl.loop(0, count + READ_AHEAD)
        def _(turn: jax.Array) -> None:
            pl.when(turn < count)(lambda: start_read(turn))
            pl.when(turn >= READ_AHEAD)(lambda: finish(turn - READ_AHEAD))

        @pl.loop(jnp.maximum(count - IN_FLIGHT, 0), count)
        def _(run: jax.Array) -> None:
            _write(buffers, layer, runs, run).wait()


def write_kv(
    k: jax.Array,
    v: jax.Array,
    kv_cache: jax.Array,
    layer: jax.Array,
    batch: AttentionBatch,
    *,
    interpret: Any = False,
) -> jax.Array:
    """The cache with k, v [T, kv_heads, head_dim] in their slots; in place if it is donated.

    Raises:
        ValueError: pages do not hold whole tiles.
    """
    _, _, slots, page_size, head_dim = kv_cache.shape
    tile = tile_slots(kv_cache.dtype)
    if page_size % tile:
        raise ValueError(
            f"on TPU, page_size must be a multiple of {tile} for a "
            f"{cache_dtype_name(kv_cache.dtype)} cache, got {page_size}"
        )
    num_tokens = k.shape[0]
    is_packed = head_dim == 2 * k.shape[2]
    kv = as_cached(jnp.concatenate([k, v], axis=2 if is_packed else 1), kv_cache.dtype)
    kv = kv.reshape(num_tokens, -1)
    block = min(BLOCK_TOKENS, -(-num_tokens // tile) * tile)
    kv = jnp.pad(kv, ((0, -num_tokens % block), (0, 0)))
    wide = jnp.int32 if jnp.issubdtype(kv.dtype, jnp.integer) else jnp.float32
    width = LANES if head_dim % LANES == 0 else head_dim
    in_memory = pl.BlockSpec(memory_space=pl.ANY)
    num_scalars = len(_Tokens._fields)
    kernel = pl.pallas_call(
        partial(_kernel, page_size=page_size),
        name="paged_write",
        out_shape=jax.ShapeDtypeStruct(kv_cache.shape, kv_cache.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=num_scalars,
            grid=(kv.shape[0] // block,),
            in_specs=[pl.BlockSpec((block, kv.shape[1]), lambda i, *_: (i, 0)), in_memory],
            out_specs=in_memory,
            scratch_shapes=[
                pltpu.VMEM((kv.shape[1] // width, block + 2 * tile, width), wide),
                pltpu.VMEM((IN_FLIGHT, slots, tile, head_dim), kv_cache.dtype),
                pltpu.SemaphoreType.DMA((IN_FLIGHT,)),
                pltpu.SemaphoreType.DMA((IN_FLIGHT,)),
                *[pltpu.SMEM((block,), jnp.int32)] * len(_Runs._fields),
            ],
        ),
        input_output_aliases={num_scalars + 1: 0},
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=VMEM_LIMIT_BYTES),
        interpret=interpret,
    )
    sizes = jnp.stack([layer, batch.q_offsets[-1]]).astype(jnp.int32)
    # The whole page table might not fit into scalar memory.
    pages = batch.page_table[batch.token_rows, batch.positions // page_size]
    tokens = _Tokens(sizes, batch.token_rows, batch.positions, pages, batch.q_offsets)
    result: jax.Array = kernel(*tokens, kv, kv_cache)
    return result
