"""Choices of experts and the places of their lines for TPU, each one kernel.

XLA sorts for both, and runs a dozen small operations around its sorts, none of which is cheap. In
these kernels experts lie along sublanes and tokens along lanes: the most probable of a
token's experts is a maximum over sublanes, and the lines before a token's are counted by the matrix
unit, as a product of zeros and ones with a triangle of ones.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from sgl_jax.kernels.expert_lines.lines import UNDIVIDED_TOKENS, ExpertLines
from sgl_jax.kernels.expert_lines.xla import xla_sort
from sgl_jax.kernels.pallas_tpu import product
from sgl_jax.kernels.tpu_chip import VMEM_LIMIT_BYTES

# The kernels' names in compiled programs.
CHOOSE_NAME, SORT_NAME = "choose_experts", "sort_expert_lines"

_BLOCK_TOKENS = 512  # whose experts are chosen at once

_OPTIONS = pltpu.CompilerParams(vmem_limit_bytes=VMEM_LIMIT_BYTES)


def tpu_choose(
    logits: jax.Array, is_token: jax.Array, top_k: int, norm_topk_prob: bool
) -> tuple[jax.Array, jax.Array]:
    """See `interface.ChooseExperts`. A token with NaN among its logits has no experts."""
    num_tokens, num_experts = logits.shape
    block, column = min(_BLOCK_TOKENS, num_tokens), lambda number: (0, number)
    shape = (top_k, num_tokens)
    kernel = pl.pallas_call(
        partial(_choose, normalises=norm_topk_prob),
        name=CHOOSE_NAME,
        out_shape=[jax.ShapeDtypeStruct(shape, dtype) for dtype in (jnp.float32, jnp.int32)],
        grid=(pl.cdiv(num_tokens, block),),
        in_specs=[pl.BlockSpec((rows, block), column) for rows in (num_experts, 1)],
        out_specs=[pl.BlockSpec((top_k, block), column)] * 2,
        compiler_params=_OPTIONS,
    )
    weights, experts = kernel(logits.T, is_token.astype(jnp.int32)[None])
    return weights, experts


def _choose(logits: Any, is_token: Any, weights: Any, experts: Any, *, normalises: bool) -> None:
    """logits [experts, T] and is_token [1, T] into weights and experts [top_k, T]."""
    values = logits[...]
    number = lax.broadcasted_iota(jnp.int32, values.shape, 0)
    taken, chosen = number < 0, []
    for k in range(len(experts)):
        most = jnp.max(jnp.where(taken, -jnp.inf, values), axis=0, keepdims=True)
        is_most = (values == most) & ~taken
        first = jnp.min(jnp.where(is_most, number, len(values)), axis=0, keepdims=True)
        taken |= number == first
        experts[k : k + 1] = jnp.where(is_token[...] > 0, first, len(values))
        chosen.append(most)
    shares = [jnp.exp(most - chosen[0]) for most in chosen]
    total = sum(shares) if normalises else jnp.sum(jnp.exp(values - chosen[0]), 0, keepdims=True)
    for k, share in enumerate(shares):
        weights[k : k + 1] = share / total


def tpu_sort(experts: jax.Array, first: jax.Array, num_experts: int) -> ExpertLines:
    """See `interface.SortLines`. XLA's gathers of longer steps need the lines in order."""
    if experts.shape[1] > UNDIVIDED_TOKENS:
        return xla_sort(experts, first, num_experts)
    in_vmem, in_smem = (pl.BlockSpec(memory_space=space) for space in (pltpu.VMEM, pltpu.SMEM))
    shapes = experts.shape, (1, num_experts), (1,)
    kernel = pl.pallas_call(
        _sort,
        name=SORT_NAME,
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes],
        in_specs=[in_smem, in_vmem],
        out_specs=[in_vmem, in_vmem, in_smem],
        compiler_params=_OPTIONS,
    )
    places, sizes, num_used = kernel(jnp.asarray(first, jnp.int32)[None], experts)
    return ExpertLines(None, places, sizes[0], num_used[0])


def _sort(first: Any, experts: Any, places: Any, sizes: Any, num_used: Any) -> None:
    """experts [top_k, T] into places [top_k, T], sizes [1, experts] and num_used [1]."""
    num_tokens, num_experts = experts.shape[1], sizes.shape[1]
    number = first[0] + lax.broadcasted_iota(jnp.int32, (num_experts, num_tokens), 0)
    is_chosen = [number == experts[k : k + 1] for k in range(len(experts))]
    choices = jnp.zeros(number.shape, jnp.float32)
    for own in is_chosen:  # a token chooses an expert once at most
        choices = jnp.where(own, 1.0, choices)
    # Sums of zeros and ones in float32 are exact.
    choices = choices.astype(jnp.bfloat16)
    earlier = product(choices, _earlier(num_tokens), (1, 0))
    lower = product(_earlier(num_experts), choices, (0, 0))
    table = (earlier + jnp.sum(lower, axis=1, keepdims=True)).astype(jnp.int32)
    for k, own in enumerate(is_chosen):
        place = jnp.sum(jnp.where(own, table, 0), axis=0, keepdims=True)
        is_own = (experts[k : k + 1] >= first[0]) & (experts[k : k + 1] < first[0] + num_experts)
        places[k : k + 1] = jnp.where(is_own, place, experts.size)
    counts = product(jnp.ones((8, num_tokens), jnp.bfloat16), choices, (1, 1))[:1]
    sizes[...] = counts.astype(jnp.int32)
    num_used[0] = jnp.sum(counts).astype(jnp.int32)


def _earlier(size: int) -> Any:
    """Ones in [i, j] where i < j."""
    row, column = (lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (0, 1))
    return jnp.where(row < column, 1.0, 0.0).astype(jnp.bfloat16)
