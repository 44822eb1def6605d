"""Each matrix is read by its own rule; tensors that need none are read as they are."""

import numpy as np
import pytest

from sgl_jax.checkpoint.stored.tensors import QuantizedTensors
from sgl_jax.core.layer_configs import Scheme
from sgl_jax.layers.tensor_keys import MatrixPart, TensorKey
from sgl_jax.models.quantization import QuantizationConfig, Rule, Stored
from tests.checkpoint.stored.parts import Arrays

INT8 = Rule(Scheme("int8"), Stored("plain"))
GPTQ = Rule(Scheme("int4", 32), Stored("gptq", "scales", zero_points_less_one=True))
INT4 = Rule(Scheme("int4", 32), Stored("compressed"))
CONFIG = QuantizationConfig(
    ((("re:.*q_proj",), INT8), (("k_proj",), GPTQ), (("v_proj",), INT4)), has_kv_scales=True
)
TENSORS = QuantizedTensors(CONFIG)


def test_each_matrix_has_the_tensors_of_its_rule():
    def names(matrix, part=None):
        return set(TENSORS.expected(TensorKey(matrix, part), (8, 32)))

    values = MatrixPart("values")
    assert names("a.q_proj.weight", values) == {"a.q_proj.weight"}
    assert names("a.k_proj.weight", values) == {"a.k_proj.qweight"}
    assert names("a.o_proj.weight") == {"a.o_proj.weight"}


def test_a_tensor_without_a_rule_is_read_as_it_is():
    files = Arrays({"norm.weight": np.arange(8)})
    found = TENSORS.read(files, TensorKey("norm.weight"), (slice(2, 4),))
    np.testing.assert_array_equal(found, [2, 3])


@pytest.mark.parametrize(
    ("name", "is_spare"),
    [
        ("a.q_proj.input_scale", True),
        ("a.k_proj.g_idx", True),
        ("a.v_proj.weight_shape", True),
        ("a.self_attn.k_scale", True),
        ("a.q_proj.weight_shape", False),  # of another layout
        ("a.o_proj.g_idx", False),  # of no quantized matrix
        ("a.k_proj.bias", False),
    ],
)
def test_what_a_layout_leaves_over_is_spare(name, is_spare):
    assert TENSORS.is_spare(name) == is_spare
    assert not QuantizedTensors(None).is_spare(name)
