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

from sgl_jax.kernels.expert_lines.lines import (
    UNDIVIDED_TOKENS,
    ExpertLines,
    Router,
    RouterRule,
)
from sgl_jax.kernels.expert_lines.xla import xla_sort
from sgl_jax.kernels.pallas_tpu import product
from sgl_jax.kernels.tpu_chip import VMEM_LIMIT_BYTES

# The kernels' names in compiled programs.
CHOOSE_NAME, SORT_NAME = "choose_experts", "sort_expert_lines"

_BLOCK_TOKENS = 256  # whose experts are chosen at once

_OPTIONS = pltpu.CompilerParams(vmem_limit_bytes=VMEM_LIMIT_BYTES)


def tpu_choose(
    x: jax.Array, router: Router, layer: jax.Array, is_token: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `interface.ChooseExperts`. NaN among a token's logits makes its weights NaN."""
    (num_tokens, hidden), num_experts = x.shape, router.matrices.shape[2]
    block, shape = min(_BLOCK_TOKENS, num_tokens), (router.rule.top_k, num_tokens)
    bias = jnp.zeros(num_experts) if router.bias is None else router.bias
    rows = pl.BlockSpec((block, hidden), lambda number, _: (number, 0))

    def columns(height: int) -> pl.BlockSpec:
        return pl.BlockSpec((height, block), lambda number, _: (0, number))

    def whole(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec(shape, lambda number, _: (0,) * len(shape))

    matrix = pl.BlockSpec((1, hidden, num_experts), lambda number, layer: (layer[0], 0, 0))
    kernel = pl.pallas_call(
        partial(_choose, rule=router.rule),
        name=CHOOSE_NAME,
        out_shape=[
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            jax.ShapeDtypeStruct(shape, jnp.float32),
            jax.ShapeDtypeStruct(shape, jnp.int32),
        ],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(pl.cdiv(num_tokens, block),),
            in_specs=[rows, whole(1, hidden), matrix, whole(num_experts, 1), columns(1)],
            out_specs=[rows, *[columns(router.rule.top_k)] * 2],
        ),
        compiler_params=_OPTIONS,
    )
    factors = router.norm.astype(jnp.float32)[None]
    biases = bias.astype(jnp.float32)[:, None]
    is_token = is_token.astype(jnp.int32)[None]
    normalised, weights, experts = kernel(
        layer[None], x, factors, router.matrices, biases, is_token
    )
    return normalised, weights, experts


def _choose(
    layer: Any,
    x: Any,
    norm: Any,
    matrix: Any,
    bias: Any,
    is_token: Any,
    normalised: Any,
    weights: Any,
    experts: Any,
    *,
    rule: RouterRule,
) -> None:
    """x [T, hidden] into normalised, and weights and experts [top_k, T]."""
    values = _normalised(x[...], norm[...], rule)
    normalised[...] = values
    logits = product(matrix[0], values, (0, 1)) + bias[...]
    # A sum with NaN is NaN. Such a token takes the first experts, with weights of NaN.
    is_spoiled = jnp.isnan(jnp.sum(logits, axis=0, keepdims=True))
    logits = jnp.where(is_spoiled, 0.0, logits)
    number = lax.broadcasted_iota(jnp.int32, logits.shape, 0)
    taken, chosen = number < 0, []
    for k in range(rule.top_k):
        most = jnp.max(jnp.where(taken, -jnp.inf, logits), axis=0, keepdims=True)
        is_most = (logits == most) & ~taken
        first = jnp.min(jnp.where(is_most, number, len(logits)), axis=0, keepdims=True)
        taken |= number == first
        experts[k : k + 1] = jnp.where(is_token[...] > 0, first, len(logits))
        chosen.append(most)
    shares = [jnp.exp(most - chosen[0]) for most in chosen]
    total = sum(shares)
    if not rule.norm_topk_prob:
        total = jnp.sum(jnp.exp(logits - chosen[0]), axis=0, keepdims=True)
    total = jnp.where(is_spoiled, jnp.nan, total)
    for k, share in enumerate(shares):
        weights[k : k + 1] = share / total


def _normalised(x: Any, weight: Any, rule: RouterRule) -> Any:
    """See `rms_normalised`; weight [1, hidden] is float32."""
    wide = x.astype(jnp.float32)
    scaled = wide * lax.rsqrt(jnp.mean(wide * wide, axis=1, keepdims=True) + rule.eps)
    if rule.from_one:
        return (scaled * (1.0 + weight)).astype(x.dtype)
    return (scaled.astype(x.dtype).astype(jnp.float32) * weight).astype(x.dtype)


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
    # In float32: Mosaic multiplies no matrix of 16 bits that is one expert high (jax 0.10.2).
    ones = jnp.ones((8, num_tokens), jnp.float32)
    counts = product(ones, choices.astype(jnp.float32), (1, 1))[:1]
    sizes[...] = counts.astype(jnp.int32)
    num_used[0] = jnp.sum(counts).astype(jnp.int32)


def _earlier(size: int) -> Any:
    """Ones in [i, j] where i < j."""
    row, column = (lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (0, 1))
    return jnp.where(row < column, 1.0, 0.0).astype(jnp.bfloat16)
