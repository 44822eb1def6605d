"""Inverses of the triangular systems of a chunk of the gated delta rule.

Two systems side by side fill a row of lanes. Small blocks on the diagonals are inverted by
substitution in float32, row by row and all at once, by the vector unit, where a row has little
latency. Matrix products combine them into larger blocks.
"""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from sgl_jax.kernels.gated_delta.batch import CHUNK_TOKENS
from sgl_jax.kernels.gated_delta.tpu.shared import row_and_column
from sgl_jax.kernels.pallas_tpu import bfloat16_parts, product
from sgl_jax.kernels.tpu_chip import LANES, SUBLANES

SIDE_BY_SIDE = LANES // CHUNK_TOKENS  # systems of equations in a row of lanes
SUBSTITUTED = SUBLANES  # rows of a block inverted by substitution: a register


def inverses(pairs: list[jax.Array], dtype: jnp.dtype) -> list[jax.Array]:
    """Invert I + tril(system, -1) of two systems [C, C] side by side: float32 [C, 2 * C].

    Blocks of a size are side by side, [size, 128]. The inverse of [[A, 0], [B, D]] is
    [[A', 0], [-D' B A', D']] with the inverses A', D' of A and D; the products use `dtype`. A
    series of powers of the system would cancel where keys are alike.
    """
    blocks, size = _substituted(pairs), SUBSTITUTED
    while size < CHUNK_TOKENS:
        inner = [
            _with_exact_left(_below(pair, size), _placed(own, 0, dtype))
            for pair, own in zip(pairs, blocks, strict=True)
        ]
        below = [
            product(own.astype(dtype), _placed(part, 1, dtype), (1, 0))
            for own, part in zip(blocks, inner, strict=True)
        ]
        is_first = (row_and_column((size, LANES))[1] & size) == 0
        blocks = [
            jnp.concatenate([jnp.where(is_first, own, 0), jnp.where(is_first, -part, own)], axis=0)
            for own, part in zip(blocks, below, strict=True)
        ]
        size *= 2
    return blocks


def _with_exact_left(left: jax.Array, right: jax.Array) -> jax.Array:
    """Multiply with a matrix of bfloat16 or float32 without rounding `left`.

    A system's numbers cancel each other here if keys are alike and little is forgotten, but
    rounding errors would not. Additional rows cost little compared with loading the weights.
    """
    if right.dtype == jnp.float32:
        return product(left, right, (1, 0))
    both = product(jnp.concatenate(bfloat16_parts(left, 2), axis=0), right, (1, 0))
    return both[: left.shape[0]] + both[left.shape[0] :]


def _below(pair: jax.Array, size: int) -> jax.Array:
    """Return [size, 128]: in each first block's columns, the block below it."""
    return _blocks(pair, 2 * size)[size:]


def _blocks(pair: jax.Array, size: int) -> jax.Array:
    """Return the blocks on the diagonals of two systems, side by side [size, 128]."""
    column = row_and_column((size, LANES))[1] & (CHUNK_TOKENS - 1)
    result = pair[:size]
    for first in range(size, CHUNK_TOKENS, size):
        result = jnp.where(column < first, result, pair[first : first + size])
    return result


def _placed(blocks: jax.Array, half: int, dtype: jnp.dtype) -> jax.Array:
    """Spread every second of the blocks [size, 128] on a matrix [128, 128] of `dtype`.

    Each block keeps its columns. For `half` 0, its rows have the same numbers; for 1, they are the
    next block's rows.
    """
    size = blocks.shape[0]
    words = pltpu.bitcast(blocks.astype(dtype), jnp.int32)
    block_of_lane = row_and_column(words.shape)[1] // size
    parts = [jnp.zeros_like(words)] * (LANES // size)
    for place in range(half, len(parts), 2):
        parts[place] = jnp.where(block_of_lane == place - half, words, 0)
    return pltpu.bitcast(jnp.concatenate(parts, axis=0), dtype)


def _substituted(pairs: list[jax.Array]) -> list[jax.Array]:
    """Invert the smallest blocks on the diagonals, side by side, of each two systems.

    Registers with the same permutation follow each other: the pattern is loaded once.
    """
    row, lane = row_and_column((SUBSTITUTED, LANES))
    column = lane & (SUBSTITUTED - 1)
    lower = [jnp.where(column < row, _blocks(pair, SUBSTITUTED), 0) for pair in pairs]
    result = [(column == row).astype(jnp.float32) for _ in pairs]
    for solved in range(SUBSTITUTED - 1):
        # A column of each block, in all lanes of the block.
        factors = [jnp.take_along_axis(own, lane - column + solved, axis=1) for own in lower]
        result = [
            own - factor * own[solved : solved + 1]
            for own, factor in zip(result, factors, strict=True)
        ]
    return result
