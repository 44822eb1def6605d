"""Floats quantized while they are read: the nearest values, alike whichever parts are read."""

import numpy as np
import pytest
from hypothesis import given, settings

from sgl_jax.checkpoint.stored.at_load import AtLoadReader
from sgl_jax.core.layer_configs import GREATEST, Scheme
from sgl_jax.layers.tensor_keys import MatrixPart
from sgl_jax.models.quantization import Rule, Stored
from tests.checkpoint.stored.parts import Arrays, check_shapes, numbers, slices

OUTPUTS, INPUTS = 12, 64
WEIGHT = "q.weight"
FLOATS = np.random.default_rng(0).normal(size=(OUTPUTS, INPUTS)).astype(np.float32)
FLOATS[3] = 0
TENSORS = Arrays({WEIGHT: FLOATS})
WHOLE = (slice(0, OUTPUTS), slice(0, INPUTS))
SCHEMES = [Scheme("int8"), Scheme("fp8"), Scheme("int4", 16), Scheme("int4", 64)]


def reader_of(scheme, tensors=TENSORS):
    reader = AtLoadReader(Rule(scheme, Stored("float")))
    groups = 1 if scheme.group_size is None else INPUTS // scheme.group_size
    shapes = {
        MatrixPart("values", scheme.group_size): (OUTPUTS, INPUTS),
        MatrixPart("scales", scheme.group_size): (OUTPUTS, groups),
    }
    check_shapes(reader, tensors, WEIGHT, shapes)
    return reader


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda own: own.name)
def test_each_number_is_the_nearest_value_by_a_scale_that_fits_the_greatest(scheme):
    found = numbers(reader_of(scheme), TENSORS, WEIGHT, WHOLE, scheme.group_size)
    by_group = np.abs(FLOATS.reshape(OUTPUTS, -1, scheme.group_size or INPUTS))
    greatest = np.repeat(by_group.max(axis=-1), by_group.shape[-1], axis=1)
    # Half a step of whole numbers; of fp8, with three bits after the first, 1/16 of the number.
    step = greatest / GREATEST[scheme.weight]
    allowed = step / 2
    if scheme.weight == "fp8":
        allowed = np.maximum(np.abs(FLOATS) / 16, step * 2.0**-10)
    assert (np.abs(found - FLOATS) <= allowed * 1.0001).all()
    assert (found[3] == 0).all()


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda own: own.name)
@settings(max_examples=25)
@given(outputs=slices(OUTPUTS, steps=(1, 2)), inputs=slices(INPUTS // 16))
def test_any_part_is_that_of_the_whole(scheme, outputs, inputs):
    inputs = slice(inputs.start * 16, inputs.stop * 16)
    if scheme.group_size == 64:
        inputs = slice(0, 64)
    whole = numbers(reader_of(scheme), TENSORS, WEIGHT, WHOLE, scheme.group_size)
    part = numbers(reader_of(scheme), TENSORS, WEIGHT, (outputs, inputs), scheme.group_size)
    np.testing.assert_array_equal(part, whole[outputs, inputs])
