"""Values of eight bits and their scales, for each output, group, block, or the whole matrix."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings

from sgl_jax.checkpoint.stored.plain import PlainReader
from sgl_jax.core.layer_configs import Scheme
from sgl_jax.layers.tensor_keys import MatrixPart
from sgl_jax.models.quantization import Rule, Stored
from tests.checkpoint.stored.parts import Arrays, check_shapes, numbers, slices

OUTPUTS, INPUTS = 24, 80
WEIGHT = "q.weight"


def layout(dtype, scheme, stored, scale_shape, scale_of):
    """A reader, its tensors, and the matrix; `scale_of` maps (output, input) to a scale's place."""
    rng = np.random.default_rng(0)
    values = rng.integers(-7, 8, (OUTPUTS, INPUTS)).astype(dtype)
    scales = np.asarray(rng.uniform(1, 2, scale_shape))
    matrix = np.zeros(values.shape)
    for o, i in np.ndindex(matrix.shape):
        matrix[o, i] = float(values[o, i]) * scales[scale_of(o, i)]
    tensors = Arrays({WEIGHT: values, f"q.{stored.scales}": scales})
    return PlainReader(Rule(scheme, stored)), tensors, matrix, scheme.group_size


PLAIN = Stored("plain")
BLOCKS = Stored("plain", scales="weight_scale_inv", block=(16, 32))
FP8 = ml_dtypes.float8_e4m3fn
LAYOUTS = {
    "each output": layout(np.int8, Scheme("int8"), PLAIN, (OUTPUTS, 1), lambda o, i: (o, 0)),
    "each output, a vector": layout(np.int8, Scheme("int8"), PLAIN, (OUTPUTS,), lambda o, i: o),
    "the matrix": layout(FP8, Scheme("fp8"), PLAIN, (1,), lambda o, i: 0),
    "the matrix, a number": layout(FP8, Scheme("fp8"), PLAIN, (), lambda o, i: ()),
    "groups": layout(np.int8, Scheme("int8", 16), PLAIN, (OUTPUTS, 5), lambda o, i: (o, i // 16)),
    # Neither axis is whole blocks.
    "blocks": layout(FP8, Scheme("fp8", 32), BLOCKS, (2, 3), lambda o, i: (o // 16, i // 32)),
}


@pytest.mark.parametrize("case", LAYOUTS.values(), ids=LAYOUTS.keys())
@settings(max_examples=25)
@given(outputs=slices(OUTPUTS, steps=(1, 2)), inputs=slices(INPUTS))
def test_any_part_is_the_matrix_of_values_and_scales(case, outputs, inputs):
    reader, tensors, matrix, group = case
    for part_group in (group,) if group is None else (16, 8):
        found = numbers(reader, tensors, WEIGHT, (outputs, inputs), part_group)
        np.testing.assert_array_equal(found, matrix[outputs, inputs])


@pytest.mark.parametrize("case", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_its_tensors_are_values_and_scales(case):
    reader, tensors, _, group = case
    part = None if group is None else 16
    groups = 1 if group is None else INPUTS // 16
    shapes = {
        MatrixPart("values", part): (OUTPUTS, INPUTS),
        MatrixPart("scales", part): (OUTPUTS, groups),
    }
    check_shapes(reader, tensors, WEIGHT, shapes)


@pytest.mark.parametrize("shape", [(), (1,)])
def test_the_scale_of_inputs_is_one_number(shape):
    reader, *_ = LAYOUTS["the matrix"]
    tensors = Arrays({"q.input_scale": np.full(shape, 0.5, np.float32)})
    check_shapes(reader, tensors, WEIGHT, {MatrixPart("input_scale"): (1,)})
    np.testing.assert_array_equal(
        reader.read(tensors, WEIGHT, MatrixPart("input_scale"), (slice(0, 1),)), [0.5]
    )
