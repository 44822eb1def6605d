"""Layers of unlike rules lie in scan segments of their own; a matrix has one rule."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from sgl_jax.models.architecture import BuildOptions
from sgl_jax.models.config import ModelConfig, ModelConfigError
from sgl_jax.models.placement import place_model
from tests.models.golden_server import GOLDEN

QWEN3 = json.loads((GOLDEN / "qwen3" / "config.json").read_text())


def declared(*ignored):
    """The parameters of a model of two layers, in int8 but for the modules `ignored`."""
    own = {"num_bits": 8, "type": "int", "strategy": "channel"}
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": own}},
        "ignore": ["lm_head", *ignored],
    }
    config = ModelConfig.from_dict(QWEN3 | {"quantization_config": quantization})
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "tensor"))
    return place_model(config, mesh, BuildOptions(jnp.float32)).declared


def test_layers_of_unlike_rules_have_scan_segments_of_their_own():
    alike = declared()
    assert alike["layers", "0", "mlp", "down", "weight", "values"].layers == (0, 1)
    unlike = declared("model.layers.1.mlp.down_proj")
    assert unlike["layers", "0", "mlp", "down", "weight", "values"].layers == (0,)
    assert unlike["layers", "1", "mlp", "down", "weight"].layers == (1,)


def test_matrices_of_their_own_may_have_other_rules():
    own = declared("re:.*gate_proj", "re:.*o_proj")
    assert own["layers", "0", "mlp", "gate", "weight"].array.dtype == jnp.float32
    assert own["layers", "0", "mlp", "up", "weight", "values"].array.dtype == jnp.int8


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_q_k_and_v_make_one_matrix_and_need_one_rule(name):
    with pytest.raises(ModelConfigError, match=r"_proj make one matrix and must be .*int8") as own:
        declared(f"re:.*{name}_proj")
    assert "floats" in str(own.value)
