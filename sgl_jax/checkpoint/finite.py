"""Refuse weights with NaNs or infinities when they are loaded: such a model generates nonsense.

One program checks them on their devices. A sample finds a tensor that was never filled or
overflowed. A NaN that the sample misses in a dense layer makes every logit of the token that ends
the warm-up a NaN. A check of all weights takes some 2 s per GiB on a busy CPU.
"""

from collections.abc import Mapping
from functools import partial

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
    are_finite = _are_finite(list(params.values()), check_all)
    return [path for path, is_good in zip(params, are_finite, strict=True) if not bool(is_good)]


@partial(jax.jit, static_argnums=1)
def _are_finite(arrays: list[jax.Array], check_all: bool) -> list[jax.Array]:
    return [
        jnp.isfinite(
            array if check_all or array.size <= _WHOLE_SIZE else array[..., ::_ROW_STRIDE, :]
        ).all()
        for array in arrays
    ]


def non_finite_tensor(source: Source, files: TensorFiles) -> str | None:
    """Name and file of the first tensor of `source` that is not finite as it is stored."""
    for name, shape in source.tensors().items():
        tensor = files.read(name, tuple(slice(0, size) for size in shape))
        if not np.isfinite(tensor.astype(np.float32)).all():
            return f"tensor {name!r} in {str(files.file_of(name))!r}"
    return None
