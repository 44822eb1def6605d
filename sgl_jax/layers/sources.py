"""Sources of parameters: the tensors of a Hugging Face checkpoint that make a parameter, and how.

A source is part of a parameter's declaration. It has the parameter's shape and the names of its
tensors, and fills any slice of the parameter from them. So only a chip's shard is read, tensor
by tensor, into one buffer of the right dtype. Tensor names are relative: `Stacked` prefixes them
with the name of the layer or the expert.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import NDArray

from sgl_jax.kernels.tpu_chip import LANES
from sgl_jax.layers.tensor_keys import Has, Index, MatrixPart, Places, Shape, TensorKey, Tensors

ROWS = 64  # copied at a time


class Source(ABC):
    """One parameter of the model, or one layer's part of it."""

    @property
    @abstractmethod
    def shape(self) -> Shape:
        """Return the parameter's shape on the whole mesh."""

    @property
    def plain_shape(self) -> Shape:
        """Return the parameter's shape on a mesh of one chip, where nothing is padded or copied."""
        return self.shape

    @property
    def is_plain(self) -> bool:
        """Return True if the parameter is the same on a mesh of one chip."""
        return self.plain_shape == self.shape

    @property
    def input_axis(self) -> int:
        """Return the axis of a matrix's inputs, counted from 0."""
        return 0

    def quantized(self, part: MatrixPart) -> "Source":
        """Return the source of a part of the quantized matrix, with groups in place of inputs."""
        raise NotImplementedError(f"{type(self).__name__} is not a matrix")

    @abstractmethod
    def tensors(self, prefix: str = "") -> dict[TensorKey, Shape]:
        """Return the tensors that the source reads, and their shapes."""

    @abstractmethod
    def fill(self, out: NDArray[Any], index: Index, tensors: Tensors, prefix: str = "") -> None:
        """Write the parameter's part `index` to `out`, of the part's shape and dtype."""

    def stored(self, index: Index, tensors: Tensors, prefix: str = "") -> NDArray[Any] | None:
        """Return the part `index` as a tensor has it, or None if it must be filled."""
        return None

    def fit(self, plain: jax.Array) -> jax.Array:
        """Convert an array of `plain_shape` to the parameter of the whole mesh."""
        return plain

    def plain_places(self) -> Places:
        """Return where each element is in the parameter of one chip. Experts in another order keep
        their places."""
        return tuple(np.arange(size, dtype=np.int32) for size in self.shape)

    def as_stored(self, has: Has, prefix: str = "") -> "Source":
        """Return the source for a checkpoint that `has` some tensors, see `OneOf`."""
        return self


@dataclass(frozen=True)
class Tensor(Source):
    """One tensor as stored; if `transposed`, with its last two axes exchanged.

    Matrices are stored as [..., out, in], or `by_input` as [..., in, out].
    """

    name: str
    dims: Shape  # the parameter's shape
    transposed: bool = False
    part: MatrixPart | None = None
    by_input: bool = False

    @property
    def shape(self) -> Shape:
        return self.dims

    @property
    def input_axis(self) -> int:
        return len(self.dims) - (2 if self.transposed != self.by_input else 1)

    def quantized(self, part: MatrixPart) -> "Tensor":
        groups = part.inputs(self.dims[self.input_axis])
        dims = _with_axis(self.dims, self.input_axis, groups)
        own, transposed = part._replace(by_input=self.by_input), self.transposed != self.by_input
        return Tensor(self.name, dims, transposed, own)  # parts are read as [..., out, in]

    def tensors(self, prefix: str = "") -> dict[TensorKey, Shape]:
        dims = swapped(self.dims) if self.transposed else self.dims
        return {TensorKey(prefix + self.name, self.part): dims}

    def stored(self, index: Index, tensors: Tensors, prefix: str = "") -> NDArray[Any]:
        key = TensorKey(prefix + self.name, self.part)
        if not self.transposed:
            return tensors.read(key, index)
        return tensors.read(key, swapped(index)).swapaxes(-2, -1)

    def fill(self, out: NDArray[Any], index: Index, tensors: Tensors, prefix: str = "") -> None:
        copy_numbers(out, self.stored(index, tensors, prefix))


def copy_numbers(out: NDArray[Any], stored: NDArray[Any]) -> None:
    """Copy `stored` to `out`, which may have another order of axes in memory."""
    if stored.ndim < 2 or stored.strides[-1] == stored.itemsize:
        out[...] = stored
        return
    # Some rows at a time: of a whole matrix, columns would miss the processor's caches; of fewer
    # rows, each write would be shorter than memory transfers it.
    for first in range(0, stored.shape[-1], ROWS):
        rows = slice(first, first + ROWS)
        out[..., rows] = stored[..., rows]


@dataclass(frozen=True)
class Ones(Source):
    """Ones, of no tensor: the weights of a norm that has none."""

    dims: Shape

    @property
    def shape(self) -> Shape:
        return self.dims

    def tensors(self, prefix: str = "") -> dict[TensorKey, Shape]:
        return {}

    def fill(self, out: NDArray[Any], index: Index, tensors: Tensors, prefix: str = "") -> None:
        out[...] = 1


def swapped(axes: tuple[Any, ...]) -> tuple[Any, ...]:
    """Exchange the last two axes."""
    return *axes[:-2], axes[-1], axes[-2]


def _with_axis(axes: tuple[Any, ...], axis: int, own: Any) -> tuple[Any, ...]:
    return *axes[:axis], own, *axes[axis + 1 :]


@dataclass(frozen=True)
class Derived(Source):
    """Base of sources derived from another source, `part`; by default they equal it."""

    part: Source

    @property
    def shape(self) -> Shape:
        return self.part.shape

    @property
    def input_axis(self) -> int:
        return self.part.input_axis

    def quantized(self, part: MatrixPart) -> Source:
        return replace(self, part=self.part.quantized(part))

    def tensors(self, prefix: str = "") -> dict[TensorKey, Shape]:
        return self.part.tensors(prefix)

    def fill(self, out: NDArray[Any], index: Index, tensors: Tensors, prefix: str = "") -> None:
        self.part.fill(out, index, tensors, prefix)

    def as_stored(self, has: Has, prefix: str = "") -> Source:
        return replace(self, part=self.part.as_stored(has, prefix))


@dataclass(frozen=True)
class Swapped(Derived):
    """A part with its last two axes exchanged."""

    @property
    def shape(self) -> Shape:
        return swapped(self.part.shape)

    @property
    def plain_shape(self) -> Shape:
        return swapped(self.part.plain_shape)

    def fill(self, out: NDArray[Any], index: Index, tensors: Tensors, prefix: str = "") -> None:
        self.part.fill(out.swapaxes(-2, -1), swapped(index), tensors, prefix)

    def fit(self, plain: jax.Array) -> jax.Array:
        return self.part.fit(plain.swapaxes(-2, -1)).swapaxes(-2, -1)

    def plain_places(self) -> Places:
        return swapped(self.part.plain_places())


@dataclass(frozen=True)
class Slice(Derived):
    """`size` slices of a part along axis `axis`: every `step`-th from `first` on."""

    axis: int
    first: int
    size: int
    step: int = 1

    @property
    def shape(self) -> Shape:
        return _with_axis(self.part.shape, self.axis, self.size)

    def quantized(self, part: MatrixPart) -> Source:
        assert self.axis != self.input_axis, "a slice of outputs"
        return super().quantized(part)

    def fill(self, out: NDArray[Any], index: Index, tensors: Tensors, prefix: str = "") -> None:
        own, last = index[self.axis], index[self.axis].stop - 1
        start, stop = (self.first + i * self.step for i in (own.start, last))
        within = slice(start, stop + 1, self.step)
        self.part.fill(out, _with_axis(index, self.axis, within), tensors, prefix)


@dataclass(frozen=True)
class Dequantized(Derived):
    """The numbers of a part that a checkpoint has quantized: values times scales per group."""

    group: int | None

    @property
    def _parts(self) -> tuple[Source, Source]:
        values, scales = (
            self.part.quantized(MatrixPart(kind, self.group)) for kind in ("values", "scales")
        )
        return values, scales

    def tensors(self, prefix: str = "") -> dict[TensorKey, Shape]:
        values, scales = self._parts
        return values.tensors(prefix) | scales.tensors(prefix)

    def fill(self, out: NDArray[Any], index: Index, tensors: Tensors, prefix: str = "") -> None:
        values, scales = self._parts
        axis, within = self.input_axis, index[self.input_axis]
        size = self.group or self.shape[axis]
        groups = slice(within.start // size, -(-within.stop // size))
        factors = np.empty(
            _with_axis(out.shape, axis, groups.stop - groups.start), dtype=np.float32
        )
        scales.fill(factors, _with_axis(index, axis, groups), tensors, prefix)
        numbers = np.empty(out.shape, np.float32)
        values.fill(numbers, index, tensors, prefix)
        own = np.arange(within.start, within.stop) // size - groups.start
        out[...] = numbers * np.take(factors, own, axis)


@dataclass(frozen=True)
class OneOf(Derived):
    """A part, or `other` of the same shape: a checkpoint has the tensors of one of them."""

    other: Source

    def quantized(self, part: MatrixPart) -> Source:
        return OneOf(self.part.quantized(part), self.other.quantized(part))

    def as_stored(self, has: Has, prefix: str = "") -> Source:
        is_other = all(has(*tensor) for tensor in self.other.tensors(prefix).items())
        return (self.other if is_other else self.part).as_stored(has, prefix)


@dataclass(frozen=True)
class Stacked(Source):
    """Parts of equal shape stacked on a new first axis: a layer or an expert for each prefix."""

    prefixes: tuple[str, ...]
    part: Source

    @property
    def shape(self) -> Shape:
        return (len(self.prefixes), *self.part.shape)

    @property
    def plain_shape(self) -> Shape:
        return (len(self.prefixes), *self.part.plain_shape)

    @property
    def input_axis(self) -> int:
        return 1 + self.part.input_axis

    def quantized(self, part: MatrixPart) -> Source:
        return replace(self, part=self.part.quantized(part))

    def tensors(self, prefix: str = "") -> dict[TensorKey, Shape]:
        found: dict[TensorKey, Shape] = {}
        for own in self.prefixes:
            found |= self.part.tensors(prefix + own)
        return found

    def fill(self, out: NDArray[Any], index: Index, tensors: Tensors, prefix: str = "") -> None:
        for n, own in enumerate(self.prefixes[index[0]]):
            part = out[n, ...]  # a view, even if it is a single number
            self.part.fill(part, index[1:], tensors, prefix + own)

    def stored(self, index: Index, tensors: Tensors, prefix: str = "") -> NDArray[Any] | None:
        own = self.prefixes[index[0]]
        part = self.part.stored(index[1:], tensors, prefix + own[0]) if len(own) == 1 else None
        return None if part is None else part[None]

    def fit(self, plain: jax.Array) -> jax.Array:
        fitted: jax.Array = jax.vmap(self.part.fit)(plain)
        return fitted

    def plain_places(self) -> Places:
        return np.arange(len(self.prefixes), dtype=np.int32), *self.part.plain_places()

    def as_stored(self, has: Has, prefix: str = "") -> Source:
        return replace(self, part=self.part.as_stored(has, prefix + self.prefixes[0]))


def row_size(size: int) -> int:
    """Round `size` up to whole rows of a TPU's memory, if that adds at most an eighth.

    For a row that is a little shorter, the TPU's compiler may choose another order of the array's
    axes, with less padding, and each step would begin with a copy to the declared order.
    """
    padded = -(-size // LANES) * LANES
    return padded if padded <= size * 9 // 8 else size


@dataclass(frozen=True)
class Padded(Derived):
    """A part padded with zeros at the end of axis `axis`, to `size`."""

    size: int
    axis: int
    on_every_mesh: bool = False  # False: only if the chips do not divide the part

    @property
    def shape(self) -> Shape:
        return _with_axis(self.part.shape, self.axis, self.size)

    @property
    def plain_shape(self) -> Shape:
        return self.shape if self.on_every_mesh else self.part.plain_shape

    def quantized(self, part: MatrixPart) -> Source:
        own = self.part.quantized(part)
        if self.axis != self.input_axis:
            return replace(self, part=own)
        size = part.inputs(self.size)
        return own if size == 1 else replace(self, part=own, size=size)

    def fill(self, out: NDArray[Any], index: Index, tensors: Tensors, prefix: str = "") -> None:
        part_size = self.part.shape[self.axis]
        start, stop = (min(i, part_size) for i in (index[self.axis].start, index[self.axis].stop))
        rows = np.moveaxis(out, self.axis, 0)
        rows[stop - start :] = 0
        if stop > start:
            own = np.moveaxis(rows[: stop - start], 0, self.axis)
            within = _with_axis(index, self.axis, slice(start, stop))
            self.part.fill(own, within, tensors, prefix)

    def stored(self, index: Index, tensors: Tensors, prefix: str = "") -> NDArray[Any] | None:
        is_padded = self.part.shape != self.shape
        return None if is_padded else self.part.stored(index, tensors, prefix)

    def fit(self, plain: jax.Array) -> jax.Array:
        widths = [(0, size - own) for own, size in zip(plain.shape, self.shape, strict=True)]
        return jnp.pad(plain, widths)

    def plain_places(self) -> Places:
        own = self.part.plain_places()
        places = np.full(self.size, -1, np.int32)
        if self.on_every_mesh:  # one chip has the same padding
            places[:] = np.arange(self.size)
        places[: len(own[self.axis])] = own[self.axis]
        return _with_axis(own, self.axis, places)


@dataclass(frozen=True)
class Placed(Derived):
    """Experts of all layers, from a part [layers, experts, ...], in the order of `slots`."""

    slots: tuple[tuple[int, ...], ...]

    @property
    def shape(self) -> Shape:
        return _with_axis(self.part.shape, 1, len(self.slots[0]))

    @property
    def plain_shape(self) -> Shape:
        return self.part.plain_shape

    @property
    def is_plain(self) -> bool:
        return False

    def fill(self, out: NDArray[Any], index: Index, tensors: Tensors, prefix: str = "") -> None:
        for layer, own in zip(range(len(self.slots))[index[0]], out, strict=True):
            for expert, part in zip(self.slots[layer][index[1]], own, strict=True):
                one = slice(layer, layer + 1), slice(expert, expert + 1), *index[2:]
                self.part.fill(part[None, None], one, tensors, prefix)

    def fit(self, plain: jax.Array) -> jax.Array:
        """Place one layer at a time: its experts may be on other chips than their slots."""

        def take(own: tuple[jax.Array, jax.Array]) -> jax.Array:
            return own[0][own[1]]

        fitted: jax.Array = lax.map(take, (self.part.fit(plain), jnp.asarray(self.slots)))
        return fitted
