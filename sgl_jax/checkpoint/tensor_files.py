"""The safetensors or the GGUF file of a model folder as one set of named tensors.

Slices are read on demand, and nothing is kept in memory. The files stay open until `close`.
"""

import json
import math
import struct
from collections.abc import Mapping
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from sgl_jax.checkpoint.errors import CheckpointError
from sgl_jax.checkpoint.gguf.folder import GGUF_FILE, GGUF_SUFFIX

_FLOAT8 = "F8_E4M3"
INDEX_FILE = "model.safetensors.index.json"
# The names of a model that was saved without its head's class begin with one of these.
_BASE_PARTS = ("embed_tokens.", "layers.", "norm.")
_BODY = "model."
# Bytes of an element by stored dtype.
_ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1}
_ITEM_BYTES |= {"I64": 8, "I32": 4, "I8": 1, "U8": 1, "BOOL": 1}


class TensorFiles:
    """Read-only view of all tensors of a folder; a context manager.

    The tensors of a base model, saved without its head's class, get the names that they have in
    the whole model.
    """

    def __init__(self, folder: Path) -> None:
        """Open every file.

        Raises:
            CheckpointError: there are no files, one is missing or damaged, or a tensor's dtype is
                not supported.
        """
        self._tensors: dict[str, Any] = {}  # name -> lazy slice
        self._file_of: dict[str, Path] = {}
        with ExitStack() as stack:
            for path in _files(folder):
                self._open(path, stack)
            self._stack = stack.pop_all()
        self.is_base_model = all(name.startswith(_BASE_PARTS) for name in self._tensors)
        if self.is_base_model:
            self._tensors = {_BODY + name: lazy for name, lazy in self._tensors.items()}
            self._file_of = {_BODY + name: path for name, path in self._file_of.items()}

    def __enter__(self) -> "TensorFiles":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(lazy.get_shape()) for name, lazy in self._tensors.items()}

    def nbytes(self, name: str) -> int:
        lazy = self._tensors[name]
        num_items: int = math.prod(lazy.get_shape())
        return num_items * _ITEM_BYTES[lazy.get_dtype()]

    def type_of(self, name: str) -> str:
        """Return safetensors' name of a tensor's dtype."""
        stored: str = self._tensors[name].get_dtype()
        return stored

    def file_of(self, name: str) -> Path:
        return self._file_of[name]

    def read(self, name: str, index: tuple[slice, ...]) -> NDArray[Any]:
        """Return a part of a tensor, in its stored dtype (bfloat16 as ml_dtypes.bfloat16).

        An axis without a slice is read whole.
        """
        index += (slice(None),) * (len(self._tensors[name].get_shape()) - len(index))
        whole = np.asarray(self._tensors[name][tuple(slice(i.start, i.stop) for i in index)])
        return whole[tuple(slice(None, None, i.step) for i in index)]

    def close(self) -> None:
        """Close all files; idempotent."""
        self._tensors.clear()
        self._stack.close()

    def _open(self, path: Path, stack: ExitStack) -> None:
        if path.suffix == GGUF_SUFFIX:
            self._open_gguf(path)
            return
        try:
            file = stack.enter_context(safe_open(path, framework="np"))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"cannot read {str(path)!r}: {error}") from error
        float8 = _Float8File(path)
        for name in file.keys():  # noqa: SIM118 (no mapping, only its keys)
            lazy = file.get_slice(name)
            if lazy.get_dtype() not in _ITEM_BYTES:
                known = ", ".join(_ITEM_BYTES)
                raise CheckpointError(
                    f"tensor {name!r} has type {lazy.get_dtype()}; supported: {known}"
                )
            self._tensors[name] = float8.tensor(name) if lazy.get_dtype() == _FLOAT8 else lazy
            self._file_of[name] = path

    def _open_gguf(self, path: Path) -> None:
        # Imported here: it takes half a second.
        from sgl_jax.checkpoint.gguf.header import GgufError
        from sgl_jax.checkpoint.gguf.tensors import open_tensors

        try:
            for name, tensor in open_tensors(path):
                self._tensors[name] = tensor
                self._file_of[name] = path
        except GgufError as error:
            raise CheckpointError(str(error)) from error


class _Float8File:
    """The 8-bit floats of a file, for which safetensors has no numpy dtype.

    A file begins with the size of a JSON header, 8 bytes, and the header; offsets in it count from
    its end.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    @cached_property
    def _parts(self) -> tuple[dict[str, Any], NDArray[np.uint8]]:
        """Return the header, and the rest of the file in one mapping: a process may have 65,530."""
        with self._path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(size))
        return header, np.memmap(self._path, np.uint8, "r", 8 + size)

    def tensor(self, name: str) -> "_Float8Tensor":
        header, data = self._parts
        own = header[name]
        return _Float8Tensor(data[slice(*own["data_offsets"])].reshape(own["shape"]))


class _Float8Tensor:
    def __init__(self, data: NDArray[np.uint8]) -> None:
        self._data = data

    def get_shape(self) -> list[int]:
        return list(self._data.shape)

    def get_dtype(self) -> str:
        return _FLOAT8

    def __getitem__(self, index: tuple[slice, ...]) -> NDArray[Any]:
        return np.array(self._data[index]).view(ml_dtypes.float8_e4m3fn)


def _files(folder: Path) -> list[Path]:
    index = folder / INDEX_FILE
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()), key=str)
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise CheckpointError(f"{str(index)!r} has no valid weight_map") from error
        malformed = [name for name in names if not isinstance(name, str)]
        if malformed:
            raise CheckpointError(f"{str(index)!r} names files that are no names: {malformed}")
        absent = [name for name in names if not (folder / name).is_file()]
        if absent:
            raise CheckpointError(f"{str(index)!r} names files that are missing: {absent}")
        return [folder / name for name in names]
    # Folders hold other files, too: adapters, and the same weights under their trainer's names.
    for pattern in ("model.safetensors", "model-*-of-*.safetensors", "*.safetensors", GGUF_FILE):
        files = sorted(folder.glob(pattern))
        if files:
            return files
    raise CheckpointError(f"no safetensors files in {str(folder)!r}")
