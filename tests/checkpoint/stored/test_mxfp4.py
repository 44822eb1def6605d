"""Blocks of MXFP4 are read as values and scales that stand for the same numbers."""

import jax.numpy as jnp
import numpy as np
import pytest

from sgl_jax.checkpoint.stored.mxfp4 import Mxfp4Reader
from sgl_jax.core.layer_configs import MXFP4_GROUP, Scheme
from sgl_jax.kernels.quantized_matmul.numbers import as_numbers, as_scales
from sgl_jax.layers.tensor_keys import MatrixPart
from sgl_jax.models.quantization import Rule, Stored

NUMBERS = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
EXPERTS, ROWS, COLUMNS = 3, 10, 96
READER = Mxfp4Reader(Rule(Scheme("mxfp4", MXFP4_GROUP), Stored("mxfp4")))


class Arrays(dict):
    def read(self, name, index):
        return self[name][index]


@pytest.fixture
def tensors():
    rng = np.random.default_rng(0)
    shape = (EXPERTS, ROWS, COLUMNS // 32)
    return Arrays(
        {
            "w_blocks": rng.integers(0, 256, (*shape, 16), np.uint8),
            "w_scales": rng.integers(110, 140, shape, np.uint8),
        }
    )


def by_the_formats_words(tensors):
    out = np.zeros((EXPERTS, ROWS, COLUMNS))
    for expert, row, column in np.ndindex(out.shape):
        byte = int(tensors["w_blocks"][expert, row, column // 32, column % 32 // 2])
        bits = byte >> 4 if column % 2 else byte & 15
        exponent = int(tensors["w_scales"][expert, row, column // 32]) - 127
        out[expert, row, column] = NUMBERS[bits] * 2.0**exponent
    return out


def read(tensors, index, group=MXFP4_GROUP):
    """The numbers of a slice, from its values and from the scales of its groups."""
    *outer, inputs = index
    groups = slice(inputs.start // group, -(-inputs.stop // group))
    values = READER.read(tensors, "w", MatrixPart("values", group), index)
    scales = READER.read(tensors, "w", MatrixPart("scales", group), (*outer, groups))
    own = np.arange(inputs.start, inputs.stop) // group - groups.start
    numbers = np.asarray(as_numbers(jnp.asarray(values), "mxfp4", jnp.float32))
    return numbers * np.asarray(as_scales(jnp.asarray(scales), jnp.float32))[..., own]


def test_its_tensors_are_bytes_of_blocks_and_scales(tensors):
    for kind, size, name in (("values", COLUMNS, "w_blocks"), ("scales", 3, "w_scales")):
        found = READER.tensors("w", MatrixPart(kind, MXFP4_GROUP), (EXPERTS, ROWS, size))  # type: ignore[arg-type]
        assert {own: stored.shapes for own, stored in found.items()} == {
            name: (tensors[name].shape,)
        }


@pytest.mark.parametrize("group", [32, 16])
@pytest.mark.parametrize(
    "index",
    [
        (slice(0, EXPERTS), slice(0, ROWS), slice(0, COLUMNS)),
        (slice(1, 3), slice(2, 7), slice(0, COLUMNS)),
        (slice(0, 2), slice(1, ROWS, 2), slice(0, COLUMNS)),  # every second row
        (slice(0, 3), slice(0, ROWS), slice(20, 44)),  # amid two blocks
        (slice(2, 3), slice(4, 5), slice(64, 65)),
    ],
)
def test_any_part_may_be_read(tensors, index, group):
    np.testing.assert_array_equal(read(tensors, index, group), by_the_formats_words(tensors)[index])


def test_a_scale_that_stands_for_no_number_is_named(tensors):
    tensors["w_scales"][2, 1, 0] = 255
    with pytest.raises(ValueError, match="w_scales holds scales that are no finite numbers"):
        READER.read(tensors, "w", MatrixPart("scales", 32), (slice(0, 3), slice(0, 2), slice(0, 3)))
