"""How a parameter is put together from tensors of a checkpoint.

A source knows which tensors it needs and fills any slice of its parameter from them, so that a
chip's shard is read alone, tensor by tensor, straight into one buffer of the right type.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from sgl_jax.checkpoint.tensor_files import TensorFiles

Index = tuple[slice, ...]  # one slice per axis, start and stop given, step 1
Shapes = dict[str, tuple[int, ...]]


class Source(Protocol):
    """One parameter of the model, or one layer's part of it."""

    def tensors(self) -> Shapes:
        """Names of the tensors that are needed, with the shapes they must have."""
        ...

    def fill(self, out: NDArray[Any], index: Index, files: TensorFiles) -> None:
        """Write the parameter's part `index` to `out`, whose shape and dtype are the part's."""
        ...


@dataclass(frozen=True)
class Plain:
    """A tensor as it is."""

    name: str
    shape: tuple[int, ...]

    def tensors(self) -> Shapes:
        return {self.name: self.shape}

    def fill(self, out: NDArray[Any], index: Index, files: TensorFiles) -> None:
        out[...] = files.read(self.name, index)


@dataclass(frozen=True)
class Transposed:
    """A matrix [in, out], stored as [out, in]."""

    name: str
    shape: tuple[int, int]  # of the parameter

    def tensors(self) -> Shapes:
        return {self.name: self.shape[::-1]}

    def fill(self, out: NDArray[Any], index: Index, files: TensorFiles) -> None:
        out[...] = files.read(self.name, index[::-1]).T


@dataclass(frozen=True)
class Stacked:
    """Equal parts along a new first axis: layers, or experts."""

    parts: Sequence[Source]

    def tensors(self) -> Shapes:
        return {name: shape for part in self.parts for name, shape in part.tensors().items()}

    def fill(self, out: NDArray[Any], index: Index, files: TensorFiles) -> None:
        for slot, part in zip(out, self.parts[index[0]], strict=True):
            part.fill(slot, index[1:], files)


@dataclass(frozen=True)
class Padded:
    """A part followed by zeros along axis `axis`, `size` long together."""

    part: Source
    part_size: int
    axis: int

    def tensors(self) -> Shapes:
        return self.part.tensors()

    def fill(self, out: NDArray[Any], index: Index, files: TensorFiles) -> None:
        start, stop = index[self.axis].start, index[self.axis].stop
        within = slice(min(start, self.part_size), min(stop, self.part_size))
        length = within.stop - within.start
        slots = np.moveaxis(out, self.axis, 0)
        slots[length:] = 0
        if length:
            part_index = (*index[: self.axis], within, *index[self.axis + 1 :])
            self.part.fill(np.moveaxis(slots[:length], 0, self.axis), part_index, files)


@dataclass(frozen=True)
class GroupedHeads:
    """Q, K and V projections as [*in, kv_heads, group + 2, head_dim]; see `layers.attention`.

    Stored as q [q_heads * head_dim, *in], k and v [stored_kv_heads * head_dim, *in], where `in`
    is (hidden,) for a weight and () for a bias. With more KV heads than are stored, each stored
    one serves as many neighbouring copies.
    """

    q: str
    k: str
    v: str
    inputs: tuple[int, ...]
    num_heads: int
    num_stored_kv_heads: int
    num_kv_heads: int
    head_dim: int

    def tensors(self) -> Shapes:
        kv_shape = (self.num_stored_kv_heads * self.head_dim, *self.inputs)
        q_shape = (self.num_heads * self.head_dim, *self.inputs)
        return {self.q: q_shape, self.k: kv_shape, self.v: kv_shape}

    def fill(self, out: NDArray[Any], index: Index, files: TensorFiles) -> None:
        *inputs, heads, slots, dims = index
        group = self.num_heads // self.num_kv_heads
        copies = self.num_kv_heads // self.num_stored_kv_heads
        whole = np.empty(
            (heads.stop - heads.start, group + 2, self.head_dim, *_sizes(inputs)), out.dtype
        )
        q = self._read(self.q, heads.start * group, heads.stop * group, inputs, files)
        whole[:, :group] = q.reshape(-1, group, *q.shape[1:])
        for slot, name in ((group, self.k), (group + 1, self.v)):
            first, last = heads.start // copies, (heads.stop - 1) // copies
            stored = self._read(name, first, last + 1, inputs, files)
            whole[:, slot] = stored[np.arange(heads.start, heads.stop) // copies - first]
        out[...] = np.moveaxis(whole[:, slots, dims], (0, 1, 2), (-3, -2, -1))

    def _read(
        self, name: str, first: int, stop: int, inputs: Sequence[slice], files: TensorFiles
    ) -> NDArray[Any]:
        """Heads [first, stop) of a tensor as [heads, head_dim, *in]."""
        rows = slice(first * self.head_dim, stop * self.head_dim)
        tensor = files.read(name, (rows, *inputs))
        return tensor.reshape(stop - first, self.head_dim, *tensor.shape[1:])


@dataclass(frozen=True)
class MergedHeads:
    """The weight of `GroupedHeads` as a matrix [in, kv_heads * (group + 2) * head_dim].

    Parts of it hold whole KV heads.
    """

    part: GroupedHeads

    def tensors(self) -> Shapes:
        return self.part.tensors()

    def fill(self, out: NDArray[Any], index: Index, files: TensorFiles) -> None:
        inputs, columns = index
        grouped = (self.part.num_heads // self.part.num_kv_heads + 2, self.part.head_dim)
        width = grouped[0] * grouped[1]
        assert columns.start % width == columns.stop % width == 0
        heads = slice(columns.start // width, columns.stop // width)
        by_head = np.empty((out.shape[0], heads.stop - heads.start, *grouped), out.dtype)
        self.part.fill(by_head, (inputs, heads, *(slice(0, size) for size in grouped)), files)
        out[...] = by_head.reshape(out.shape)


def _sizes(index: Sequence[slice]) -> tuple[int, ...]:
    return tuple(part.stop - part.start for part in index)
