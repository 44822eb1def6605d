"""Values of four bits in words are read in every layout, whichever part is read."""

import numpy as np
import pytest
from hypothesis import given, settings

from sgl_jax.checkpoint.stored.packed import PackedReader
from sgl_jax.core.layer_configs import Scheme
from sgl_jax.layers.tensor_keys import MatrixPart
from sgl_jax.models.quantization import Rule, Stored
from tests.checkpoint.stored.parts import Arrays, check_shapes, numbers, slices

OUTPUTS, INPUTS, GROUP = 24, 64, 32
GROUPS = INPUTS // GROUP
WEIGHT = "q.weight"
# Of each nibble of a word of AWQ, the lowest first: the column of eight that it holds.
AWQ_COLUMNS = [0, 2, 4, 6, 1, 3, 5, 7]


def nibble(word, place):
    return int(np.uint32(word.view(np.uint32)) >> np.uint32(4 * place)) & 15


def words(rng, *shape):
    return rng.integers(-(2**31), 2**31, shape).astype(np.int32)


def dealt(rng):
    """A group for each input, GROUP of each."""
    return rng.permutation(np.arange(INPUTS) // GROUP).astype(np.int32)


def compressed(*, symmetric, ordered):
    """A reader, its tensors, and the matrix by the words of compressed-tensors."""
    rng = np.random.default_rng(0)
    packed, scales = words(rng, OUTPUTS, INPUTS // 8), rng.uniform(1, 2, (OUTPUTS, GROUPS))
    zeros, owner = words(rng, OUTPUTS // 8, GROUPS), dealt(rng)
    tensors = Arrays({"q.weight_packed": packed, "q.weight_scale": scales})
    group = np.arange(INPUTS) // GROUP
    if not symmetric:
        tensors["q.weight_zero_point"] = zeros
    if ordered:
        tensors["q.weight_g_idx"], group = owner, owner
    matrix = np.zeros((OUTPUTS, INPUTS))
    for o, i in np.ndindex(matrix.shape):
        zero = 8 if symmetric else nibble(zeros[o // 8, group[i]], o % 8)
        matrix[o, i] = (nibble(packed[o, i // 8], i % 8) - zero) * scales[o, group[i]]
    scheme = Scheme("int4", GROUP, has_zero_points=not symmetric, has_input_order=ordered)
    reader = PackedReader(Rule(scheme, Stored("compressed")))
    return reader, tensors, matrix[:, np.argsort(group, kind="stable")]


def awq():
    rng = np.random.default_rng(1)
    packed, zeros = words(rng, INPUTS, OUTPUTS // 8), words(rng, GROUPS, OUTPUTS // 8)
    scales = rng.uniform(1, 2, (GROUPS, OUTPUTS))
    matrix = np.zeros((OUTPUTS, INPUTS))
    for o, i in np.ndindex(matrix.shape):
        place, group = AWQ_COLUMNS.index(o % 8), i // GROUP
        value = nibble(packed[i, o // 8], place) - nibble(zeros[group, o // 8], place)
        matrix[o, i] = value * scales[group, o]
    reader = PackedReader(Rule(Scheme("int4", GROUP, True), Stored("awq", "scales")))
    return reader, Arrays({"q.qweight": packed, "q.qzeros": zeros, "q.scales": scales}), matrix


def gptq(*, less_one, ordered):
    rng = np.random.default_rng(2)
    packed, scales = words(rng, INPUTS // 8, OUTPUTS), rng.uniform(1, 2, (GROUPS, OUTPUTS))
    # Zero points of up to 14: stored ones less one stand for up to 15.
    zeros = words(rng, GROUPS, OUTPUTS // 8) & 0x66666666
    owner = dealt(rng) if ordered else np.arange(INPUTS) // GROUP
    tensors = Arrays({"q.qweight": packed, "q.qzeros": zeros, "q.scales": scales})
    if ordered:
        tensors["q.g_idx"] = owner
    matrix = np.zeros((OUTPUTS, INPUTS))
    for o, i in np.ndindex(matrix.shape):
        zero = nibble(zeros[owner[i], o // 8], o % 8) + less_one
        matrix[o, i] = (nibble(packed[i // 8, o], i % 8) - zero) * scales[owner[i], o]
    scheme = Scheme("int4", GROUP, has_zero_points=True, has_input_order=ordered)
    stored = Stored("gptq", "scales", zero_points_less_one=less_one)
    reader = PackedReader(Rule(scheme, stored))
    return reader, tensors, matrix[:, np.argsort(owner, kind="stable")]


LAYOUTS = {
    "compressed-tensors": compressed(symmetric=True, ordered=False),
    "compressed-tensors, asymmetric": compressed(symmetric=False, ordered=False),
    "compressed-tensors, activation order": compressed(symmetric=False, ordered=True),
    "awq": awq(),
    "gptq": gptq(less_one=True, ordered=False),
    "gptq_v2": gptq(less_one=False, ordered=False),
    "gptq, activation order": gptq(less_one=True, ordered=True),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("group", [GROUP, 8])
@settings(max_examples=25)
@given(outputs=slices(OUTPUTS, steps=(1, 2)), inputs=slices(INPUTS))
def test_any_part_is_the_matrix_by_the_formats_words(layout, group, outputs, inputs):
    reader, tensors, matrix = layout
    has_zeros = any("zero" in name for name in tensors)
    found = numbers(*(reader, tensors, WEIGHT, (outputs, inputs), group), has_zero_points=has_zeros)
    np.testing.assert_array_equal(found, matrix[outputs, inputs])


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_its_tensors_are_those_of_the_format(layout):
    reader, tensors, _ = layout
    shapes = {
        MatrixPart("values", GROUP): (OUTPUTS, INPUTS),
        MatrixPart("scales", 8): (OUTPUTS, INPUTS // 8),
    }
    if any("zero" in name for name in tensors):
        shapes[MatrixPart("zero_points", 8)] = (OUTPUTS, INPUTS // 8)
    if any("g_idx" in name for name in tensors):
        shapes[MatrixPart("order")] = (INPUTS,)
    check_shapes(reader, tensors, WEIGHT, shapes)


@pytest.mark.parametrize("name", ["compressed-tensors, activation order", "gptq, activation order"])
@pytest.mark.parametrize(
    "owner",
    [np.arange(INPUTS) // 16, np.arange(INPUTS) % 2 - 1, np.full(INPUTS, 1)],
    ids=["smaller groups", "a negative group", "one group only"],
)
def test_inputs_dealt_unevenly_to_groups_are_refused(name, owner):
    reader, tensors, _ = LAYOUTS[name]
    key = next(own for own in tensors if "g_idx" in own)
    changed = Arrays(tensors | {key: owner.astype(np.int32)})
    with pytest.raises(ValueError, match=r"g_idx does not deal its inputs into groups of 32"):
        reader.read(changed, WEIGHT, MatrixPart("order"), (slice(0, INPUTS),))


def symmetric_gptq(zeros):
    _, tensors, _ = LAYOUTS["gptq"]
    stored = Stored("gptq", "scales", zero_points_less_one=True)
    reader = PackedReader(Rule(Scheme("int4", GROUP), stored))
    changed = Arrays(tensors | {"q.qzeros": np.full_like(tensors["q.qzeros"], zeros)})
    index = (slice(0, OUTPUTS), slice(0, GROUPS))
    return reader.read(changed, WEIGHT, MatrixPart("scales", GROUP), index)


def test_symmetric_gptq_has_eights_as_zero_points():
    assert symmetric_gptq(0x77777777).shape == (OUTPUTS, GROUPS)
    with pytest.raises(ValueError, match=r"q\.qzeros has zero points other than 8"):
        symmetric_gptq(0x77777776)


def gptq_zero_points(stored):
    """The first eight zero points of a group, for a stored word."""
    reader, tensors, _ = LAYOUTS["gptq"]
    zeros = np.full_like(tensors["q.qzeros"], np.uint32(stored).view(np.int32))
    index = (slice(0, 8), slice(0, 1))
    part = MatrixPart("zero_points", GROUP)
    found = reader.read(Arrays(tensors | {"q.qzeros": zeros}), WEIGHT, part, index)
    return (found.astype(int) + 8).ravel().tolist()


def test_a_zero_point_of_0_has_borrowed_from_its_neighbour():
    """GPTQModel subtracts ones from whole words."""
    zeros = [3, 0, 5, 1, 0, 0, 15, 0]
    word = sum(zero << 4 * place for place, zero in enumerate(zeros))
    assert gptq_zero_points((word - 0x11111111) % 2**32) == zeros


def test_zero_points_that_one_of_0_has_overwritten_are_refused():
    """AutoGPTQ's word of [3, 5, 0, ...]: all bits from the third zero point on are set."""
    with pytest.raises(ValueError, match=r"q\.qzeros has zero points of 0 that have overwritten"):
        gptq_zero_points(0xFFFFFF42)
