"""Sources are read as what they stand for, whole and in any part that a chip may need."""

import numpy as np
import pytest

from sgl_jax.layers.mxfp4 import Mxfp4, unpacked
from sgl_jax.layers.sources import (
    EitherWay,
    Padded,
    Slice,
    Stacked,
    Tensor,
    row_size,
)

NUMBERS = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
EXPERTS, ROWS, COLUMNS = 3, 10, 96


class Arrays(dict):
    """Tensors that are there already."""

    def read(self, name, index):
        return self[name][index]


@pytest.fixture
def tensors():
    rng = np.random.default_rng(0)
    shape = (EXPERTS, ROWS, COLUMNS // 32)
    return Arrays(
        {
            "layer.w_blocks": rng.integers(0, 256, (*shape, 16), np.uint8),
            "layer.w_scales": rng.integers(110, 140, shape, np.uint8),
        }
    )


def numbers(tensors):
    """One after the other, by the format's own words."""
    blocks, scales = tensors["layer.w_blocks"], tensors["layer.w_scales"]
    out = np.zeros((EXPERTS, ROWS, COLUMNS))
    for expert, row, column in np.ndindex(out.shape):
        byte = int(blocks[expert, row, column // 32, column % 32 // 2])
        bits = byte >> 4 if column % 2 else byte & 15
        out[expert, row, column] = NUMBERS[bits] * 2.0 ** (
            int(scales[expert, row, column // 32]) - 127
        )
    return out


def part(source, tensors, index, dtype=np.float32):
    out = np.full([len(range(i.start, i.stop, i.step or 1)) for i in index], np.nan, dtype)
    source.fill(out, index, tensors, "layer.")
    return out


WHOLE = (slice(0, EXPERTS), slice(0, ROWS), slice(0, COLUMNS))


def test_its_tensors_are_bytes_of_blocks_and_scales(tensors):
    expected = {name: array.shape for name, array in tensors.items()}
    assert Mxfp4("w", (EXPERTS, ROWS, COLUMNS)).tensors("layer.") == expected
    assert Mxfp4("w", (EXPERTS, COLUMNS, ROWS), transposed=True).tensors("layer.") == expected


@pytest.mark.parametrize(
    "index",
    [
        WHOLE,
        (slice(1, 3), slice(2, 7), slice(0, COLUMNS)),
        (slice(0, 3), slice(0, ROWS), slice(20, 44)),  # amid two blocks
        (slice(2, 3), slice(4, 5), slice(64, 65)),
    ],
)
def test_any_part_may_be_read(tensors, index):
    expected = numbers(tensors)[index]
    np.testing.assert_array_equal(part(Mxfp4("w", (3, ROWS, COLUMNS)), tensors, index), expected)
    turned = part(
        Mxfp4("w", (3, COLUMNS, ROWS), transposed=True), tensors, (index[0], index[2], index[1])
    )
    np.testing.assert_array_equal(turned, expected.swapaxes(1, 2))


def test_every_second_row_alone_is_unpacked(tensors):
    both = Mxfp4("w", (EXPERTS, ROWS, COLUMNS))
    for first in (0, 1):
        source = Slice(both, 1, first, ROWS // 2, step=2)
        assert source.shape == source.plain_shape == (EXPERTS, ROWS // 2, COLUMNS)
        assert source.tensors("layer.") == both.tensors("layer.")
        index = (slice(0, 2), slice(1, 4), slice(0, COLUMNS))
        expected = numbers(tensors)[:2, 2 + first : 8 + first : 2]
        np.testing.assert_array_equal(part(source, tensors, index), expected)


@pytest.mark.parametrize("first", [0, 1])
def test_every_second_row_of_floats(first):
    stored = np.random.default_rng(0).normal(size=(2, 6, 8)).astype(np.float32)
    source = Slice(Tensor("w", (2, 8, 6), transposed=True), 1, first, 4, step=2)
    found = part(source, Arrays({"layer.w": stored}), (slice(1, 2), slice(1, 3), slice(0, 6)))
    np.testing.assert_array_equal(found, stored[1:, :, 2 + first : 6 + first : 2].swapaxes(1, 2))


def test_a_part_may_be_padded_along_both_axes():
    stored = np.arange(6, dtype=np.float32).reshape(2, 3)
    longer = Padded(Tensor("w", (2, 3)), 5, axis=1, on_every_mesh=True)
    source = Padded(longer, 4, axis=0)
    whole = np.zeros((4, 5), np.float32)
    whole[:2, :3] = stored
    assert longer.plain_shape == source.plain_shape == (2, 5)
    for rows in (slice(0, 4), slice(1, 3), slice(2, 4)):
        index = (rows, slice(0, 5))
        found = part(source, Arrays({"layer.w": stored}), index)
        np.testing.assert_array_equal(found, whole[rows])
    np.testing.assert_array_equal(source.fit(whole[:2]), whole)


@pytest.mark.parametrize("first", [0, 3])
def test_some_slices_alone_are_a_parameter(first):
    stored = np.random.default_rng(0).normal(size=(2, 6, 8)).astype(np.float32)
    source = Slice(Tensor("w", (2, 6, 8)), 1, first, 3)
    assert source.shape == source.plain_shape == (2, 3, 8)
    index = (slice(0, 2), slice(1, 3), slice(2, 8))
    found = part(source, Arrays({"layer.w": stored}), index)
    np.testing.assert_array_equal(found, stored[:, first + 1 : first + 3, 2:])


def test_a_parameter_is_read_as_the_checkpoint_stores_it():
    experts = Stacked(("0.", "1."), Tensor("w", (2, 3)))
    source = Stacked(("a.", "b."), Padded(EitherWay(experts, Tensor("all", (2, 2, 3))), 4, axis=2))
    apart = {f"{layer}.{expert}.w" for layer in "ab" for expert in "01"}
    assert source.as_stored({"a.all", "b.all"}).tensors() == {
        "a.all": (2, 2, 3),
        "b.all": (2, 2, 3),
    }
    # What is missing is asked for by its usual names.
    for names in (apart, set(), {"b.all"}):
        assert set(source.as_stored(names).tensors()) == apart
    assert source.shape == source.as_stored({"a.all"}).shape == (2, 2, 2, 4)


def test_rows_are_made_longer_where_that_takes_little():
    assert [row_size(size) for size in (64, 100, 1152, 2880)] == [64, 100, 1152, 2944]


def test_scales_reach_from_the_smallest_number_to_none():
    blocks = np.full((1, 4, 16), 0x22, np.uint8)
    scales = np.array([[0, 127, 254, 255]], np.uint8)
    found = unpacked(blocks, scales)[0, ::32]
    np.testing.assert_array_equal(found, np.float32([2.0**-127, 1.0, 2.0**127, np.nan]))
