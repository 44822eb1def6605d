"""Copies of quantized golden folders whose tensors a test may change."""

import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from sgl_jax.checkpoint.tensor_files import TensorFiles

QUANTIZED = Path(__file__).parents[1] / "golden" / "quantized"


def read_tensors(folder):
    """All tensors of a folder, those of 8-bit floats and bfloat16 too."""
    with TensorFiles(folder) as files:
        return {name: files.read(name, ()) for name in files.shapes}


def changed_copy(target, name, tensors=(), config=()):
    """A copy of golden folder `name` with other tensors, None for one to leave out, and other
    fields of its quantization_config."""
    shutil.copytree(QUANTIZED / name, target)
    content = json.loads((target / "config.json").read_text())
    content["quantization_config"] |= dict(config)
    (target / "config.json").write_text(json.dumps(content))
    found = read_tensors(target) | dict(tensors)
    kept = {own: np.ascontiguousarray(array) for own, array in found.items() if array is not None}
    save_file(kept, target / "model.safetensors")
    return target
