"""Refuse weights with NaNs or infinities when they are loaded: such a model generates nonsense.

One program checks them on their devices. A sample finds a tensor that was never filled or
overflowed. A NaN that the sample misses in a dense layer makes every logit of the token that ends
the warm-up a NaN. A check of all weights takes some 2 s per GiB on a busy CPU.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from sgl_jax.checkpoint.tensor_files import TensorFiles
from sgl_jax.layers.parameter import Path
from sgl_jax.layers.sources import Source

_WHOLE_SIZE = 2**20  # elements up to which a parameter is looked at whole
_ROW_STRIDE = 16


def non_finite_parameters(params: Mapping[Path, jax.Array], *, check_all: bool) -> list[Path]:
    """Paths of the parameters with a NaN or an infinity.

    Without `check_all`, only every sixteenth row of large matrices is checked.
    """

    def is_finite(array: jax.Array) -> jax.Array:
        if not check_all and array.size > _WHOLE_SIZE:
            array = array[..., ::_ROW_STRIDE, :]
        return jnp.isfinite(array).all()

    are_finite = jax.jit(lambda arrays: [is_finite(array) for array in arrays])
    return [
        path
        for path, is_good in zip(params, are_finite(list(params.values())), strict=True)
        if not bool(is_good)
    ]


def non_finite_tensor(source: Source, files: TensorFiles) -> str | None:
    """Name and file of the first tensor of `source` that is not finite as it is stored."""
    for name, shape in source.tensors().items():
        tensor = files.read(name, tuple(slice(0, size) for size in shape))
        if not np.isfinite(tensor.astype(np.float32)).all():
            return f"tensor {name!r} in {str(files.file_of(name))!r}"
    return None
