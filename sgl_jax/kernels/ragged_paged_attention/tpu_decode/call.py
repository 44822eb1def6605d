"""How the decode kernel is called: its sizes, its inputs, its memory."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from sgl_jax.kernels.ragged_paged_attention.batch import AttentionBatch
from sgl_jax.kernels.ragged_paged_attention.block_sizes import DecodeBlocks, decode_blocks
from sgl_jax.kernels.ragged_paged_attention.cache_dtype import product_dtype
from sgl_jax.kernels.ragged_paged_attention.rows import Rows
from sgl_jax.kernels.ragged_paged_attention.scores import ScoreOptions
from sgl_jax.kernels.ragged_paged_attention.tpu_decode.kernel import decode_kernel
from sgl_jax.kernels.ragged_paged_attention.tpu_decode.memory import TABLES, KeyPages, Shape
from sgl_jax.kernels.ragged_paged_attention.tpu_eight_bits import should_move_bits
from sgl_jax.kernels.tpu_chip import LANES, VMEM_LIMIT_BYTES


def decode_attention(
    q: jax.Array,
    kv_cache: jax.Array,
    layer: jax.Array,
    batch: AttentionBatch,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    packed: bool = False,
    blocks: DecodeBlocks | None = None,
    interpret: Any = False,
) -> jax.Array:
    """Attention of the tokens of rows 0 .. num_decode, whose K and V are in the cache already.

    Arguments as in `interface.RaggedPagedAttention`; `blocks` is how much is computed on at once,
    by default as tuned for the chip. `packed`: K and V of a head lie side by side in the cache,
    and `q` has zeros where V is; in the result, that is where the attention is.

    Returns:
        [T, q_heads, head_dim] in q's dtype, in q's memory if the caller has no further use for it;
        other tokens' entries are those of q.
    """
    shape = _shape(q, kv_cache, batch, blocks, packed)
    grouped = q.reshape(q.shape[0], shape.kv_heads, shape.group, shape.head_dim)
    num_rows, table_width = batch.page_table.shape
    scalars = (
        *Rows.of(batch, layer),
        *_key_pages(batch, shape.page_size, sliding_window),
    )
    inputs = [] if sinks is None else [_stacked_sinks(sinks, shape)]
    in_memory = pl.BlockSpec(memory_space=pl.ANY)
    kernel = pl.pallas_call(
        partial(
            decode_kernel,
            shape=shape,
            options=ScoreOptions(scale, sliding_window, soft_cap),
            has_sinks=sinks is not None,
        ),
        name="paged_decode",
        out_shape=jax.ShapeDtypeStruct(grouped.shape, grouped.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            in_specs=[*(pl.BlockSpec(memory_space=pltpu.VMEM) for _ in inputs), *[in_memory] * 3],
            out_specs=in_memory,
            scratch_shapes=_scratch(shape, grouped, kv_cache, table_width),
        ),
        input_output_aliases={len(scalars) + len(inputs) + 1: 0},
        # Page ids are the memory manager's: a check of each DMA's bounds would cost more than it.
        compiler_params=pltpu.CompilerParams(
            disable_bounds_checks=True, vmem_limit_bytes=VMEM_LIMIT_BYTES
        ),
        interpret=interpret,
    )
    table = batch.page_table.reshape(num_rows, 1, table_width)
    out = kernel(*scalars, *inputs, table, grouped, kv_cache)
    return out.reshape(q.shape)


def _shape(
    q: jax.Array,
    kv_cache: jax.Array,
    batch: AttentionBatch,
    blocks: DecodeBlocks | None,
    packed: bool,
) -> Shape:
    _, _, heads, page_size, head_dim = kv_cache.shape
    kv_heads = heads // (1 if packed else 2)
    if blocks is None:
        blocks = decode_blocks(kv_heads, heads * head_dim * kv_cache.dtype.itemsize)
    part_pages = max(1, blocks.part_keys // page_size)
    dtype = product_dtype(q.dtype, kv_cache.dtype)
    return Shape(
        kv_heads=kv_heads,
        group=q.shape[1] // kv_heads,
        max_queries=1 + batch.max_draft_tokens,
        page_size=page_size,
        head_dim=head_dim,
        packed=packed,
        block_pages=max(1, blocks.block_keys // (page_size * part_pages)) * part_pages,
        part_pages=part_pages,
        product_dtype=dtype,
        moves_bits=should_move_bits(kv_cache.dtype, dtype),
    )


def _scratch(shape: Shape, q: jax.Array, kv_cache: jax.Array, table_width: int) -> list[Any]:
    """Memory for what follows the result in `Buffers`, and for `Softmax`."""
    queries = pltpu.VMEM((2, shape.max_queries, *q.shape[1:]), q.dtype)
    stack = (shape.stacks, shape.stack_rows)
    return [
        pltpu.SMEM((TABLES, 1, table_width), jnp.int32),
        pltpu.VMEM((2, shape.block_pages, *kv_cache.shape[2:]), kv_cache.dtype),
        queries,
        queries,
        pltpu.SemaphoreType.DMA,
        *[pltpu.SemaphoreType.DMA((2,))] * 3,
        pltpu.VMEM((*stack, shape.stack_dim), jnp.float32),
        pltpu.VMEM((*stack, LANES), jnp.float32),
        pltpu.VMEM((*stack, LANES), jnp.float32),
        pltpu.VMEM((*stack, shape.head_dim), jnp.float32),
    ]


def _key_pages(batch: AttentionBatch, page_size: int, sliding_window: int | None) -> KeyPages:
    kv_lens = batch.kv_starts + batch.q_offsets[1:] - batch.q_offsets[:-1]
    first_keys = jnp.zeros_like(kv_lens)
    if sliding_window is not None:
        first_keys = jnp.maximum(batch.kv_starts - sliding_window + 1, 0)
    return KeyPages(first_keys // page_size, -(-kv_lens // page_size))


def _stacked_sinks(sinks: jax.Array, shape: Shape) -> jax.Array:
    """sinks [q_heads] -> float32 [stacks, stack_rows, LANES], each beside its query."""
    by_head = sinks.astype(jnp.float32).reshape(shape.stacks, shape.stacked, 1, shape.group)
    rows = jnp.broadcast_to(
        by_head, (shape.stacks, shape.stacked, shape.max_queries, shape.group)
    ).reshape(shape.stacks, -1)
    rows = jnp.pad(rows, ((0, 0), (0, shape.stack_rows - rows.shape[1])))
    return jnp.broadcast_to(rows[..., None], (*rows.shape, LANES))
