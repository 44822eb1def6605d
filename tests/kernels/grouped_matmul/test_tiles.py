"""Tiles follow the lines of a group and the memory that a matrix takes."""

import pytest

from sgl_jax.kernels.grouped_matmul.tpu import (
    MAX_MATRIX_BYTES,
    Tiles,
    choose_tiles,
    max_visits,
)


@pytest.mark.parametrize(
    ("lines", "tile"), [(8, 8), (512, 64), (8192, 64), (16384, 128), (10**6, 512)]
)
def test_a_tile_has_about_as_many_lines_as_a_group(lines, tile):
    assert choose_tiles(lines, 128, 2048, 192, itemsize=2) == Tiles(tile, 192)


@pytest.mark.parametrize("inputs", [192, 2048, 14336])
def test_a_matrix_that_is_too_large_is_cut_between_lanes(inputs):
    width = choose_tiles(512, 8, inputs, 4096, itemsize=4).width
    assert width * inputs * 4 <= max(MAX_MATRIX_BYTES, 128 * inputs * 4)
    assert width % 128 == 0


def test_visits_are_bounded_by_groups_and_tiles_and_by_lines():
    assert max_visits(512, 128, 64) == 128 + 8 - 1
    assert max_visits(8, 128, 8) == 8
    assert max_visits(65, 2, 64) == 3
