"""Sources of parameters by head: fused projections, and orders of dimensions."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from sgl_jax.layers.sources import ROWS, Derived, Source, swapped
from sgl_jax.layers.tensor_keys import Index, MatrixPart, Places, Shape, TensorKey, Tensors


def paired_order(head_dim: int, num_turned: int) -> tuple[int, ...]:
    """Return an order of a head's dimensions that rotates dimension i with i + head_dim / 2.

    In a checkpoint, only the first `num_turned` dimensions are rotated, and i is paired with
    i + num_turned / 2. In the order returned, the rotated dimensions come first in each half. So
    all heads are rotated in the same way, and the pairs after them have the angle 0.
    """
    pairs, still = num_turned // 2, tuple(range(num_turned, head_dim))
    in_first = head_dim // 2 - pairs
    return (*range(pairs), *still[:in_first], *range(pairs, num_turned), *still[in_first:])


@dataclass(frozen=True)
class Reordered(Derived):
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
    num_stored_kv: int  # KV heads of the checkpoint
    num_kv: int  # KV heads of the mesh, with copies if there are more chips than KV heads
    head_dim: int
    num_turned: int | None = None  # rotated dimensions; None: all
    pairs_neighbours: bool = False  # the checkpoint's dimensions 2i and 2i + 1 rotate together
    # Projections next to the queries': 2, or 1 if keys are values, too, or 0 if the layer reads
    # another layer's cache.
    num_kv_parts: int = 2

    @property
    def order(self) -> tuple[int, ...]:
        """Return the checkpoint's dimension for each dimension of queries and keys."""
        if self.pairs_neighbours:
            assert self.num_turned is None
            return (*range(0, self.head_dim, 2), *range(1, self.head_dim, 2))
        return paired_order(self.head_dim, self.num_turned or self.head_dim)

    @property
    def group(self) -> int:
        return self.num_q // self.num_kv

    @property
    def kv_width(self) -> int:
        """Return the columns of a KV head in `FusedHeads`: its queries, its key, its value."""
        return (self.group + self.num_kv_parts) * self.head_dim


@dataclass(frozen=True)
class HeadVectors(Source):
    """A vector for each of `num_heads` heads, side by side, of one tensor.

    The tensor has `num_stored` heads; each is copied to num_heads / num_stored adjacent heads.
    """

    name: str
    num_stored: int
    num_heads: int
    order: tuple[int, ...]  # the tensor's dimension for each dimension of a head

    @property
    def shape(self) -> Shape:
        return (self.num_heads * len(self.order),)

    @property
    def plain_shape(self) -> Shape:
        return (self.num_stored * len(self.order),)

    def tensors(self, prefix: str = "") -> dict[TensorKey, Shape]:
        return {TensorKey(prefix + self.name): self.plain_shape}

    def fill(self, out: NDArray[Any], index: Index, tensors: Tensors, prefix: str = "") -> None:
        whole = (slice(0, *self.plain_shape),)
        stored = tensors.read(TensorKey(prefix + self.name), whole)
        heads = stored.reshape(self.num_stored, -1)[:, list(self.order)]
        out[...] = heads.repeat(self.num_heads // self.num_stored, axis=0).reshape(-1)[index]

    def fit(self, plain: jax.Array) -> jax.Array:
        heads = plain.reshape(self.num_stored, -1)
        return jnp.repeat(heads, self.num_heads // self.num_stored, axis=0).reshape(-1)

    def plain_places(self) -> Places:
        places = np.full((self.num_stored, self.num_heads // self.num_stored, len(self.order)), -1)
        places[:, 0] = np.arange(self.num_stored * len(self.order)).reshape(self.num_stored, -1)
        return (places.reshape(-1).astype(np.int32),)


@dataclass(frozen=True)
class FusedHeads(Source):
    """Q, K and V projections side by side, [*inputs, num_kv * kv_width]; see `layers.attention`.

    Some heads have no V, or neither K nor V (`Heads.num_kv_parts`).

    They are stored as three tensors, q as [num_q * head_dim, *inputs], k and v as [num_stored_kv *
    head_dim, *inputs], where `inputs` is (hidden,) for a weight and () for a bias; or as one
    tensor, with the rows of q, then of k, then of v. If the mesh has more KV heads than the
    checkpoint, each stored head is copied to num_kv / num_stored_kv adjacent heads. Slices of the
    parameter hold whole KV heads.

    With `has_gates`, the tensor of q has 2 * head_dim rows for each head: its query's, its gate's.
    """

    names: tuple[str, ...]  # names of q, k and v, or of their tensor
    inputs: Shape
    heads: Heads
    has_gates: bool = False
    part: MatrixPart | None = None

    @property
    def shape(self) -> Shape:
        return (*self.inputs, self.heads.num_kv * self.heads.kv_width)

    @property
    def plain_shape(self) -> Shape:
        num_heads = self.heads.num_q + self.heads.num_kv_parts * self.heads.num_stored_kv
        return (*self.inputs, num_heads * self.heads.head_dim)

    def quantized(self, part: MatrixPart) -> Source:
        return replace(self, inputs=(part.inputs(self.inputs[0]),), part=part)

    def tensors(self, prefix: str = "") -> dict[TensorKey, Shape]:
        keys, rows = self._keys(prefix), self._rows
        if len(keys) == 1:
            rows = (sum(rows),)
        return {key: (own, *self.inputs) for key, own in zip(keys, rows, strict=True)}

    def _keys(self, prefix: str) -> list[TensorKey]:
        return [TensorKey(prefix + name, self.part) for name in self.names]

    @property
    def _rows(self) -> tuple[int, ...]:
        """Return the numbers of rows of q, and of k and v if there are."""
        kv_rows = self.heads.num_stored_kv * self.heads.head_dim
        q_rows = self.heads.num_q * self.heads.head_dim * (2 if self.has_gates else 1)
        return q_rows, *[kv_rows] * self.heads.num_kv_parts

    def fill(self, out: NDArray[Any], index: Index, tensors: Tensors, prefix: str = "") -> None:
        *inputs, columns = index
        heads, width = self.heads, self.heads.kv_width
        assert columns.start % width == columns.stop % width == 0
        first, stop = columns.start // width, columns.stop // width
        sizes = [part.stop - part.start for part in inputs]
        group, num_parts = heads.group, heads.num_kv_parts
        # A view of out, [KV heads, parts, head_dim, ...].
        by_head = out.view().reshape(*sizes, stop - first, group + num_parts, heads.head_dim)
        fused = np.moveaxis(by_head, (-3, -2, -1), (0, 1, 2))
        assert np.shares_memory(fused, out)

        keys, starts = self._keys(prefix), np.cumsum([0, *self._rows]).tolist()

        def read(part: int, first: int, stop: int, *, has_gates: bool = False) -> NDArray[Any]:
            """Return heads [first, stop) of part 0, 1 or 2 (q, k, v): [heads, head_dim, ...]."""
            stride = heads.head_dim * (2 if has_gates else 1)
            start, key = (starts[part], keys[0]) if len(keys) == 1 else (0, keys[part])
            rows = slice(start + first * stride, start + stop * stride)
            tensor = tensors.read(key, (rows, *inputs))
            return tensor.reshape(stop - first, stride, *sizes)[:, : heads.head_dim]

        q = read(0, first * group, stop * group, has_gates=self.has_gates)
        parts = [(slice(0, group), q.reshape(-1, group, *q.shape[1:]))]
        copies = heads.num_kv // heads.num_stored_kv
        first_stored = first // copies
        for part in range(1, 1 + num_parts):
            stored = read(part, first_stored, (stop - 1) // copies + 1)
            if copies > 1:
                stored = stored[np.arange(first, stop) // copies - first_stored]
            parts.append((slice(group + part - 1, group + part), stored[:, None]))
        # Some inputs at a time, of all parts: `out` is then written from its start to its end.
        for start in range(0, sizes[0], ROWS) if sizes else (0,):
            rows = (..., slice(start, start + ROWS)) if sizes else ...
            for own, heads_of_part in parts:
                fused[:, own][rows] = heads_of_part[rows]
        if heads.order != tuple(range(heads.head_dim)):
            assert num_parts == 2, "values are not in another order"
            fused[:, :-1] = fused[:, :-1, list(heads.order)]

    def fit(self, plain: jax.Array) -> jax.Array:
        """Copy KV heads; each copy has a part of the group of query heads."""
        heads, inputs = self.heads, self.inputs
        grouped = plain.reshape(*inputs, heads.num_stored_kv, -1, heads.head_dim)
        q, kv = jnp.split(grouped, [grouped.shape[-2] - heads.num_kv_parts], axis=-2)
        q = q.reshape(*inputs, heads.num_kv, heads.group, heads.head_dim)
        kv = jnp.repeat(kv, heads.num_kv // heads.num_stored_kv, axis=-3)
        return jnp.concatenate([q, kv], axis=-2).reshape(self.shape)

    def plain_places(self) -> Places:
        heads = self.heads
        copies, num_parts = heads.num_kv // heads.num_stored_kv, heads.num_kv_parts
        num_q = copies * heads.group
        whole = np.arange(self.plain_shape[-1]).reshape(heads.num_stored_kv, -1, heads.head_dim)
        places = np.full((heads.num_stored_kv, copies, heads.group + num_parts, heads.head_dim), -1)
        by_copy = whole[:, :num_q].reshape(heads.num_stored_kv, copies, -1, heads.head_dim)
        places[:, :, : heads.group] = by_copy
        places[:, 0, heads.group :] = whole[:, num_q:]
        inputs = (np.arange(size, dtype=np.int32) for size in self.inputs)
        return *inputs, places.reshape(-1).astype(np.int32)


@dataclass(frozen=True)
class HeadRows:
    """Rows of each head in a tensor: `size` rows, every `step`-th from first + head * stride on.

    With `copies`, heads are counted without their copies.
    """

    name: str
    num_rows: int
    first: int
    stride: int
    size: int
    step: int = 1
    part: MatrixPart | None = None
    copies: int = 1  # adjacent heads with the same rows

    def key(self, prefix: str) -> TensorKey:
        return TensorKey(prefix + self.name, self.part)

    def every_second(self, first: int) -> "HeadRows":
        """Return half of these rows, starting with row `first`, 0 or 1."""
        size, step = self.size // 2, 2 * self.step
        return replace(self, first=self.first + first * self.step, size=size, step=step)

    def of_heads(self, heads: range, inputs: Index, tensors: Tensors, prefix: str) -> NDArray[Any]:
        """Read adjacent heads' rows of the part `inputs`: [heads, size, *inputs]."""
        starts = [self.first + head // self.copies * self.stride for head in heads]
        span = (self.size - 1) * self.step + 1
        rows = tensors.read(self.key(prefix), (slice(starts[0], starts[-1] + span), *inputs))
        firsts = (start - starts[0] for start in starts)
        return np.stack([rows[first : first + span : self.step] for first in firsts])


@dataclass(frozen=True)
class ByHead(Source):
    """Columns [*inputs, num_heads * width]: for each head, its rows of all parts, side by side.

    The parts' tensors are stored as [rows, *inputs]. Where some parts have copies, the mesh has
    more heads than the checkpoint, and the heads that share these rows share the other parts' rows
    among them: one chip has one head with all of them.
    """

    parts: tuple[HeadRows, ...]
    num_heads: int
    inputs: Shape

    @property
    def shape(self) -> Shape:
        return (*self.inputs, self.num_heads * self.width)

    @property
    def plain_shape(self) -> Shape:
        return (*self.inputs, self.num_heads // self._copies * sum(self._plain_sizes))

    @property
    def width(self) -> int:
        return sum(part.size for part in self.parts)

    @property
    def _copies(self) -> int:
        return max(part.copies for part in self.parts)

    @property
    def _plain_sizes(self) -> list[int]:
        """Return the rows of each part of a head on one chip."""
        return [part.size * self._copies // part.copies for part in self.parts]

    def quantized(self, part: MatrixPart) -> Source:
        parts = tuple(replace(rows, part=part) for rows in self.parts)
        return replace(self, parts=parts, inputs=(part.inputs(self.inputs[0]),))

    def tensors(self, prefix: str = "") -> dict[TensorKey, Shape]:
        return {part.key(prefix): (part.num_rows, *self.inputs) for part in self.parts}

    def fill(self, out: NDArray[Any], index: Index, tensors: Tensors, prefix: str = "") -> None:
        *inputs, columns = index
        heads = range(columns.start // self.width, -(-columns.stop // self.width))
        parts = [part.of_heads(heads, tuple(inputs), tensors, prefix) for part in self.parts]
        by_head = np.concatenate(parts, axis=1)
        rows = by_head.reshape(-1, *by_head.shape[2:])[columns.start - heads[0] * self.width :]
        out[...] = np.moveaxis(rows[: columns.stop - columns.start], 0, -1)

    def fit(self, plain: jax.Array) -> jax.Array:
        apart = plain.reshape(*self.inputs, self.num_heads // self._copies, 1, -1)
        sizes, ends = self._plain_sizes, np.cumsum(self._plain_sizes)[:-1].tolist()
        parts = [
            jnp.repeat(own, self._copies, axis=-2)
            if part.copies > 1
            else own.reshape(*own.shape[:-2], self._copies, size // self._copies)
            for part, own, size in zip(
                self.parts, jnp.split(apart, ends, axis=-1), sizes, strict=True
            )
        ]
        return jnp.concatenate(parts, axis=-1).reshape(self.shape)

    def plain_places(self) -> Places:
        apart = np.arange(self.plain_shape[-1]).reshape(self.num_heads // self._copies, -1)
        places, starts = [], np.cumsum([0, *self._plain_sizes]).tolist()
        for part, first, end in zip(self.parts, starts, starts[1:], strict=False):
            own = np.full((len(apart), self._copies, part.size), -1)
            if part.copies > 1:
                own[:, 0] = apart[:, first:end]
            else:
                own[...] = apart[:, first:end].reshape(own.shape)
            places.append(own)
        joined = np.concatenate(places, axis=-1).reshape(-1).astype(np.int32)
        return *(np.arange(size, dtype=np.int32) for size in self.inputs), joined


@dataclass(frozen=True)
class HeadMatrices(Source):
    """A matrix for each head, [num_heads, size, inputs], of a tensor [rows, inputs].

    If `transposed`, it is [num_heads, inputs, size].
    """

    rows: HeadRows
    num_heads: int
    inputs: int
    transposed: bool = False

    @property
    def shape(self) -> Shape:
        by_row = self.num_heads, self.rows.size, self.inputs
        return swapped(by_row) if self.transposed else by_row

    @property
    def input_axis(self) -> int:
        return 1 if self.transposed else 2

    def quantized(self, part: MatrixPart) -> Source:
        rows = replace(self.rows, part=part)
        return replace(self, rows=rows, inputs=part.inputs(self.inputs))

    def tensors(self, prefix: str = "") -> dict[TensorKey, Shape]:
        return {self.rows.key(prefix): (self.rows.num_rows, self.inputs)}

    def fill(self, out: NDArray[Any], index: Index, tensors: Tensors, prefix: str = "") -> None:
        heads, rows, inputs = swapped(index) if self.transposed else index
        by_head = self.rows.of_heads(range(heads.start, heads.stop), (inputs,), tensors, prefix)
        found = by_head[:, rows]
        out[...] = found.swapaxes(1, 2) if self.transposed else found
