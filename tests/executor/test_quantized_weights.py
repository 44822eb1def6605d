"""An engine of quantized weights shows their scheme, and takes other weights of the same one."""

import json
import shutil

import jax
import numpy as np
import pytest

from sgl_jax.core.server_args import ServerArgs
from sgl_jax.executor.model_executor import ModelExecutor
from sgl_jax.models.config_fields import ModelConfigError
from tests.checkpoint.quantized_folder import QUANTIZED, changed_copy, read_tensors

FLOATS = QUANTIZED.parent / "qwen3"
NAME = "model.layers.1.mlp.up_proj.weight"


def executor(folder, **args):
    return ModelExecutor(ServerArgs(model_path=str(folder), max_total_tokens=256, **args))


def values(own):
    return [
        np.asarray(leaf) for leaf in jax.tree.leaves(own.weights.arrays) if leaf.dtype == np.int8
    ]


def test_a_quantized_checkpoint_may_take_the_place_of_another(tmp_path):
    own = executor(QUANTIZED / "ct_int8_mixed")
    assert own.info["quantization"] == json.loads(json.dumps(own.info["quantization"]))
    assert own.info["quantization"][0].startswith("int8")
    before = values(own)
    tensors = read_tensors(QUANTIZED / "ct_int8_mixed")
    changed_copy(tmp_path / "other", "ct_int8_mixed", {NAME: -tensors[NAME]})
    own.update_weights(str(tmp_path / "other"))
    changed = [not np.array_equal(old, new) for old, new in zip(before, values(own), strict=True)]
    assert sum(changed) == 1


@pytest.mark.long
def test_other_weights_are_quantized_as_the_first_were(tmp_path, caplog):
    caplog.set_level("INFO")
    own = executor(FLOATS, quantization="int8")
    assert own.info["quantization"] == ["int8"]
    assert own.info["float_matrices"] == ["model.embed_tokens", "lm_head"]
    assert "not quantized: model.embed_tokens 0.00 GB, lm_head 0.00 GB" in caplog.text
    before = values(own)
    shutil.copytree(FLOATS, tmp_path / "other")
    own.update_weights(str(tmp_path / "other"))
    for old, new in zip(before, values(own), strict=True):
        np.testing.assert_array_equal(old, new)


def test_weights_of_another_scheme_are_refused():
    own = executor(FLOATS)
    assert own.info["quantization"] is None
    with pytest.raises(ModelConfigError, match="not the model that is served"):
        own.check_model(str(QUANTIZED / "ct_int8_mixed"))
