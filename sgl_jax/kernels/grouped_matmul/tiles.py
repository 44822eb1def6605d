"""How much the TPU's grouped product computes on at once.

Small tiles of lines waste less where a group ends, large ones load the matrix unit's weights less
often: a group's matrix is loaded once for each tile that the group has lines in.
"""

from typing import NamedTuple

from sgl_jax.kernels.tpu_chip import LANES

MIN_LINES, MAX_LINES = 64, 512  # of a tile
MAX_MATRIX_BYTES = 4 << 20  # of one of the two buffers


class Tiles(NamedTuple):
    """What is computed at once: some columns of the result for some lines."""

    lines: int
    width: int


def choose_tiles(
    num_lines: int, num_groups: int, inputs: int, outputs: int, itemsize: int
) -> Tiles:
    """Tiles for lines [num_lines, inputs] and matrices [num_groups, inputs, outputs].

    About as many lines as a group has, and all columns or a multiple of the lanes. `itemsize` is
    the bytes of an element.
    """
    column_bytes = inputs * itemsize
    width = max(MAX_MATRIX_BYTES // column_bytes // LANES, 1) * LANES
    lines = MIN_LINES
    while lines < MAX_LINES and lines * num_groups < num_lines:
        lines *= 2
    return Tiles(min(lines, num_lines), min(width, outputs))


def max_visits(num_lines: int, num_groups: int, tile_lines: int) -> int:
    """Most pairs of a group and a tile that it has lines in, for any sizes of the groups."""
    return min(num_groups, num_lines) + -(-num_lines // tile_lines) - 1
