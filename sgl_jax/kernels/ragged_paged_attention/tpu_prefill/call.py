"""How the prefill kernel is called: its sizes, its inputs, its memory."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from sgl_jax.kernels.ragged_paged_attention.batch import AttentionBatch
from sgl_jax.kernels.ragged_paged_attention.cache_dtype import product_dtype
from sgl_jax.kernels.ragged_paged_attention.prefill_blocks import PrefillBlocks, prefill_blocks
from sgl_jax.kernels.ragged_paged_attention.rows import Rows
from sgl_jax.kernels.ragged_paged_attention.scores import ScoreOptions
from sgl_jax.kernels.ragged_paged_attention.tpu_prefill.kernel import prefill_kernel
from sgl_jax.kernels.ragged_paged_attention.tpu_prefill.memory import Shape
from sgl_jax.kernels.ragged_paged_attention.tpu_prefill.softmax import LOG2_E
from sgl_jax.kernels.tpu_chip import LANES, VMEM_LIMIT_BYTES


def prefill_attention(
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
    blocks: PrefillBlocks | None = None,
    interpret: Any = False,
) -> jax.Array:
    """Attention of the tokens of rows num_decode .. num_rows, whose K and V are in the cache.

    Arguments as in `interface.RaggedPagedAttention`; `blocks` is how much is computed on at once,
    by default as tuned for the chip. `packed`: K and V of a head lie side by side in the cache,
    and `q` has zeros where V is; in the result, that is where the attention is.

    Returns:
        [T, q_heads, head_dim] in q's dtype, in q's memory if the caller has no further use for it;
        other tokens' entries are those of q.

    Raises:
        ValueError: a block of keys is no whole number of pages.
    """
    shape = _shape(q, kv_cache, blocks, packed)
    scalars = Rows.of(batch, layer)
    inputs = [] if sinks is None else [_spread_sinks(sinks, shape)]
    in_memory = pl.BlockSpec(memory_space=pl.ANY)
    kernel = pl.pallas_call(
        partial(
            prefill_kernel,
            shape=shape,
            options=ScoreOptions(scale, sliding_window, soft_cap),
            has_sinks=sinks is not None,
        ),
        name="paged_prefill",
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            in_specs=[*(pl.BlockSpec(memory_space=pltpu.VMEM) for _ in inputs), *[in_memory] * 3],
            out_specs=in_memory,
            scratch_shapes=_scratch(shape, q, kv_cache, batch.page_table.shape),
        ),
        input_output_aliases={len(scalars) + len(inputs) + 2: 0},
        # Page ids are the memory manager's: a check of each DMA's bounds would cost more than it.
        compiler_params=pltpu.CompilerParams(
            vmem_limit_bytes=VMEM_LIMIT_BYTES, disable_bounds_checks=True
        ),
        interpret=interpret,
    )
    return kernel(*scalars, *inputs, kv_cache, batch.page_table[:, None], q)


def _shape(q: jax.Array, kv_cache: jax.Array, blocks: PrefillBlocks | None, packed: bool) -> Shape:
    num_tokens, q_heads, head_dim = q.shape
    kv_heads, page_size = kv_cache.shape[2] // (1 if packed else 2), kv_cache.shape[3]
    group = q_heads // kv_heads
    if blocks is None:
        dtype = product_dtype(q.dtype, kv_cache.dtype)
        blocks = prefill_blocks(kv_heads, group, head_dim, page_size, dtype, num_tokens)
    if blocks.part_keys % page_size:
        raise ValueError(f"page_size must divide {blocks.part_keys}, got {page_size}")
    return Shape(kv_heads, group, page_size, head_dim, packed, blocks)


def _scratch(shape: Shape, q: jax.Array, kv_cache: jax.Array, table: tuple[int, ...]) -> list[Any]:
    """Memory for what follows the tokens in `Buffers`, and for `Softmax`; `table` is its shape."""
    num_rows, table_width = table
    by_token = pltpu.VMEM((shape.blocks.queries, *q.shape[1:]), q.dtype)
    by_head = (shape.kv_heads, shape.group, shape.blocks.queries)
    return [
        pltpu.SMEM((num_rows + 1,), jnp.int32),
        pltpu.SMEM((2, 1, table_width), jnp.int32),
        pltpu.VMEM((2, shape.block_pages, *kv_cache.shape[2:]), kv_cache.dtype),
        by_token,
        by_token,
        pltpu.SemaphoreType.DMA,
        pltpu.SemaphoreType.DMA((2,)),
        pltpu.SemaphoreType.DMA,
        pltpu.SemaphoreType.DMA,
        pltpu.VMEM((*by_head, shape.head_dim), product_dtype(q.dtype, kv_cache.dtype)),
        pltpu.VMEM((*by_head, LANES), jnp.float32),
        pltpu.VMEM((*by_head, LANES), jnp.float32),
        pltpu.VMEM((*by_head, shape.head_dim), jnp.float32),
    ]


def _spread_sinks(sinks: jax.Array, shape: Shape) -> jax.Array:
    """sinks [q_heads] -> float32 [kv_heads, group, 1, 128] in powers of two."""
    by_head = sinks.astype(jnp.float32).reshape(shape.kv_heads, shape.group, 1, 1) * LOG2_E
    return jnp.broadcast_to(by_head, (shape.kv_heads, shape.group, 1, LANES))
