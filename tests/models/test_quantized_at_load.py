"""`--quantization` quantizes every matrix of every family, except those named here."""

import jax.numpy as jnp
import numpy as np
import pytest

from sgl_jax.layers.parameter import declarations
from sgl_jax.models.architecture import BuildOptions
from sgl_jax.models.config import ModelConfig, ModelConfigError
from sgl_jax.models.registry import build_model
from tests.checkpoint.test_quantized_loading import load
from tests.models.golden_server import GOLDEN
from tests.support.long import long_but

FAMILIES = sorted(own.parent.name for own in GOLDEN.glob("*/config.json"))
REFUSED = {"gpt_oss": "cannot be quantized at load", "gpt_oss_mxfp4": "quantized already"}
QUANTIZED = [name for name in FAMILIES if name not in REFUSED]
# The ends of the paths of matrices that stay floats, as docs/guide/quantization.md lists them.
FLOATS = (
    ("embedding", "weight"),
    ("lm_head", "weight"),
    ("router", "weight"),
    ("per_layer", "table", "weight"),
    ("per_layer", "projection", "weight"),
    ("per_layer_gate", "gate", "weight"),
    ("per_layer_gate", "projection", "weight"),
    ("shared", "gate", "weight"),  # one output
    ("attention", "gates", "weight"),  # of a gated delta net, two outputs a head
    ("attention", "conv", "weight"),
    ("attention", "key_up"),  # latents' projections, which no quantized product uses
    ("attention", "value_up"),
    ("indexer", "weights", "weight"),  # one output a head
)


def is_matrix(path, array):
    """Whether the parameter is a matrix, or one for each layer or expert."""
    return array.ndim - (path[0] == "layers") >= 2


@pytest.mark.parametrize("name", QUANTIZED)
def test_all_other_matrices_are_quantized(name):
    floats, declared = (
        declarations(build_model(config.quantized(scheme), BuildOptions("float32")))
        for config in [ModelConfig.from_path(GOLDEN / name)]
        for scheme in ("none", "int8")
    )
    both = [path for path in floats.keys() & declared.keys() if is_matrix(path, floats[path].array)]
    assert {path for path in both if not any(path[-len(own) :] == own for own in FLOATS)} == set()
    quantized = floats.keys() - declared.keys()
    assert quantized
    assert {declared[*path, "values"].array.dtype for path in quantized} == {jnp.dtype("int8")}


@pytest.mark.parametrize(
    "name", long_but(QUANTIZED, "gemma4_moe", "llama4", "minimax_m2", "phi3", "qwen3_vl_moe")
)
def test_each_output_of_a_matrix_has_a_scale(name):
    floats, params = (load(GOLDEN / name, quantization=own) for own in ("none", "int8"))
    for path in floats.keys() - params.keys():
        expected = np.asarray(floats[path])
        # Linear layers are [layers, in, out]; experts [layers, experts, width, hidden].
        by_width = expected.ndim == 3 or path[-2] == "down"
        greatest = np.abs(expected).max(axis=-2 if by_width else -1, keepdims=True)
        values, scales = (np.asarray(params[*path, own]) for own in ("values", "scales"))
        if not by_width:
            scales = scales.swapaxes(-2, -1)
        np.testing.assert_allclose(scales, greatest / 127, rtol=1e-6)
        assert (np.abs(values * scales - expected) <= 0.5001 * scales).all(), path


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_quantized_is_refused(name):
    with pytest.raises(ModelConfigError, match=REFUSED[name]):
        load(GOLDEN / name, quantization="int8")
