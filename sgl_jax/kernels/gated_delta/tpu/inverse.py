"""Inverses of the triangular systems of a chunk of the gated delta rule, as products of matrices.

Each is made by halves, all blocks of a size at once. Two systems side by side fill a row of lanes.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from sgl_jax.kernels.gated_delta.batch import CHUNK_TOKENS
from sgl_jax.kernels.gated_delta.tpu.shared import row_and_column
from sgl_jax.kernels.pallas_tpu import product
from sgl_jax.kernels.tpu_chip import LANES

SIDE_BY_SIDE = LANES // CHUNK_TOKENS  # systems of equations in a row of lanes


def inverses(systems: list[jax.Array], dtype: jnp.dtype) -> list[jax.Array]:
    """The inverses of I + tril(system, -1), each float32 [C, C], by products of `dtype`."""
    result = []
    pairs = [
        jnp.concatenate(systems[i : i + SIDE_BY_SIDE], axis=1)
        for i in range(0, len(systems), SIDE_BY_SIDE)
    ]
    for pair in _inverse(pairs, dtype):
        width = pair.shape[1]
        result += [pair[:, i : i + CHUNK_TOKENS] for i in range(0, width, CHUNK_TOKENS)]
    return result


def _inverse(pairs: list[jax.Array], dtype: jnp.dtype) -> list[jax.Array]:
    """`inverses` of one or two matrices side by side, [C, C] or [C, 2 * C].

    By halves: the inverse of [[A, 0], [B, D]] is [[A', 0], [-D' B A', D']] with the inverses A', D'
    of A and D. A series of powers of the system would cancel where keys are alike.
    """
    masks = [_Halves.of(pair.shape) for pair in pairs]
    result = [
        mask.identity - jnp.where(mask.below(1), pair, 0)
        for mask, pair in zip(masks, pairs, strict=True)
    ]
    size = 2
    while size < CHUNK_TOKENS:
        below = [
            _side_by_side(jnp.where(mask.below(size), pair, 0), inverse, dtype)
            for mask, pair, inverse in zip(masks, pairs, result, strict=True)
        ]
        result = [
            inverse - _side_by_side(inverse, part, dtype)
            for inverse, part in zip(result, below, strict=True)
        ]
        size *= 2
    if dtype == jnp.float32:
        return result
    # Products of bfloat16 leave errors of some thousandths; a step of Newton's method squares them.
    return [
        inverse + _side_by_side(inverse, _residual(mask, pair, inverse), dtype)
        for mask, pair, inverse in zip(masks, pairs, result, strict=True)
    ]


def _residual(mask: "_Halves", pair: jax.Array, inverse: jax.Array) -> jax.Array:
    """I - (I + L) inverse of each system's part L below the diagonal."""
    lower = jnp.where(mask.column < mask.row, pair, 0)
    upper_bits, inverse_bits = (x.astype(jnp.bfloat16) for x in (lower, inverse))
    known = _side_by_side(upper_bits, inverse_bits, jnp.bfloat16)
    for left, right in (
        (lower - upper_bits.astype(jnp.float32), inverse),
        (lower, inverse - inverse_bits.astype(jnp.float32)),
    ):
        known += _side_by_side(left, right, jnp.bfloat16)
    return mask.identity - inverse - known


class _Halves(NamedTuple):
    """Row and column of each element of matrices that lie side by side."""

    row: jax.Array
    column: jax.Array  # of its own matrix

    @classmethod
    def of(cls, shape: tuple[int, ...]) -> "_Halves":
        row, column = row_and_column(shape)
        return cls(row, column & (CHUNK_TOKENS - 1))

    @property
    def identity(self) -> jax.Array:
        return (self.row == self.column).astype(jnp.float32)

    def below(self, size: int) -> jax.Array:
        """The lower left blocks of blocks of twice this size on the diagonal."""
        row, column = self.row & -size, self.column & -size
        return ((row & size) != 0) & (column == row - size)


def _side_by_side(left: jax.Array, right: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The product of each matrix of `left` [C, C or 2 * C] with the one at its place in `right`."""
    width = left.shape[1]
    if width > CHUNK_TOKENS:
        row, column = row_and_column((width, width))
        is_own = (row & CHUNK_TOKENS) == (column & CHUNK_TOKENS)
        right = jnp.where(is_own, jnp.concatenate([right] * SIDE_BY_SIDE, axis=0), 0)
    return product(left.astype(dtype), right.astype(dtype), (1, 0))
