"""Top-k, top-p and min-p without a sort: each is a threshold on the probability.

A sort of the vocabulary costs 14 times this search on the CPU at [32, 4096] and does not
parallelise over the vocabulary elsewhere.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sgl_jax.layers.sampling.race import NUM_STRIPS, split_strips


def keep_threshold(
    weights: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array
) -> jax.Array:
    """Return the least weight to keep, per row: float32[n].

    Top-k's threshold is the k-th largest weight. Top-p's is the largest weight t such that the
    tokens with weights of at least t hold at least `top_p` of the sum. Min-p's is a share of the
    maximum. The highest of the three applies. Tokens exactly at the threshold are all kept, so the
    most likely token always is.

    Args:
        weights: float32[n, columns], the probabilities divided by the row's largest, 0 past the
            vocabulary; from `pad_to_strips`.
        top_k: int32[n], 0 keeps all.
        top_p: float32[n], 1 keeps all.
        min_p: float32[n], 0 keeps all.
    """

    def by_platform() -> jax.Array:
        threshold: jax.Array = lax.platform_dependent(
            *(weights, top_k, top_p),
            tpu=partial(search_threshold, cut=AT_ONCE),
            default=partial(search_threshold, cut=ONE_BY_ONE),
        )
        return threshold

    is_searched = jnp.any((top_k > 0) | (top_p < 1.0))
    searched: jax.Array = lax.cond(is_searched, by_platform, lambda: jnp.zeros_like(top_p))
    return jnp.maximum(searched, min_p)


# For each of the bounds float32[n]: the number of a row's weights float32[n, columns] at or above
# it, int32[n], and their sum, float32[n].
_Sums = Callable[[jax.Array, Sequence[jax.Array]], list[tuple[jax.Array, jax.Array]]]


class Cut(NamedTuple):
    """A search's work in one pass over the weights."""

    bits: int  # bits of a threshold found in a pass, a divisor of 30
    sums: _Sums
    stops_early: bool  # stop once no row has two tokens between its bounds


class _Bounds(NamedTuple):
    """The state of a search: `low` meets the conditions, the next multiple of its step does not."""

    turn: jax.Array  # int32[]
    low: jax.Array  # int32[n], a float's bit pattern
    count_low: jax.Array  # int32[n] tokens at or above `low`
    count_high: jax.Array  # int32[n] tokens at or above the next multiple


_NUM_BITS = 30  # in the patterns of the floats from 0 to 1


def search_threshold(weights: jax.Array, top_k: jax.Array, top_p: jax.Array, cut: Cut) -> jax.Array:
    """Return the largest t at which {w >= t} counts `top_k` tokens or holds `top_p`: float32[n].

    0 for rows that have neither. A search that stops early may give less, but keeps the same
    tokens. Both conditions can only become true as t falls, so the largest t that meets either is
    the higher of the two thresholds. Non-negative floats have the order of their bit patterns, so
    t's bits are found from the highest down, which is exact.
    """
    (_, total), *_ = cut.sums(weights, [jnp.zeros_like(top_p)])
    searched = (top_k > 0) | (top_p < 1.0)
    least_count = jnp.where(top_k > 0, top_k, weights.shape[1] + 1)
    least_mass = jnp.where(top_p < 1.0, top_p, 2.0) * total

    def goes_on(b: _Bounds) -> jax.Array:
        is_left = b.turn < _NUM_BITS // cut.bits
        if not cut.stops_early:
            return is_left
        return is_left & jnp.any(searched & (b.count_low - b.count_high > 1))

    def find_bits(b: _Bounds) -> _Bounds:
        shift = _NUM_BITS - cut.bits * (b.turn + 1)
        patterns = [b.low | jnp.left_shift(i, shift) for i in range(1, 2**cut.bits)]
        floats = [lax.bitcast_convert_type(pattern, jnp.float32) for pattern in patterns]
        digit, count_low, count_high = jnp.zeros_like(b.low), b.count_low, b.count_high
        for count, mass in cut.sums(weights, floats):
            met = (count >= least_count) | (mass >= least_mass)
            digit += jnp.where(met, 1, 0)
            count_low = jnp.where(met, count, count_low)
            count_high = jnp.where(met, count_high, jnp.maximum(count_high, count))
        return _Bounds(b.turn + 1, b.low | jnp.left_shift(digit, shift), count_low, count_high)

    nothing = jnp.zeros_like(top_k)
    all_columns = jnp.full_like(top_k, weights.shape[1])
    bounds = _Bounds(jnp.int32(0), nothing, all_columns, nothing)
    settled: _Bounds = lax.while_loop(goes_on, find_bits, bounds)
    return lax.bitcast_convert_type(settled.low, jnp.float32)


def _sums_apart(
    weights: jax.Array, bounds: Sequence[jax.Array]
) -> list[tuple[jax.Array, jax.Array]]:
    """Compute `_Sums` as separate reductions, which XLA vectorises on the CPU."""
    inside = [weights >= bound[:, None] for bound in bounds]
    return [
        (jnp.sum(each, axis=-1, dtype=jnp.int32), jnp.sum(jnp.where(each, weights, 0.0), axis=-1))
        for each in inside
    ]


def _sums_at_once(
    weights: jax.Array, bounds: Sequence[jax.Array]
) -> list[tuple[jax.Array, jax.Array]]:
    """Compute `_Sums` as one reduction, which reads the weights once.

    A TPU waits for each addition to the same sum, so each strip has a separate sum.
    """
    terms: list[jax.Array] = []
    for bound in bounds:
        for strip in split_strips(weights):
            is_inside = strip >= bound[:, None]
            terms += [jnp.where(is_inside, 1, 0), jnp.where(is_inside, strip, 0.0)]
    zeros = [jnp.zeros((), term.dtype) for term in terms]
    sums = lax.reduce(terms, zeros, lambda a, b: [x + y for x, y in zip(a, b, strict=True)], (1,))
    of_bounds = [sums[i : i + 2 * NUM_STRIPS] for i in range(0, len(sums), 2 * NUM_STRIPS)]
    return [(sum(each[2::2], each[0]), sum(each[3::2], each[1])) for each in of_bounds]


# On a TPU, a pass for three bits takes little longer than for one bit, and the counts that stop a
# search early cost more than they save.
AT_ONCE = Cut(bits=3, sums=_sums_at_once, stops_early=False)
ONE_BY_ONE = Cut(bits=1, sums=_sums_apart, stops_early=True)
