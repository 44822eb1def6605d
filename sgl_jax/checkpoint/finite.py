"""Find NaNs and infinities in loaded weights: a model with them generates nonsense.

One program checks the weights on their devices. By default it checks a sample, which is enough to
find a tensor that was never filled or that overflowed. If the sample misses a NaN in a dense layer,
the warm-up finds it: its last token gets NaN logits. A check of all weights takes about 2 s per GiB
on a busy CPU.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from sgl_jax.layers.parameter import Path

_WHOLE_SIZE = 2**18  # parameters of up to this many elements are checked whole
_ROW_STRIDE = 16


def non_finite_parameters(params: Mapping[Path, jax.Array], *, check_all: bool) -> list[Path]:
    """Return the paths of the parameters with a NaN or an infinity.

    Without `check_all`, only every sixteenth entry of a large array's longest axis but the last is
    checked.
    """
    floats = {path: own for path, own in params.items() if jnp.issubdtype(own.dtype, jnp.floating)}
    are_finite = _are_finite(list(floats.values()), check_all)
    return [path for path, is_good in zip(floats, are_finite, strict=True) if not bool(is_good)]


@partial(jax.jit, static_argnums=1)
def _are_finite(arrays: list[jax.Array], check_all: bool) -> list[jax.Array]:
    return [jnp.isfinite(array if check_all else sample_of(array)).all() for array in arrays]


def sample_of(array: Any) -> Any:
    """Return the part of a numpy or jax array that is checked."""
    if array.size <= _WHOLE_SIZE:
        return array
    # The longest axis is that of rows: not heads, experts or layers.
    lengths = array.shape[:-1] or array.shape
    axis = lengths.index(max(lengths))
    return array[(slice(None),) * axis + (slice(None, None, _ROW_STRIDE),)]


def is_finite(tensor: NDArray[Any]) -> bool:
    """Return True if all numbers of a stored tensor are finite; integers are."""
    return bool(np.isfinite(tensor.astype(np.float32, copy=False)).all())
