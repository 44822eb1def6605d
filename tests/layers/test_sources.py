"""Sources are read as what they stand for, whole and in any part that a chip may need."""

import numpy as np
import pytest

from sgl_jax.layers.sources import (
    Dequantized,
    OneOf,
    Padded,
    Placed,
    Slice,
    Stacked,
    Tensor,
    row_size,
)
from sgl_jax.layers.tensor_keys import MatrixPart, TensorKey


class Arrays(dict):
    """Tensors that are there already."""

    def read(self, key, index):
        return self[key if key.part else key.name][index]


def part(source, tensors, index, dtype=np.float32):
    out = np.full([len(range(i.start, i.stop, i.step or 1)) for i in index], np.nan, dtype)
    source.fill(out, index, tensors, "layer.")
    return out


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
    source = Stacked(("a.", "b."), Padded(OneOf(experts, Tensor("all", (2, 2, 3))), 4, axis=2))
    apart = {f"{layer}.{expert}.w" for layer in "ab" for expert in "01"}
    assert source.as_stored(having({"a.all", "b.all"})).tensors() == {
        TensorKey("a.all"): (2, 2, 3),
        TensorKey("b.all"): (2, 2, 3),
    }
    # What is missing is asked for by its usual names.
    for names in (apart, set(), {"b.all"}):
        assert {key.name for key in source.as_stored(having(names)).tensors()} == apart
    assert source.shape == source.as_stored(having({"a.all"})).shape == (2, 2, 2, 4)


def test_each_layers_experts_lie_in_its_slots():
    stored = {
        f"layer.{layer}.{expert}.w": np.random.default_rng(10 * layer + expert).normal(size=(3, 4))
        for layer in range(2)
        for expert in range(3)
    }
    experts = Stacked(("0.", "1.", "2."), Padded(Tensor("w", (3, 4)), 5, axis=1))
    source = Placed(Stacked(("0.", "1."), experts), ((2, 0, 2, 1), (0, 1, 1, 2)))
    plain = Stacked(("0.", "1."), experts)
    assert (source.shape, source.plain_shape) == ((2, 4, 3, 5), (2, 3, 3, 4))
    whole = part(plain, Arrays(stored), tuple(map(slice, [0] * 4, plain.shape)))
    wanted = np.stack([whole[0, [2, 0, 2, 1]], whole[1, [0, 1, 1, 2]]])
    for rows in (slice(0, 4), slice(2, 4)):
        index = (slice(0, 2), rows, slice(1, 3), slice(0, 5))
        found = part(source, Arrays(stored), index)
        np.testing.assert_array_equal(found, wanted[:, rows, 1:])
    np.testing.assert_array_equal(source.fit(whole[..., :4]), wanted)
    in_order = Placed(plain, ((0, 1, 2), (0, 1, 2)))
    assert not in_order.is_plain  # though its shape is


def having(names):
    return lambda key, shape: key.name in names


def test_rows_are_made_longer_where_that_takes_little():
    assert [row_size(size) for size in (64, 100, 1152, 2880)] == [64, 100, 1152, 2944]


@pytest.mark.parametrize("group", [2, None])
def test_quantized_numbers_are_read_as_floats(group):
    rng = np.random.default_rng(0)
    values = rng.integers(-9, 9, (4, 6)).astype(np.int8)
    scales = rng.normal(size=(4, 3 if group else 1)).astype(np.float32)
    source = Dequantized(Tensor("w", (4, 6)), group)
    keys = [TensorKey("layer.w", MatrixPart(kind, group)) for kind in ("values", "scales")]
    assert source.tensors("layer.") == dict(zip(keys, (values.shape, scales.shape), strict=True))
    tensors = Arrays(zip(keys, (values, scales), strict=True))
    whole = values * np.repeat(scales, group or 6, axis=1)
    for index in ((slice(0, 4), slice(0, 6)), (slice(1, 3), slice(1, 4))):
        np.testing.assert_array_equal(part(source, tensors, index), whole[index])
