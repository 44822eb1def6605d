"""The pools of all ranks as device arrays: KV pages, and states of recurrent layers.

This file defines the arrays' shapes, shardings and sizes in bytes. It does not record the owner of
a page or slot. It is the only file of this package that imports jax.
"""

import math
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from sgl_jax.core.layer_configs import Recurrence, conv_state_shape

_Tree = TypeVar("_Tree")

# A rank's pages are contiguous, so page ids are local to the rank under shard_map.
KV_POOL_SPEC = P(None, "data", "tensor", None, None)


# Elements of one row of TPU memory; smaller data is padded to a row.
_LANES = 128


class ChipView(NamedTuple):
    """A chip's part of a page or state as [layers, parts, shared, tokens, size]: chips share axis
    2, the heads or channels. Joined along it, the parts do not depend on the number of chips."""

    num_parts: int  # K and V, or the inputs of a convolution
    num_tokens: int  # 1 for a state
    size: int  # numbers per token and head or channel
    num_copies: int = 1  # adjacent entries of axis 2 with the same values


class KVPoolLayout(NamedTuple):
    """The contents of one KV page, over all chips of a rank."""

    num_layers: int
    num_kv_heads: int  # over all chips of a rank, including copies if chips outnumber heads
    page_size: int  # tokens
    head_dim: int
    dtype: jnp.dtype  # dtype of the array; int8 holds the bits of 8-bit floats
    # One row per token for all heads of a chip, in place of K and V: `head_dim` is the row's size,
    # and `num_kv_heads` is the number of chips, each with a copy of the row.
    is_latent: bool = False
    num_copies: int = 1  # of each KV head or latent, within `num_kv_heads`

    @property
    def chip_view(self) -> ChipView:
        is_joint = self.is_latent or 2 * self.head_dim == _LANES
        row_size = self.page_shape[-1]
        return ChipView(1 if is_joint else 2, self.page_size, row_size, self.num_copies)

    def of_one_chip(self, page_size: int) -> "KVPoolLayout":
        """Return the layout on a chip that holds each head once."""
        num_heads = self.num_kv_heads // self.num_copies
        return self._replace(num_kv_heads=num_heads, num_copies=1, page_size=page_size)

    @property
    def page_shape(self) -> tuple[int, int, int]:
        """Return one layer's shape: [2 * kv_heads, page_size, head_dim], K heads then V heads.

        If K and V of a head together fill a memory row, they share it on every platform: [kv_heads,
        page_size, 2 * head_dim]. The shape for latents is [chips, page_size, row size].
        """
        if self.is_latent:
            return self.num_kv_heads, self.page_size, self.head_dim
        if 2 * self.head_dim == _LANES:
            return self.num_kv_heads, self.page_size, _LANES
        return 2 * self.num_kv_heads, self.page_size, self.head_dim

    @property
    def page_bytes(self) -> int:
        return self.num_layers * math.prod(self.page_shape) * self.dtype.itemsize


def kv_pool_shape(layout: KVPoolLayout, num_pages: int, mesh: Mesh) -> jax.ShapeDtypeStruct:
    """Return the shape of the pool: [layers, dp * num_pages, *page_shape].

    Each chip has [layers, num_pages, ...] with its heads: K heads then V heads, or K and V of each
    head in one row. One page of one layer is contiguous. `num_pages` counts one rank's pages,
    including the null page.
    """
    shape = (layout.num_layers, mesh.shape["data"] * num_pages, *layout.page_shape)
    sharding = NamedSharding(mesh, KV_POOL_SPEC)
    return jax.ShapeDtypeStruct(shape, layout.dtype, sharding=sharding)


def make_zeros(shapes: _Tree) -> _Tree:
    """Create zeros for a tree of shapes with shardings, on the devices and not on the host."""

    def zeros() -> Any:
        return jax.tree.map(lambda array: jnp.zeros(array.shape, array.dtype), shapes)

    shardings = jax.tree.map(lambda array: array.sharding, shapes)
    made: _Tree = jax.jit(zeros, out_shardings=shardings)()
    return made


class LayerStates(NamedTuple):
    """The states of all recurrent layers and sequences, by slot; or their specs or shapes. A rank's
    slots are contiguous, so slot numbers are local to the rank under shard_map."""

    conv: Any  # [layers, slots, rows, row size], last K - 1 inputs of the convolution
    recurrent: Any  # [layers, slots, *state_shape] of the layers' config

    def copied(self, source: jax.Array, target: jax.Array) -> "LayerStates":
        """Copy slot `source`, int32[], to slot `target`, int32[], in all layers."""

        def copy(states: jax.Array) -> jax.Array:
            own = lax.dynamic_slice_in_dim(states, source, 1, axis=1)
            return lax.dynamic_update_slice_in_dim(states, own, target, axis=1)

        return LayerStates(*map(copy, self))


STATE_POOL_SPECS = LayerStates(
    P(None, "data", "tensor", None), P(None, "data", "tensor", None, None)
)


class StatePoolLayout(NamedTuple):
    """The contents of one slot, over all chips of a rank."""

    num_layers: int
    recurrence: Recurrence  # config of each recurrent layer
    conv_dtype: jnp.dtype  # dtype of convolution states and activations
    dtype: jnp.dtype  # dtype of recurrent states

    def slot_shapes(self, tp_size: int) -> LayerStates:
        """Return one layer's shapes: the parts of `tp_size` chips, one after another."""
        own = self.recurrence
        rows, row_size = conv_state_shape(own.conv_size, own.chip_channels(tp_size))
        return LayerStates((tp_size * rows, row_size), own.state_shape)

    @property
    def chip_views(self) -> LayerStates:
        own = self.recurrence
        matrix = ChipView(1, 1, math.prod(own.state_shape[1:]))
        return LayerStates(ChipView(own.conv_size - 1, 1, 1), matrix)

    @property
    def slot_bytes(self) -> int:
        shapes, dtypes = self.slot_shapes(tp_size=1), (self.conv_dtype, self.dtype)
        layer = sum(
            math.prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)
        )
        return self.num_layers * int(layer)


def state_pool_shapes(layout: StatePoolLayout, num_slots: int, mesh: Mesh) -> LayerStates:
    """Return shapes [layers, dp * num_slots, ...]. A rank has `num_slots`, with the null slot."""
    slots = layout.num_layers, mesh.shape["data"] * num_slots
    shapes, dtypes = layout.slot_shapes(mesh.shape["tensor"]), (layout.conv_dtype, layout.dtype)
    return LayerStates(
        *(
            jax.ShapeDtypeStruct((*slots, *shape), dtype, sharding=NamedSharding(mesh, spec))
            for shape, dtype, spec in zip(shapes, dtypes, STATE_POOL_SPECS, strict=True)
        )
    )


def kv_absmax(pool: jax.Array, layout: KVPoolLayout, mesh: Mesh) -> jax.Array:
    """Return the maximum |K| and |V| in the pool, float32 [2, layers, kv_heads].

    All pages count except the null pages. Free pages hold zeros, or K and V of earlier tokens. Do
    not use this for an 8-bit pool: its stored numbers need scales.
    """
    found: jax.Array = _absmax(pool, layout, mesh.shape["data"], mesh.shape["tensor"])
    return found


@partial(jax.jit, static_argnums=(1, 2, 3))
def _absmax(pool: jax.Array, layout: KVPoolLayout, dp_size: int, tp_size: int) -> jax.Array:
    layers, head_dim = layout.num_layers, layout.head_dim
    ranks = pool.reshape(layers, dp_size, -1, *layout.page_shape)[:, :, 1:]
    size = jnp.abs(ranks).reshape(*ranks.shape[:-1], -1, head_dim)
    greatest = jnp.max(size, axis=(1, 2, 4, 6)).astype(jnp.float32)  # [layers, heads, parts]
    if greatest.shape[2] == 2:  # K and V of a head share a row
        return jnp.moveaxis(greatest, 2, 0)
    by_chip = greatest.reshape(layers, tp_size, 2, -1)
    return jnp.moveaxis(by_chip, 2, 0).reshape(2, layers, -1)
