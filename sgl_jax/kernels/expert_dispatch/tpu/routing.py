"""Choices of experts and the places of their lines for TPU, one kernel each.

XLA sorts for both, with a dozen small but expensive operations around its sorts. In these
kernels, experts are in sublanes and tokens in lanes: the most probable of a token's experts is a
maximum over sublanes, and the matrix unit counts the lines before a token's line as a product of
a 0/1 matrix with a triangular matrix of ones.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from sgl_jax.core.layer_configs import ExpertChoice
from sgl_jax.kernels.expert_dispatch.lines import UNDIVIDED_TOKENS, ExpertDispatch, Router
from sgl_jax.kernels.expert_dispatch.xla import LEAST_SUM, xla_sort
from sgl_jax.kernels.pallas_tpu import product
from sgl_jax.kernels.tpu_chip import VMEM_LIMIT_BYTES

# The kernels' names in compiled programs.
CHOOSE_NAME, SORT_NAME = "choose_experts", "sort_expert_rows"

_BLOCK_TOKENS = 256  # tokens that choose experts at once

_OPTIONS = pltpu.CompilerParams(vmem_limit_bytes=VMEM_LIMIT_BYTES)


def tpu_choose(
    x: jax.Array, router: Router, layer: jax.Array, is_token: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Implement `interface.ChooseExperts`; NaN among a token's logits makes its weights NaN."""
    (num_tokens, hidden), num_experts = x.shape, router.matrices.shape[2]
    block, shape = min(_BLOCK_TOKENS, num_tokens), (router.choice.top_k, num_tokens)
    zeros = jnp.zeros(num_experts)
    biases = [zeros if own is None else own for own in (router.bias, router.choice_bias)]
    rows = pl.BlockSpec((block, hidden), lambda number, _: (number, 0))

    def columns(height: int) -> pl.BlockSpec:
        return pl.BlockSpec((height, block), lambda number, _: (0, number))

    def whole(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec(shape, lambda number, _: (0,) * len(shape))

    matrix = pl.BlockSpec((1, hidden, num_experts), lambda number, layer: (layer[0], 0, 0))
    kernel = pl.pallas_call(
        partial(
            _choose,
            choice=router.choice,
            # A plain choice has the order of logits; a softmax over the chosen suffices.
            ranks_logits=router.choice.is_plain and router.choice_bias is None,
            eps=router.eps,
            from_one=router.from_one,
        ),
        name=CHOOSE_NAME,
        out_shape=[
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            jax.ShapeDtypeStruct(shape, jnp.float32),
            jax.ShapeDtypeStruct(shape, jnp.int32),
        ],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(pl.cdiv(num_tokens, block),),
            in_specs=[rows, whole(1, hidden), matrix, whole(2, num_experts, 1), columns(1)],
            out_specs=[rows, *[columns(router.choice.top_k)] * 2],
            scratch_shapes=[pltpu.VMEM((num_experts, block), jnp.float32)],
        ),
        compiler_params=_OPTIONS,
    )
    factors = router.norm.astype(jnp.float32)[None]
    both = jnp.stack(biases).astype(jnp.float32)[..., None]
    is_token = is_token.astype(jnp.int32)[None]
    normalised, weights, experts = kernel(layer[None], x, factors, router.matrices, both, is_token)
    return normalised, weights, experts


def _choose(
    layer: Any,
    x: Any,
    norm: Any,
    matrix: Any,
    biases: Any,
    is_token: Any,
    normalised: Any,
    weights: Any,
    experts: Any,
    ranks: Any,
    *,
    choice: ExpertChoice,
    ranks_logits: bool,
    eps: float,
    from_one: bool,
) -> None:
    """Compute normalised [T, hidden], and weights and experts [top_k, T], from x [T, hidden]."""
    values = _normalised(x[...], norm[...], eps, from_one)
    normalised[...] = values
    logits = product(matrix[0], values, (0, 1)) + biases[0]
    # A sum with NaN is NaN. Such a token gets the first experts, with weights of NaN.
    is_spoiled = jnp.isnan(jnp.sum(logits, axis=0, keepdims=True))
    logits = jnp.where(is_spoiled, 0.0, logits)
    if ranks_logits:
        scores = ranked = logits
    else:
        scores = _scores(logits, choice)
        # Stored in memory first: the simulator's compiler would compute a sum again wherever it
        # is compared with its maximum, and round it differently.
        ranks[...] = scores + biases[1]
        ranked = _in_groups(ranks[...], choice)
    number = lax.broadcasted_iota(jnp.int32, logits.shape, 0)
    taken, chosen = number < 0, []
    for k in range(choice.top_k):
        most, first = _greatest(jnp.where(taken, -jnp.inf, ranked), ~taken, number)
        taken |= number == first
        experts[k : k + 1] = jnp.where(is_token[...] > 0, first, len(logits))
        if not ranks_logits:
            most = jnp.sum(jnp.where(number == first, scores, 0.0), axis=0, keepdims=True)
        chosen.append(most)
    shares = [jnp.exp(most - chosen[0]) for most in chosen] if ranks_logits else chosen
    if choice.norm_topk_prob:
        total = sum(shares) + LEAST_SUM
    elif ranks_logits:
        total = jnp.sum(jnp.exp(logits - chosen[0]), axis=0, keepdims=True)
    else:
        total = 1.0
    total = jnp.where(is_spoiled, jnp.nan, total)
    for k, share in enumerate(shares):
        weights[k : k + 1] = choice.scale * share / total


def _greatest(values: Any, is_allowed: Any, number: Any) -> tuple[Any, Any]:
    """Return each column's greatest value, and the lowest allowed row with it: [1, T]."""
    most = jnp.max(values, axis=0, keepdims=True)
    is_most = (values == most) & is_allowed
    return most, jnp.min(jnp.where(is_most, number, len(values)), axis=0, keepdims=True)


def _scores(logits: Any, choice: ExpertChoice) -> Any:
    if choice.has_sigmoid_scores:
        return jax.nn.sigmoid(logits)
    shares = jnp.exp(logits - jnp.max(logits, axis=0, keepdims=True))
    return shares / jnp.sum(shares, axis=0, keepdims=True)


def _in_groups(ranked: Any, choice: ExpertChoice) -> Any:
    """Return ranked [experts, T], with minus infinity outside a token's groups."""
    if choice.num_groups == 1:
        return ranked
    size = len(ranked) // choice.num_groups
    groups = [ranked[first : first + size] for first in range(0, len(ranked), size)]
    best = [_sum_of_greatest(own, choice.best_of_group) for own in groups]
    for i, own in enumerate(groups):
        better = [(best[j] > best[i]) | ((best[j] == best[i]) & (j < i)) for j in range(len(best))]
        is_chosen = sum(x.astype(jnp.int32) for x in better) < choice.top_groups
        groups[i] = jnp.where(is_chosen, own, -jnp.inf)
    return jnp.concatenate(groups, axis=0)


def _sum_of_greatest(values: Any, count: int) -> Any:
    """Return the sum of the `count` greatest values of each column, [1, T]."""
    number = lax.broadcasted_iota(jnp.int32, values.shape, 0)
    total = jnp.zeros_like(values[:1])
    for _ in range(count):
        most, first = _greatest(values, number >= 0, number)
        total += most
        values = jnp.where(number == first, -jnp.inf, values)
    return total


def _normalised(x: Any, weight: Any, eps: float, from_one: bool) -> Any:
    """Implement `rms_normalised`; weight [1, hidden] is float32."""
    wide = x.astype(jnp.float32)
    scaled = wide * lax.rsqrt(jnp.mean(wide * wide, axis=1, keepdims=True) + eps)
    if from_one:
        return (scaled * (1.0 + weight)).astype(x.dtype)
    return (scaled.astype(x.dtype).astype(jnp.float32) * weight).astype(x.dtype)


def tpu_sort(experts: jax.Array, first: jax.Array, num_experts: int) -> ExpertDispatch:
    """Implement `interface.SortLines`; uses XLA for longer steps, which gather lines in order."""
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
    return ExpertDispatch(None, places, sizes[0], num_used[0])


def _sort(first: Any, experts: Any, places: Any, sizes: Any, num_used: Any) -> None:
    """Compute places [top_k, T], sizes [1, experts] and num_used [1] from experts [top_k, T]."""
    num_tokens, num_experts = experts.shape[1], sizes.shape[1]
    number = first[0] + lax.broadcasted_iota(jnp.int32, (num_experts, num_tokens), 0)
    is_chosen = [number == experts[k : k + 1] for k in range(len(experts))]
    choices = jnp.zeros(number.shape, jnp.float32)
    for own in is_chosen:  # a token chooses an expert at most once
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
    # In float32: Mosaic cannot multiply a 16-bit matrix with one row (jax 0.10.2).
    ones = jnp.ones((8, num_tokens), jnp.float32)
    counts = product(ones, choices.astype(jnp.float32), (1, 1))[:1]
    sizes[...] = counts.astype(jnp.int32)
    num_used[0] = jnp.sum(counts).astype(jnp.int32)


def _earlier(size: int) -> Any:
    """Return a matrix with ones in [i, j] where i < j."""
    row, column = (lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (0, 1))
    return jnp.where(row < column, 1.0, 0.0).astype(jnp.bfloat16)
