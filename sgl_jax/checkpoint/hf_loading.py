"""Load Hugging Face safetensors into sharded arrays, one chip's part at a time."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from sgl_jax.checkpoint.errors import CheckpointError, check_shapes
from sgl_jax.checkpoint.finite import non_finite_parameters, non_finite_tensor
from sgl_jax.checkpoint.tensor_files import TensorFiles
from sgl_jax.core.progress import Phase, Progress
from sgl_jax.layers.parameter import Path as ParamPath
from sgl_jax.layers.sources import Index, Shape, Source, Tensors

# Each parameter's shape, type and sharding, and the tensors that make it.
Declared = Mapping[ParamPath, tuple[jax.ShapeDtypeStruct, Source]]


def load_safetensors(
    folder: Path,
    declared: Declared,
    is_spare: Callable[[str], bool],
    progress: Progress,
    *,
    check_all: bool = False,
) -> dict[ParamPath, jax.Array]:
    """Read parameters into their shardings, cast to their types.

    Host memory holds one parameter's part for one chip, and one tensor's slice, at a time.

    Args:
        declared: the parameters by path.
        is_spare: True for the name of a tensor that may be present though no parameter needs it.
        progress: gets the phase "loading", in bytes of the files.
        check_all: check every value for NaNs and infinities, not a sample (see `finite`).

    Raises:
        CheckpointError: tensors are missing, unexpected or of a wrong shape, or one holds NaNs or
            infinities; it names them.
    """
    with TensorFiles(folder) as files:
        names = files.shapes
        declared = {path: (array, own.as_stored(names)) for path, (array, own) in declared.items()}
        expected: dict[str, Shape] = {}
        for _, source in declared.values():
            expected |= source.tensors()
        found = files.shapes.items()
        needed = {name: shape for name, shape in found if name in expected or not is_spare(name)}
        check_shapes(folder, expected, needed)
        total = sum(files.nbytes(name) for name in expected)
        with progress.phase("loading", total, "bytes") as phase:
            tensors = _CountedTensors(files, phase)
            params = {path: _load(*own, tensors) for path, own in declared.items()}
            non_finite = non_finite_parameters(params, check_all=check_all)
        for path in non_finite:
            array, source = declared[path]
            stored = non_finite_tensor(source, files)
            holder = f"{stored} holds" if stored else f"as {array.dtype}, {path} would hold"
            raise CheckpointError(f"{holder} values that are no finite numbers")
        return params


class _CountedTensors(Tensors):
    """Counts the bytes read, once for each chip that reads them."""

    def __init__(self, files: TensorFiles, phase: Phase) -> None:
        self._files = files
        self._phase = phase

    def read(self, name: str, index: Index) -> NDArray[Any]:
        part = self._files.read(name, index)
        self._phase.advance(part.nbytes)
        return part


def _load(array: jax.ShapeDtypeStruct, source: Source, tensors: Tensors) -> jax.Array:
    parts: dict[tuple[tuple[int, int], ...], NDArray[Any]] = {}

    def read_part(index: tuple[slice, ...] | None) -> NDArray[Any]:
        """The part of one chip; chips with the same part share one read."""
        bounds = tuple(
            part.indices(size)[:2] for part, size in zip(index or (), array.shape, strict=True)
        )
        if bounds not in parts:
            out = np.empty([stop - start for start, stop in bounds], array.dtype)
            source.fill(out, tuple(slice(*bound) for bound in bounds), tensors)
            parts[bounds] = out
        return parts[bounds]

    return jax.make_array_from_callback(array.shape, array.sharding, read_part)
