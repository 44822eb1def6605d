"""A draw of one column of each row by weights, exact and with little noise.

Independent exponential waiting times with the weights as rates: the first to arrive is drawn with a
probability in proportion to its weight (equivalent to the "Gumbel-max trick"). The columns are cut
into strips, side by side. One race among the places within a strip, by the sums of the weights over
all strips, then one among the strips, by the weights at that place, is the same draw by the chain
rule, and needs noise for one strip's width instead of all columns.

The sums are additions of whole strips, in one order: no bit of them depends on the number of rows.
"""

import jax
import jax.numpy as jnp
from jax import lax

NUM_STRIPS = 6  # with 8, sums for a TPU's search of thresholds spill from a v5e's registers
_LANES = 128  # of a TPU's registers; strips fill whole registers


def pad_to_strips(weights: jax.Array) -> jax.Array:
    """Pad float32[n, vocab] with columns of zeros, so that strips are whole registers."""
    return jnp.pad(weights, ((0, 0), (0, -weights.shape[1] % (NUM_STRIPS * _LANES))))


def split_strips(weights: jax.Array) -> list[jax.Array]:
    """Return float32[n, columns] as `NUM_STRIPS` arrays of equal width."""
    return jnp.split(weights, NUM_STRIPS, axis=1)


def race(strips: list[jax.Array], seeds: jax.Array, positions: jax.Array) -> jax.Array:
    """Return a column of each row, drawn by the weights in `split_strips`: int32[n].

    A column of weight 0 is never drawn, unless all are 0 or one is NaN.

    Args:
        strips: float32[n, width] each, at least 0; each row's largest is about 1.
        seeds: int32[n, 2], the high and low words of the seed of the noise.
        positions: int32[n], which also determine the noise.
    """
    width = strips[0].shape[1]

    def waiting_times(seed: jax.Array, position: jax.Array) -> jax.Array:
        # The generator is named so that no default changes it. Its key has two words.
        words = lax.bitcast_convert_type(seed, jnp.uint32)
        key = jax.random.wrap_key_data(words, impl="threefry2x32")
        return _exponential(jax.random.fold_in(key, position), width + NUM_STRIPS)

    times = jax.vmap(waiting_times)(seeds, positions)
    place = first_argmax(sum(strips[1:], strips[0]) / times[:, :width])
    at_place = [jnp.take_along_axis(strip, place[:, None], axis=1) for strip in strips]
    strip = first_argmax(jnp.concatenate(at_place, axis=1) / times[:, width:])
    return strip * width + place


def _exponential(key: jax.Array, size: int) -> jax.Array:
    """Return float32[size] from the exponential distribution, from 2**-32 to 17.

    Uses 31 random bits, as the smallest times decide: with 23, the unlikely half of a vocabulary
    would never be drawn. None is 0 or infinite, which would draw a column of weight 0.
    """
    bits = jax.random.bits(key, (size,), jnp.uint32) >> 1
    uniform = (bits.astype(jnp.int32).astype(jnp.float32) + 0.5) * 2.0**-31
    return -jnp.log1p(-jnp.minimum(uniform, 1.0 - 2.0**-24))


def first_argmax(values: jax.Array) -> jax.Array:
    """Return the lowest index of the largest value along the last axis: int32[...].

    Two plain reductions instead of the pairwise reduction of `jnp.argmax`, which XLA does not
    vectorise on the CPU (3.5 times slower at [32, 4096]). A line with NaN gets its last index.
    """
    size = values.shape[-1]
    index = lax.broadcasted_iota(jnp.int32, values.shape, values.ndim - 1)
    largest = jnp.max(values, axis=-1, keepdims=True)
    return jnp.min(jnp.where(values == largest, index, size - 1), axis=-1)


def finite_rows(logits: jax.Array) -> jax.Array:
    """Return whether a token can be drawn from each line of logits [..., vocab]: bool[...].

    False if a logit is NaN or +inf, or if all are -inf. The maximum, which is NaN if any value is,
    shows all three, and the draws need it too.
    """
    return jnp.isfinite(jnp.max(logits, axis=-1))
