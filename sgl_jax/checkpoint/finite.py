"""Weights that are no numbers are refused where they are loaded: such a model answers nonsense.

All of them are looked at, on the devices where they lie and in one program, which costs about what
reading them for one step costs.
"""

import jax
import jax.numpy as jnp
import numpy as np

from sgl_jax.checkpoint.paths import Path, flatten
from sgl_jax.checkpoint.sources import Source
from sgl_jax.checkpoint.tensor_files import TensorFiles
from sgl_jax.layers.parameter import ParamTree


def non_finite_parameters(params: ParamTree) -> list[Path]:
    """Paths of the parameters with a NaN or an infinity."""
    flat = flatten(params)
    are_finite = jax.jit(lambda arrays: [jnp.isfinite(array).all() for array in arrays])
    return [
        path
        for path, is_finite in zip(flat, are_finite(list(flat.values())), strict=True)
        if not bool(is_finite)
    ]


def non_finite_tensor(source: Source, files: TensorFiles) -> str | None:
    """Name and file of the first tensor of `source` that is not finite as it is stored."""
    for name, shape in source.tensors().items():
        tensor = files.read(name, tuple(slice(0, size) for size in shape))
        if not np.isfinite(tensor.astype(np.float32)).all():
            return f"tensor {name!r} in {str(files.file_of(name))!r}"
    return None
