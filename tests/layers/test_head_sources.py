"""Parameters by head are read from tensors that keep a head's rows together, or apart."""

import jax.numpy as jnp
import numpy as np
import pytest

from sgl_jax.layers.head_sources import (
    ByHead,
    FusedHeads,
    HeadMatrices,
    HeadRows,
    Heads,
    Reordered,
)
from sgl_jax.layers.sources import Tensor
from sgl_jax.layers.tensor_keys import TensorKey

HIDDEN = 5
SIZES = {"q": 16, "k": 8, "v": 8}


class Arrays(dict):
    """Tensors that are there already."""

    def read(self, key, index):
        return self[key.name][index]


def part(source, tensors, *index):
    out = np.full([i.stop - i.start for i in index], np.nan, np.float32)
    source.fill(out, index, tensors, "layer.")
    return out


@pytest.fixture
def stored():
    """One tensor with 3 heads of 2 + 4 rows, one with all first parts before all second ones."""
    rows = np.random.default_rng(0).normal(size=(3, 6, HIDDEN)).astype(np.float32)
    flat = np.concatenate([rows[:, :2].reshape(6, HIDDEN), rows[:, 2:].reshape(12, HIDDEN)])
    return rows, Arrays({"layer.together": rows.reshape(18, HIDDEN), "layer.apart": flat})


@pytest.mark.parametrize("heads", [(0, 3), (1, 2), (1, 3)])
def test_the_heads_of_a_chip_are_read_however_they_are_stored(stored, heads):
    rows, tensors = stored
    inputs, columns = slice(1, 4), slice(6 * heads[0], 6 * heads[1])
    expected = rows[slice(*heads), :, 1:4].reshape(-1, 3).T
    apart = ByHead((HeadRows("apart", 18, 0, 2, 2), HeadRows("apart", 18, 6, 4, 4)), 3, (HIDDEN,))
    together = ByHead((HeadRows("together", 18, 0, 6, 6),), 3, (HIDDEN,))
    for source in (apart, together):
        assert source.shape == source.plain_shape == (HIDDEN, 18)
        np.testing.assert_array_equal(part(source, tensors, inputs, columns), expected)


def test_a_slice_may_cut_heads(stored):
    """As `--weight-sharding data` cuts a projection that all chips of a rank have."""
    rows, tensors = stored
    source = ByHead((HeadRows("together", 18, 0, 6, 6),), 3, (HIDDEN,))
    found = part(source, tensors, slice(0, HIDDEN), slice(4, 13))
    np.testing.assert_array_equal(found, rows.reshape(18, HIDDEN)[4:13].T)


def test_some_of_each_heads_rows_may_be_a_parameter_of_their_own(stored):
    rows, tensors = stored
    source = ByHead((HeadRows("together", 18, 2, 6, 4),), 3, (HIDDEN,))
    assert source.tensors("layer.") == {TensorKey("layer.together"): (18, HIDDEN)}
    found = part(source, tensors, slice(0, HIDDEN), slice(4, 12))
    np.testing.assert_array_equal(found, rows[1:, 2:].reshape(8, HIDDEN).T)


@pytest.mark.parametrize("inputs", [(HIDDEN,), ()])
def test_chips_that_share_a_head_share_some_of_its_rows_and_copy_others(inputs):
    """Two heads of 4 values and 3 keys, each on two chips."""
    rows = np.random.default_rng(0).normal(size=(14, *inputs)).astype(np.float32)
    tensors = Arrays({"layer.w": rows})

    def source(parts):
        size, copies = 8 // parts, parts // 2
        values = HeadRows("w", 14, 0, size, size)
        return ByHead((values, HeadRows("w", 14, 8, 3, 3, copies=copies)), parts, inputs)

    of_chip, of_four = source(2), source(4)
    order = [0, 1, 8, 9, 10, 2, 3, 8, 9, 10, 4, 5, 11, 12, 13, 6, 7, 11, 12, 13]
    expected = np.moveaxis(rows[order], 0, -1)
    whole = [slice(0, size) for size in inputs]
    np.testing.assert_array_equal(part(of_four, tensors, *whole, slice(0, 20)), expected)
    second = part(of_four, tensors, *whole, slice(5, 15))
    np.testing.assert_array_equal(second, expected[..., 5:15])
    # An array of one chip is fit to four, and elements know their places in it.
    plain = part(of_chip, tensors, *whole, slice(0, 14))
    assert of_four.plain_shape == of_chip.shape == of_chip.plain_shape
    np.testing.assert_array_equal(of_four.fit(jnp.asarray(plain)), expected)
    places = of_four.plain_places()[-1]
    assert sorted(places[places >= 0]) == list(range(14))
    np.testing.assert_array_equal(plain[..., places[places >= 0]], expected[..., places >= 0])


def test_what_is_stored_with_more_axes_keeps_them_before_the_heads():
    stored = np.random.default_rng(0).normal(size=(6, 1, 3)).astype(np.float32)
    source = ByHead((HeadRows("w", 6, 0, 2, 2),), 3, (1, 3))
    found = part(source, Arrays({"layer.w": stored}), slice(0, 1), slice(0, 3), slice(2, 6))
    np.testing.assert_array_equal(found, np.moveaxis(stored[2:], 0, -1))


@pytest.mark.parametrize("inputs", [(HIDDEN,), ()])
def test_queries_are_told_from_their_gates(inputs):
    heads = Heads(num_q=4, num_stored_kv=2, num_kv=4, head_dim=2)
    rng = np.random.default_rng(0)
    q = rng.normal(size=(4, 2, 2, *inputs)).astype(np.float32)
    k, v = rng.normal(size=(2, 2, 2, *inputs)).astype(np.float32)
    named = {"q": q.reshape(16, *inputs), "k": k.reshape(4, *inputs), "v": v.reshape(4, *inputs)}
    tensors = Arrays({f"layer.{name}": array for name, array in named.items()})
    source = FusedHeads(("q", "k", "v"), inputs, heads, has_gates=True)
    assert source.tensors() == {TensorKey(name): array.shape for name, array in named.items()}
    columns = slice(heads.kv_width, 3 * heads.kv_width)  # the second copy of one, the first of two
    found = part(source, tensors, *[slice(0, size) for size in inputs], columns)
    expected = np.concatenate([q[1, 0], k[0], v[0], q[2, 0], k[1], v[1]])
    np.testing.assert_array_equal(found, np.moveaxis(expected, 0, -1))
    gates = ByHead((HeadRows("q", 16, 2, 4, 2),), 4, inputs)
    found = part(gates, tensors, *[slice(0, size) for size in inputs], slice(2, 8))
    np.testing.assert_array_equal(found, np.moveaxis(q[1:, 1].reshape(6, *inputs), 0, -1))


def test_dimensions_of_queries_and_keys_lie_as_they_are_turned():
    heads = Heads(num_q=2, num_stored_kv=1, num_kv=1, head_dim=8, num_turned=4)
    rng = np.random.default_rng(0)
    named = {name: rng.normal(size=(rows,)).astype(np.float32) for name, rows in SIZES.items()}
    source = FusedHeads(tuple(SIZES), (), heads)
    found = part(source, Arrays({f"layer.{n}": own for n, own in named.items()}), slice(0, 32))
    first, second, key, value = found.reshape(4, 8)
    order = [0, 1, 4, 5, 2, 3, 6, 7]  # pairs 0 and 2, 1 and 3; then those that are not turned
    np.testing.assert_array_equal([first, second], named["q"].reshape(2, 8)[:, order])
    np.testing.assert_array_equal(key, named["k"][order])
    np.testing.assert_array_equal(value, named["v"])
    reordered = Reordered(Tensor("k", (8,)), heads.order)
    found = part(reordered, Arrays({"layer.k": named["k"]}), slice(2, 6))
    np.testing.assert_array_equal(found, named["k"][order][2:6])


def test_pairs_that_lie_side_by_side_are_read_as_halves(stored):
    rows, tensors = stored
    pairs = HeadRows("together", 18, 2, 6, 4)
    source = ByHead((pairs.every_second(0), pairs.every_second(1)), 3, (HIDDEN,))
    found = part(source, tensors, slice(0, HIDDEN), slice(4, 12))
    expected = rows[1:, [2, 4, 3, 5]]
    np.testing.assert_array_equal(found, expected.reshape(8, HIDDEN).T)


@pytest.mark.parametrize("heads", [(0, 3), (1, 2)])
def test_each_heads_rows_may_be_a_matrix(stored, heads):
    rows, tensors = stored
    source = HeadMatrices(HeadRows("together", 18, 2, 6, 4), 3, HIDDEN)
    assert source.shape == (3, 4, HIDDEN)
    index = slice(*heads), slice(1, 4), slice(1, HIDDEN)
    expected = rows[slice(*heads), 3:6, 1:]
    np.testing.assert_array_equal(part(source, tensors, *index), expected)
    transposed = HeadMatrices(HeadRows("together", 18, 2, 6, 4), 3, HIDDEN, transposed=True)
    assert (transposed.shape, transposed.input_axis) == ((3, HIDDEN, 4), 1)
    found = part(transposed, tensors, index[0], index[2], index[1])
    np.testing.assert_array_equal(found, expected.swapaxes(1, 2))
