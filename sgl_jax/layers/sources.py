"""Sources of parameters: which tensors of a Hugging Face checkpoint make a parameter, and how.

A source is part of a parameter's declaration. It has the parameter's shape and the names of its
tensors, and fills any slice of the parameter from them. So only a chip's own shard is read, tensor
by tensor, into one buffer of the right type. Tensor names are relative: `Stacked` prefixes them
with the name of the layer or the expert.
"""

from abc import ABC, abstractmethod
from collections.abc import Container
from dataclasses import dataclass, replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from sgl_jax.kernels.tpu_chip import LANES

Shape = tuple[int, ...]
Index = tuple[slice, ...]  # one slice per axis, start and stop given; steps are `Slice`'s


class Tensors(Protocol):
    """The tensors of a checkpoint."""

    def read(self, name: str, index: Index) -> NDArray[Any]:
        """Part of a tensor in the type it is stored in."""
        ...


class Source(ABC):
    """One parameter of the model, or one layer's part of it."""

    @property
    @abstractmethod
    def shape(self) -> Shape:
        """The parameter's shape on the whole mesh."""

    @property
    def plain_shape(self) -> Shape:
        """The parameter's shape on a mesh of one chip, where nothing is padded or copied."""
        return self.shape

    @abstractmethod
    def tensors(self, prefix: str = "") -> dict[str, Shape]:
        """Names and shapes of the tensors that the source reads."""

    @abstractmethod
    def fill(self, out: NDArray[Any], index: Index, tensors: Tensors, prefix: str = "") -> None:
        """Write the parameter's part `index` to `out`, whose shape and dtype are the part's."""

    def fit(self, plain: jax.Array) -> jax.Array:
        """Make the parameter of the whole mesh from an array of `plain_shape`."""
        return plain

    def as_stored(self, names: Container[str], prefix: str = "") -> "Source":
        """The source to use for a checkpoint with tensors of these names, see `EitherWay`."""
        return self


@dataclass(frozen=True)
class Tensor(Source):
    """One tensor as stored; if `transposed`, matrices [..., in, out] stored as [..., out, in]."""

    name: str
    dims: Shape  # of the parameter
    transposed: bool = False

    @property
    def shape(self) -> Shape:
        return self.dims

    def tensors(self, prefix: str = "") -> dict[str, Shape]:
        return {prefix + self.name: _swapped(self.dims) if self.transposed else self.dims}

    def fill(self, out: NDArray[Any], index: Index, tensors: Tensors, prefix: str = "") -> None:
        if self.transposed:
            out[...] = tensors.read(prefix + self.name, _swapped(index)).swapaxes(-2, -1)
        else:
            out[...] = tensors.read(prefix + self.name, index)


def _swapped(axes: tuple[Any, ...]) -> tuple[Any, ...]:
    return *axes[:-2], axes[-1], axes[-2]


def _with_axis(axes: tuple[Any, ...], axis: int, own: Any) -> tuple[Any, ...]:
    return *axes[:axis], own, *axes[axis + 1 :]


@dataclass(frozen=True)
class OfPart(Source):
    """Base of sources that are made from another one, `part`; by default they equal it."""

    part: Source

    @property
    def shape(self) -> Shape:
        return self.part.shape

    def tensors(self, prefix: str = "") -> dict[str, Shape]:
        return self.part.tensors(prefix)

    def fill(self, out: NDArray[Any], index: Index, tensors: Tensors, prefix: str = "") -> None:
        self.part.fill(out, index, tensors, prefix)

    def as_stored(self, names: Container[str], prefix: str = "") -> Source:
        return replace(self, part=self.part.as_stored(names, prefix))


@dataclass(frozen=True)
class Slice(OfPart):
    """Every `step`-th slice of a part along axis `axis`, from `first` on, `size` in all."""

    axis: int
    first: int
    size: int
    step: int = 1

    @property
    def shape(self) -> Shape:
        return _with_axis(self.part.shape, self.axis, self.size)

    def fill(self, out: NDArray[Any], index: Index, tensors: Tensors, prefix: str = "") -> None:
        own, last = index[self.axis], index[self.axis].stop - 1
        start, stop = (self.first + i * self.step for i in (own.start, last))
        within = slice(start, stop + 1, self.step)
        self.part.fill(out, _with_axis(index, self.axis, within), tensors, prefix)


@dataclass(frozen=True)
class EitherWay(OfPart):
    """A part, or `other`, which has the same shape: a checkpoint has the tensors of one of them."""

    other: Source

    def as_stored(self, names: Container[str], prefix: str = "") -> Source:
        """`other` if the checkpoint has all its tensors, else `part`."""
        is_other = all(name in names for name in self.other.tensors(prefix))
        return (self.other if is_other else self.part).as_stored(names, prefix)


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

    def tensors(self, prefix: str = "") -> dict[str, Shape]:
        found: dict[str, Shape] = {}
        for own in self.prefixes:
            found |= self.part.tensors(prefix + own)
        return found

    def fill(self, out: NDArray[Any], index: Index, tensors: Tensors, prefix: str = "") -> None:
        for part, own in zip(out, self.prefixes[index[0]], strict=True):
            self.part.fill(part, index[1:], tensors, prefix + own)

    def fit(self, plain: jax.Array) -> jax.Array:
        fitted: jax.Array = jax.vmap(self.part.fit)(plain)
        return fitted

    def as_stored(self, names: Container[str], prefix: str = "") -> Source:
        return replace(self, part=self.part.as_stored(names, prefix + self.prefixes[0]))


def row_size(size: int) -> int:
    """`size` rounded up to whole rows of a TPU's memory, if that adds at most an eighth.

    For a row that is a little shorter, the TPU's compiler may choose another order of the array's
    axes, with less padding, and each step would begin with a copy to the declared order.
    """
    padded = -(-size // LANES) * LANES
    return padded if padded <= size * 9 // 8 else size


@dataclass(frozen=True)
class Padded(OfPart):
    """A part padded with zeros at the end of axis `axis`, to `size`."""

    size: int
    axis: int
    on_every_mesh: bool = False  # False: only if the number of chips does not divide the part

    @property
    def shape(self) -> Shape:
        return _with_axis(self.part.shape, self.axis, self.size)

    @property
    def plain_shape(self) -> Shape:
        return self.shape if self.on_every_mesh else self.part.plain_shape

    def fill(self, out: NDArray[Any], index: Index, tensors: Tensors, prefix: str = "") -> None:
        part_size = self.part.shape[self.axis]
        start, stop = (min(i, part_size) for i in (index[self.axis].start, index[self.axis].stop))
        rows = np.moveaxis(out, self.axis, 0)
        rows[stop - start :] = 0
        if stop > start:
            own = np.moveaxis(rows[: stop - start], 0, self.axis)
            within = _with_axis(index, self.axis, slice(start, stop))
            self.part.fill(own, within, tensors, prefix)

    def fit(self, plain: jax.Array) -> jax.Array:
        widths = [(0, size - own) for own, size in zip(plain.shape, self.shape, strict=True)]
        return jnp.pad(plain, widths)


def paired_order(head_dim: int, num_turned: int) -> tuple[int, ...]:
    """An order of a head's dimensions in which dimension i is rotated together with
    i + head_dim / 2.

    In a checkpoint, only the first `num_turned` dimensions are rotated, and i is paired with
    i + num_turned / 2. In the order returned, the rotated dimensions come first in each half. So
    all heads are rotated alike, and the pairs after them have the angle 0.
    """
    pairs, still = num_turned // 2, tuple(range(num_turned, head_dim))
    in_first = head_dim // 2 - pairs
    return (*range(pairs), *still[:in_first], *range(pairs, num_turned), *still[in_first:])


@dataclass(frozen=True)
class Reordered(OfPart):
    """A vector with the elements of `part`, in another order."""

    order: tuple[int, ...]

    def fill(self, out: NDArray[Any], index: Index, tensors: Tensors, prefix: str = "") -> None:
        whole = np.empty(self.shape, out.dtype)
        self.part.fill(whole, (slice(0, len(whole)),), tensors, prefix)
        out[...] = whole[list(self.order)][index]


@dataclass(frozen=True)
class Heads:
    """Attention heads of one layer on a whole mesh."""

    num_q: int
    num_stored_kv: int  # of the checkpoint
    num_kv: int  # copies included, where there are more chips than KV heads
    head_dim: int
    num_turned: int | None = None  # dimensions that a rotation turns; None: all

    @property
    def order(self) -> tuple[int, ...]:
        """The checkpoint's dimension in each place of queries and keys."""
        return paired_order(self.head_dim, self.num_turned or self.head_dim)

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.num_q // self.num_kv

    @property
    def kv_width(self) -> int:
        """Columns of a KV head in `FusedHeads`: its queries, its key, its value."""
        return (self.group + 2) * self.head_dim


@dataclass(frozen=True)
class FusedHeads(Source):
    """Q, K and V projections side by side, [*inputs, num_kv * kv_width]; see `layers.attention`.

    They are stored as three tensors, q as [num_q * head_dim, *inputs], k and v as [num_stored_kv *
    head_dim, *inputs], where `inputs` is (hidden,) for a weight and () for a bias. If the mesh has
    more KV heads than are stored, each stored one is copied to num_kv / num_stored_kv neighbouring
    heads. Slices of the parameter hold whole KV heads.

    With `has_gates`, the tensor of q has 2 * head_dim rows for each head: its query's, its gate's.
    """

    names: tuple[str, ...]  # of q, k and v
    inputs: Shape
    heads: Heads
    has_gates: bool = False

    @property
    def shape(self) -> Shape:
        return (*self.inputs, self.heads.num_kv * self.heads.kv_width)

    @property
    def plain_shape(self) -> Shape:
        num_heads = self.heads.num_q + 2 * self.heads.num_stored_kv
        return (*self.inputs, num_heads * self.heads.head_dim)

    def tensors(self, prefix: str = "") -> dict[str, Shape]:
        kv_shape = (self.heads.num_stored_kv * self.heads.head_dim, *self.inputs)
        q_rows = self.heads.num_q * self.heads.head_dim * (2 if self.has_gates else 1)
        q_shape = (q_rows, *self.inputs)
        shapes = (q_shape, kv_shape, kv_shape)
        return {prefix + name: own for name, own in zip(self.names, shapes, strict=True)}

    def fill(self, out: NDArray[Any], index: Index, tensors: Tensors, prefix: str = "") -> None:
        *inputs, columns = index
        heads, width = self.heads, self.heads.kv_width
        assert columns.start % width == columns.stop % width == 0
        first, stop = columns.start // width, columns.stop // width
        sizes = [part.stop - part.start for part in inputs]
        fused = np.empty((stop - first, heads.group + 2, heads.head_dim, *sizes), out.dtype)

        def read(name: str, first: int, stop: int, *, has_gates: bool = False) -> NDArray[Any]:
            """Heads [first, stop) of a tensor, [heads, head_dim, *inputs]."""
            stride = heads.head_dim * (2 if has_gates else 1)
            tensor = tensors.read(prefix + name, (slice(first * stride, stop * stride), *inputs))
            return tensor.reshape(stop - first, stride, *sizes)[:, : heads.head_dim]

        group = heads.group
        q = read(self.names[0], first * group, stop * group, has_gates=self.has_gates)
        fused[:, : heads.group] = q.reshape(-1, heads.group, *q.shape[1:])
        copies = heads.num_kv // heads.num_stored_kv
        first_stored = first // copies
        for place, name in enumerate(self.names[1:], heads.group):
            stored = read(name, first_stored, (stop - 1) // copies + 1)
            fused[:, place] = stored[np.arange(first, stop) // copies - first_stored]
        if self.heads.num_turned is not None:
            fused[:, :-1] = fused[:, :-1, list(heads.order)]
        out[...] = np.moveaxis(fused.reshape(-1, *sizes), 0, -1)

    def fit(self, plain: jax.Array) -> jax.Array:
        """Copy KV heads; each copy has a part of the group of query heads."""
        heads, inputs = self.heads, self.inputs
        grouped = plain.reshape(*inputs, heads.num_stored_kv, -1, heads.head_dim)
        q, kv = grouped[..., :-2, :], grouped[..., -2:, :]
        q = q.reshape(*inputs, heads.num_kv, heads.group, heads.head_dim)
        kv = jnp.repeat(kv, heads.num_kv // heads.num_stored_kv, axis=-3)
        return jnp.concatenate([q, kv], axis=-2).reshape(self.shape)


@dataclass(frozen=True)
class HeadRows:
    """Rows of each head in a tensor [num_rows, ...]: `size` rows from first + head * stride on."""

    name: str
    num_rows: int
    first: int
    stride: int
    size: int


@dataclass(frozen=True)
class ByHead(Source):
    """Columns [*inputs, num_heads * width]: for each head, its rows of all parts, side by side.

    The parts' tensors are stored as [rows, *inputs]. Slices of the parameter hold whole heads.
    """

    parts: tuple[HeadRows, ...]
    num_heads: int
    inputs: Shape

    @property
    def shape(self) -> Shape:
        return (*self.inputs, self.num_heads * self.width)

    @property
    def width(self) -> int:
        """Columns of a head."""
        return sum(part.size for part in self.parts)

    def tensors(self, prefix: str = "") -> dict[str, Shape]:
        return {prefix + part.name: (part.num_rows, *self.inputs) for part in self.parts}

    def fill(self, out: NDArray[Any], index: Index, tensors: Tensors, prefix: str = "") -> None:
        *inputs, columns = index
        assert columns.start % self.width == columns.stop % self.width == 0
        heads = range(columns.start // self.width, columns.stop // self.width)

        def read(part: HeadRows) -> NDArray[Any]:
            """[heads, part.size, *inputs]"""
            start, stop = (part.first + head * part.stride for head in (heads[0], heads[-1]))
            rows = tensors.read(prefix + part.name, (slice(start, stop + part.size), *inputs))
            firsts = range(0, len(heads) * part.stride, part.stride)
            return np.stack([rows[first : first + part.size] for first in firsts])

        by_head = np.concatenate([read(part) for part in self.parts], axis=1)
        out[...] = np.moveaxis(by_head.reshape(-1, *by_head.shape[2:]), 0, -1)
