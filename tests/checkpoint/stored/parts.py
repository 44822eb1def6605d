"""Slices of quantized matrices, put together from the parts that a reader makes."""

import numpy as np
from hypothesis import strategies as st

from sgl_jax.layers.tensor_keys import MatrixPart


class Arrays(dict):
    """Tensors of a checkpoint, by name; an axis without a slice is read whole."""

    def read(self, name, index):
        return self[name][index]


@st.composite
def slices(draw, size, steps=(1,)):
    start = draw(st.integers(0, size - 1))
    stop = draw(st.integers(start + 1, size))
    return slice(start, stop, draw(st.sampled_from(steps)))


def numbers(reader, tensors, weight, index, group, *, has_zero_points=False):
    """The slice `index` of a matrix [out, in], in float64; `group` inputs share a scale."""
    *outer, inputs = index
    groups = slice(0, 1)
    own = np.zeros(inputs.stop - inputs.start, int)
    if group is not None:
        groups = slice(inputs.start // group, -(-inputs.stop // group))
        own = np.arange(inputs.start, inputs.stop) // group - groups.start

    def part(kind, along_inputs):
        found = reader.read(tensors, weight, MatrixPart(kind, group), (*outer, along_inputs))
        return np.asarray(found).astype(np.float64)

    values, scales = part("values", inputs), part("scales", groups)
    if has_zero_points:
        values = values - part("zero_points", groups)[..., own]
    return values * scales[..., own]


def check_shapes(reader, tensors, weight, shapes):
    """The tensors that the reader wants for parts of these shapes are those of `tensors`."""
    wanted = {}
    for part, shape in shapes.items():
        for name, own in reader.tensors(weight, part, shape).items():
            if own.shapes or name not in wanted:
                wanted[name] = own
    assert wanted.keys() == tensors.keys()
    for name, own in wanted.items():
        assert tensors[name].shape in own.shapes, name
