"""Load Hugging Face safetensors into sharded arrays, one chip's part at a time."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from sgl_jax.checkpoint.errors import CheckpointError, check_tensors
from sgl_jax.checkpoint.finite import is_finite, non_finite_parameters
from sgl_jax.checkpoint.stored.reader import Expected, Files
from sgl_jax.checkpoint.stored.tensors import QuantizedTensors
from sgl_jax.checkpoint.tensor_files import TensorFiles
from sgl_jax.core.progress import Phase, Progress
from sgl_jax.layers.mesh_axes import of_each_host
from sgl_jax.layers.parameter import Path as ParamPath
from sgl_jax.layers.sources import Source, copy_numbers
from sgl_jax.layers.tensor_keys import Index, Shape, TensorKey, Tensors
from sgl_jax.models.quantization import QuantizationConfig

_ALIGNMENT = 64  # bytes; XLA's CPU client copies host arrays that are not aligned so

# Each parameter's shape, dtype and sharding, and its source tensors.
Declared = Mapping[ParamPath, tuple[jax.ShapeDtypeStruct, Source]]


def load_safetensors(
    folder: Path,
    declared: Declared,
    is_spare: Callable[[str], bool],
    progress: Progress,
    quantization: QuantizationConfig | None = None,
    *,
    check_all: bool = False,
) -> dict[ParamPath, jax.Array]:
    """Read parameters into their shardings, cast to their dtypes.

    Host memory holds one parameter's part for one chip, and one tensor's slice, at a time.

    Args:
        folder: the model folder.
        declared: the parameters by path.
        is_spare: True for the name of a tensor that may be present though no parameter needs it.
        progress: gets the phase "loading", in bytes of the files.
        quantization: the quantized matrices among the declared parameters.
        check_all: check every value for NaNs and infinities, not a sample (see `finite`).

    Raises:
        CheckpointError: tensors are missing, unexpected or of a wrong shape, or one holds NaNs or
            infinities; names them.
    """
    with TensorFiles(folder) as files:
        stored = QuantizedTensors(quantization)
        declared = as_stored(declared, stored, partial(are_in, files.shapes))
        expected = expected_tensors(declared, stored)

        def is_needless(name: str) -> bool:
            return is_spare(name) or stored.is_spare(name) or stored.is_zero_bias(files, name)

        found = {
            name: (shape, files.type_of(name))
            for name, shape in files.shapes.items()
            if name in expected or not is_needless(name)
        }
        check_tensors(repr(str(folder)), expected, found)
        total = sum(files.nbytes(name) for name in expected)
        with progress.phase("loading", total, "bytes") as phase:
            tensors = StoredTensors(_CountedFiles(files, phase), stored)
            params = _on_all_hosts(
                lambda: {path: load_parameter(*own, tensors) for path, own in declared.items()}
            )
            non_finite = non_finite_parameters(params, check_all=check_all)
        for path in non_finite:
            array, source = declared[path]
            tensor = _non_finite_tensor(source, tensors, stored, files)
            holder = f"{tensor} holds" if tensor else f"as {array.dtype}, {path} would hold"
            raise CheckpointError(f"{holder} values that are no finite numbers")
        return params


def are_in(shapes: Mapping[str, Shape], wanted: Mapping[str, Expected]) -> bool:
    """Return whether tensors of these names and `shapes` include all that are `wanted`."""
    return all(
        name in shapes and (not own.shapes or shapes[name] in own.shapes)
        for name, own in wanted.items()
    )


def as_stored(
    declared: Declared,
    stored: QuantizedTensors,
    has_tensors: Callable[[Mapping[str, Expected]], bool],
) -> dict[ParamPath, tuple[jax.ShapeDtypeStruct, Source]]:
    """Choose, for each parameter, among the forms that a checkpoint may have it in: see `OneOf`.
    `has_tensors` returns whether the checkpoint has all of these tensors."""

    def has(key: TensorKey, shape: Shape) -> bool:
        return has_tensors(stored.expected(key, shape))

    return {path: (array, own.as_stored(has)) for path, (array, own) in declared.items()}


def expected_tensors(declared: Declared, stored: QuantizedTensors) -> dict[str, Expected]:
    """Return the tensors that make the declared parameters, by name."""
    expected: dict[str, Expected] = {}
    for array, source in declared.values():
        is_integer = jnp.issubdtype(array.dtype, jnp.integer)
        for key, shape in source.tensors().items():
            for own, wanted in stored.expected(key, shape, is_integer=is_integer).items():
                if own not in expected or wanted.shapes:
                    expected[own] = wanted
    return expected


def _on_all_hosts(read: Callable[[], dict[ParamPath, jax.Array]]) -> dict[ParamPath, jax.Array]:
    """Call `read`; if it fails on one host, raise on all hosts.

    All raise before any host runs a program that the failed host would not join.
    """
    params, failure = {}, None
    try:
        params = read()
    except Exception as error:  # of any type: files, their contents, the devices' memory
        failure = error
    failed = [rank for rank, has in enumerate(of_each_host(failure is not None)) if has]
    if failure is not None:
        raise failure
    if failed:
        raise CheckpointError(f"weights could not be read on the hosts {failed}; see their logs")
    return params


def _non_finite_tensor(
    source: Source, tensors: Tensors, stored: QuantizedTensors, files: TensorFiles
) -> str | None:
    """Return the name and file of the first tensor of `source` with NaNs or infinities."""
    for key, shape in source.tensors().items():
        if not is_finite(tensors.read(key, tuple(slice(0, size) for size in shape))):
            tensor = next(iter(stored.expected(key, shape)))
            return f"tensor {tensor!r} in {str(files.file_of(tensor))!r}"
    return None


class StoredTensors(Tensors):
    """The tensors of files, and the parts of their quantized matrices."""

    def __init__(self, files: Files, stored: QuantizedTensors) -> None:
        self._files = files
        self._stored = stored

    def read(self, key: TensorKey, index: Index) -> NDArray[Any]:
        return self._stored.read(self._files, key, index)


class _CountedFiles(Files):
    """Counts the bytes read, once for each chip."""

    def __init__(self, files: TensorFiles, phase: Phase) -> None:
        self._files = files
        self._phase = phase

    def read(self, name: str, index: Index) -> NDArray[Any]:
        part = self._files.read(name, index)
        self._phase.advance(part.nbytes)
        return part


def load_parameter(
    array: jax.ShapeDtypeStruct,
    source: Source,
    tensors: Tensors,
    on_filled: Callable[[], object] = lambda: None,
) -> jax.Array:
    """Fill a parameter from `tensors`, one chip's part at a time. `on_filled` is called when the
    first part is filled, before a device gets it."""
    chips_of: dict[tuple[tuple[int, int], ...], list[jax.Device]] = {}
    for chip, index in array.sharding.addressable_devices_indices_map(array.shape).items():
        bounds = zip(index or (), array.shape, strict=True)
        chips_of.setdefault(tuple(own.indices(size)[:2] for own, size in bounds), []).append(chip)
    on_chips: list[jax.Array] = []
    for part, chips in chips_of.items():
        index = tuple(slice(*bound) for bound in part)
        try:
            stored = source.stored(index, tensors)
            if stored is not None and _is_aligned(stored, array.dtype):
                out = stored
            else:
                out = aligned([stop - start for start, stop in part], array.dtype)
                if stored is None:
                    source.fill(out, index, tensors)
                else:
                    copy_numbers(out, stored)
        except ValueError as error:
            raise CheckpointError(str(error)) from error
        if not on_chips:
            on_filled()
        own = [jax.device_put(out, chip) for chip in chips]
        if chips[0].platform != "cpu":
            # Memory is for one part at a time. An unfinished transfer would hold this part while
            # the next is read; and jax frees it in the first call after the transfer.
            jax.block_until_ready(own)
            jax.device_put(0, chips[0])
        elif out is stored:  # whose memory a CPU shares
            own = [jax.device_put(each, may_alias=False) for each in own]
        on_chips += own
    whole = jax.make_array_from_single_device_arrays(array.shape, array.sharding, on_chips)
    return in_layout(whole, array)


def _is_aligned(stored: NDArray[Any], dtype: Any) -> bool:
    """Return whether a CPU device takes an array of this dtype as it is."""
    is_whole = stored.flags.c_contiguous and stored.ctypes.data % _ALIGNMENT == 0
    return stored.dtype == dtype and is_whole


def aligned(shape: list[int], dtype: Any) -> NDArray[Any]:
    """Return an uninitialized array that a CPU device takes without another copy."""
    num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    first = -memory.ctypes.data % _ALIGNMENT
    own: NDArray[Any] = memory[first : first + num_bytes].view(dtype).reshape(shape)
    return own


def in_layout(array: Any, declared: jax.ShapeDtypeStruct) -> jax.Array:
    """Return `array`, or if its axes are not in the declared order in memory, a copy with the axes
    in that order; the array is then deleted."""
    wanted: Any = declared.format
    if wanted.layout and wanted.layout.major_to_minor != array.format.layout.major_to_minor:
        array = jax.device_put(array, wanted, donate=True)
    own: jax.Array = array
    return own
