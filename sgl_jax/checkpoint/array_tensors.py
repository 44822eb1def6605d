"""Tensors in memory, as numpy or jax arrays, read in the same way as the tensors of files.

A jax array may be sharded over any mesh of this process. It is copied through host memory: nothing
is compiled, and no result shares a buffer with it, so its owner may donate it afterwards.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
import safetensors
from numpy.typing import NDArray

from sgl_jax.checkpoint.errors import CheckpointError
from sgl_jax.checkpoint.finite import is_finite, sample_of
from sgl_jax.checkpoint.stored.reader import Files
from sgl_jax.layers.tensor_keys import Index, Shape

# Numpy's dtypes by safetensors' names.
_DTYPES: Mapping[str, np.dtype[Any]] = {
    name: np.dtype(own)
    for name, own in {
        "F32": np.float32,
        "F16": np.float16,
        "BF16": ml_dtypes.bfloat16,
        "F8_E4M3": ml_dtypes.float8_e4m3fn,
        "I64": np.int64,
        "I32": np.int32,
        "I8": np.int8,
        "U8": np.uint8,
        "BOOL": np.bool_,
    }.items()
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class Transposed(NamedTuple):
    """A matrix [..., out, in] of a checkpoint, held as `array` with its inputs first.

    The first `num_inputs` axes of the array are inputs, and the remaining axes are outputs. With
    `expert`, the matrix is that entry of the array's first axis.
    """

    array: Any
    num_inputs: int
    expert: int | None = None

    @property
    def _dims(self) -> Shape:
        dims = tuple(self.array.shape)
        return dims if self.expert is None else dims[1:]

    @property
    def shape(self) -> Shape:
        dims = self._dims
        return math.prod(dims[self.num_inputs :]), math.prod(dims[: self.num_inputs])

    @property
    def dtype(self) -> Any:
        return self.array.dtype

    def convert(self, host: NDArray[Any]) -> NDArray[Any]:
        own = host if self.expert is None else host[self.expert]
        return own.reshape(self.shape[::-1]).T


class Flat(NamedTuple):
    """A vector of a checkpoint, held as an `array` of more axes."""

    array: Any

    @property
    def shape(self) -> Shape:
        return (math.prod(self.array.shape),)

    @property
    def dtype(self) -> Any:
        return self.array.dtype

    def convert(self, host: NDArray[Any]) -> NDArray[Any]:
        return host.reshape(-1)


class ArrayTensors(Files):
    """Named tensors: numpy or jax arrays, `Transposed` or `Flat`. Checks values when it reads."""

    def __init__(self, *, check_all: bool) -> None:
        """Create an empty set. `check_all` checks every value for NaNs, not a sample."""
        self._check_all = check_all
        self._tensors: dict[str, Any] = {}
        self._on_host: dict[int, NDArray[Any]] = {}  # by the id of the array

    @property
    def shapes(self) -> Mapping[str, Shape]:
        return {name: tuple(own.shape) for name, own in self._tensors.items()}

    def add(self, name: str, tensor: Any) -> None:
        self._tensors[name] = tensor

    def drop(self, names: Iterable[str]) -> None:
        for name in names:
            self._tensors.pop(name, None)

    def forget_copies(self) -> None:
        """Free the host copies of the arrays read so far."""
        self._on_host.clear()

    def read(self, name: str, index: Index) -> NDArray[Any]:
        tensor = self._tensors[name]
        array = tensor.array if isinstance(tensor, Transposed | Flat) else tensor
        host = self._on_host.get(id(array))
        if host is None:
            host = self._on_host[id(array)] = on_host(name, array)
            if not is_finite(host if self._check_all else sample_of(host)):
                raise CheckpointError(f"tensor {name!r} holds values that are no finite numbers")
        return (host if tensor is array else tensor.convert(host))[index]


class RowPieces:
    """Tensors that arrive in pieces of rows: `name#100` holds the rows of `name` from 100 on."""

    def __init__(self) -> None:
        self._pieces: dict[str, dict[int, Any]] = {}

    def joined(self, tensors: Mapping[str, Any], num_rows: Callable[[str], int]) -> dict[str, Any]:
        """Return the tensors without pieces, and those whose `num_rows` have now arrived."""
        found = {}
        for key, tensor in tensors.items():
            name, mark, first = key.rpartition("#")
            if not mark or not first.isdecimal():
                found[key] = tensor
                continue
            pieces = self._pieces.setdefault(name, {})
            pieces[int(first)] = tensor
            starts = sorted(pieces)
            ends = [start + len(pieces[start]) for start in starts]
            if starts == [0, *ends[:-1]] and ends[-1] >= num_rows(name):
                found[name] = np.concatenate([pieces[start] for start in starts])
                del self._pieces[name]
        return found


def type_of(tensor: Any) -> str:
    """Return safetensors' name of a tensor's dtype, or numpy's name of one that has none."""
    dtype: np.dtype[Any] = np.dtype(tensor.dtype)
    return _NAMES.get(dtype) or dtype.name


def read_safetensors(data: bytes) -> dict[str, NDArray[Any]]:
    """Return the tensors of a safetensors file as views of `data`. Raises CheckpointError."""
    try:
        found = safetensors.deserialize(data)  # type: ignore[no-untyped-call]
    except safetensors.SafetensorError as error:
        raise CheckpointError(f"the body is not a safetensors file: {error}") from error
    unknown = {own["dtype"] for _, own in found} - _DTYPES.keys()
    if unknown:
        raise CheckpointError(f"tensors of type {min(unknown)}; supported: {', '.join(_DTYPES)}")
    return {
        name: np.frombuffer(own["data"], _DTYPES[own["dtype"]]).reshape(own["shape"])
        for name, own in found
    }


def on_host(name: str, array: Any) -> NDArray[Any]:
    """Return an array's values, on a CPU perhaps as a view. Raises CheckpointError."""
    if not isinstance(array, jax.Array):
        return np.asarray(array)
    if array.is_deleted():
        raise CheckpointError(f"the array of tensor {name!r} was deleted or donated")
    if not array.is_fully_addressable:
        raise CheckpointError(f"the array of tensor {name!r} is not wholly in this process")
    if len(array.sharding.device_set) == 1:
        return _copy_of(array)
    shards = {str(shard.index): shard for shard in array.addressable_shards}.values()
    if len(shards) == 1:
        return _copy_of(next(iter(shards)).data)
    whole = np.empty(array.shape, array.dtype)
    for shard in shards:
        whole[shard.index] = _copy_of(shard.data)
    return whole


def _copy_of(part: jax.Array) -> NDArray[Any]:
    """Return the values of an array of one device; on a CPU a view.

    jax keeps the host copy of an array until the array is deleted. The trainer's array lives on, so
    another jax array of the same buffer is read.
    """
    other = jax.make_array_from_single_device_arrays(part.shape, part.sharding, [part])
    return np.asarray(other)
