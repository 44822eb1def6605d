"""The positions of the greatest scores on TPU: bits of the least of them, then places of all.

XLA's operations for this take several times as long as the scores: each of many small ones waits
for the one before.

Grid: the rows, [blocks, LANES] scores each. Places are found for a group of blocks at a time, by
products with 0/1: the sums that number chosen scores, and the scores' block for each number.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from sgl_jax.kernels.pallas_tpu import UNCHECKED, product
from sgl_jax.kernels.tpu_chip import LANES, SUBLANES

DIGIT_BITS = 2  # found together
_SIGN = -(1 << 31)
_LEAST = -(1 << 31) + (1 << 23) - 1  # of -inf, see `_ordered`


def positions_of_greatest(scores: jax.Array, k: int) -> jax.Array:
    """Implement `chosen_xla.positions_of_greatest`."""
    num_rows, n = scores.shape
    blocks = -(-n // LANES)
    group = min(LANES, -(-blocks // 16) * 16)
    blocks += -blocks % group
    numbers = k + -k % LANES
    padded = jnp.pad(scores, ((0, 0), (0, blocks * LANES - n)), constant_values=-jnp.inf)

    def kernel(scores: Any, out: Any, keys: Any) -> None:
        _run(scores, out, keys, k, group)

    found: jax.Array = pl.pallas_call(
        kernel,
        name="greatest_scores",
        out_shape=jax.ShapeDtypeStruct((num_rows, 1, numbers), jnp.int32),
        grid=(num_rows,),
        in_specs=[pl.BlockSpec((None, blocks, LANES), lambda row: (row, 0, 0))],
        out_specs=pl.BlockSpec((None, 1, numbers), lambda row: (row, 0, 0)),
        scratch_shapes=[pltpu.VMEM((blocks, LANES), jnp.int32)],
        compiler_params=UNCHECKED,
    )(padded.reshape(num_rows, blocks, LANES))
    return found[:, 0, :k]


def _ordered(scores: jax.Array) -> jax.Array:
    """Return int32 in the order of the scores; NaN counts as the greatest, -0 as 0."""
    scores = jnp.where(jnp.isnan(scores), jnp.inf, jnp.where(scores == 0, 0.0, scores))
    bits = lax.bitcast_convert_type(scores, jnp.int32)
    return jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)


def _run(scores: Any, out: Any, keys: Any, k: int, group: int) -> None:
    num_groups = keys.shape[0] // group

    def part(i: jax.Array) -> Any:
        return pl.ds(pl.multiple_of(i * group, group), group)

    @pl.loop(0, num_groups)
    def _(i: jax.Array) -> None:
        keys[part(i)] = _ordered(scores[part(i)])

    def num_from(bounds: list[jax.Array]) -> list[jax.Array]:
        """Return how many keys are not less than each bound, float32 [1, 1]."""

        def add(i: jax.Array, sums: list[jax.Array]) -> list[jax.Array]:
            tiles = keys[part(i)].reshape(-1, SUBLANES, LANES)
            return [
                total + jnp.sum((tiles >= bound).astype(jnp.float32), axis=0)
                for total, bound in zip(sums, bounds, strict=True)
            ]

        sums = [jnp.zeros((SUBLANES, LANES), jnp.float32)] * len(bounds)
        sums = lax.fori_loop(0, num_groups, add, sums)
        return [jnp.sum(total, axis=(0, 1), keepdims=True) for total in sums]

    def next_digit(i: jax.Array, least: jax.Array) -> jax.Array:
        """Set two more bits of the k-th key, from the highest on, as of an unsigned number."""
        shift = 32 - DIGIT_BITS * (i + 1)
        raised = [least | lax.shift_left(jnp.int32(d), shift) for d in range(1, 1 << DIGIT_BITS)]
        for bound, count in zip(raised, num_from([own ^ _SIGN for own in raised]), strict=True):
            least = jnp.where(count >= k, bound, least)
        return least

    least = lax.fori_loop(0, 32 // DIGIT_BITS, next_digit, jnp.zeros((1, 1), jnp.int32)) ^ _SIGN
    (num_above,) = num_from([least + 1])
    # No key exceeds the one of +inf.
    num_equal = k - num_above

    out[...] = jnp.full(out.shape, -1, jnp.int32)

    def add_group(i: jax.Array, before: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        equal_before, chosen_before = before
        own = keys[part(i)]
        equal = own == least
        numbers = _numbers(equal) + equal_before
        is_chosen = ((own > least) | (equal & (numbers <= num_equal))) & (own > _LEAST)
        num_chosen = _place_group(out, is_chosen, i * group, chosen_before)
        return numbers[group - 1 :, LANES - 1 :], chosen_before + num_chosen

    zero = jnp.zeros((1, 1), jnp.float32)
    lax.fori_loop(0, num_groups, add_group, (zero, zero))


def _triangle(size: int, axis: int) -> jax.Array:
    """Return bfloat16 [size, size], 1 where the index of `axis` is not the greater one."""
    rows, columns = (lax.broadcasted_iota(jnp.int32, (size, size), a) for a in (0, 1))
    is_one = rows <= columns if axis == 0 else columns <= rows
    return is_one.astype(jnp.float32).astype(jnp.bfloat16)


def _zero_or_one(mask: jax.Array) -> jax.Array:
    return mask.astype(jnp.float32).astype(jnp.bfloat16)


def _numbers(mask: jax.Array) -> jax.Array:
    """Return, of mask [blocks, LANES], how many are True up to each place, float32."""
    ones = _zero_or_one(mask)
    in_block = product(ones, _triangle(LANES, 0), (1, 0))
    totals = product(ones, jnp.ones((LANES, LANES), jnp.bfloat16), (1, 0))
    ends = product(_triangle(len(mask), 1), totals.astype(jnp.bfloat16), (1, 0))
    return ends - totals + in_block


def _place_group(out: Any, mask: jax.Array, first_block: jax.Array, before: jax.Array) -> jax.Array:
    """Write to `out` the positions of the True in mask [blocks, LANES], from number `before` on.

    Returns how many they are, float32 [1, 1].
    """
    ones, num_blocks = _zero_or_one(mask), len(mask)
    # With a column for each block, and, the same in all lanes, with a row for each.
    up_to = product(_triangle(LANES, 1), ones, (1, 1))
    totals = product(jnp.ones((SUBLANES, LANES), jnp.bfloat16), ones, (1, 1))
    ends = product(totals.astype(jnp.bfloat16), _triangle(num_blocks, 0), (1, 0))
    totals_by_row = product(ones, jnp.ones((LANES, LANES), jnp.bfloat16), (1, 0))
    ends_by_row = product(_triangle(num_blocks, 1), totals_by_row.astype(jnp.bfloat16), (1, 0))
    first, last = (ends_by_row - totals_by_row)[:, :1], ends_by_row[:, :1]
    numbers = lax.broadcasted_iota(jnp.int32, (num_blocks, out.shape[1]), 1).astype(jnp.float32)
    numbers -= before
    is_own = _zero_or_one((first <= numbers) & (numbers < last))
    # A number's block, and its first number in two parts: bfloat16 holds whole numbers up to 256.
    starts, row = ends - totals, lax.broadcasted_iota(jnp.int32, ends.shape, 0)
    high = jnp.floor(starts / LANES)
    block = lax.broadcasted_iota(jnp.int32, ends.shape, 1).astype(jnp.float32)
    known = jnp.where(row == 0, high, jnp.where(row == 1, starts - LANES * high, block))
    found = product(known.astype(jnp.bfloat16), is_own, (1, 0))
    rank = numbers[:1] - (LANES * found[:1] + found[1:2])
    in_block = product(up_to.astype(jnp.bfloat16), is_own, (1, 0))
    lane = jnp.sum((in_block <= rank).astype(jnp.float32), axis=0, keepdims=True)
    position = (first_block.astype(jnp.float32) + found[2:3]) * LANES + lane
    count = ends[:1, num_blocks - 1 :]
    is_here = (numbers[:1] >= 0) & (numbers[:1] < count)
    out[...] = jnp.where(is_here, position.astype(jnp.int32), out[...])
    return count
