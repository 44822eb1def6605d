"""The blocks of one pool in host memory, and the programs that move pages to and from them."""

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from numpy.typing import NDArray

from sgl_jax.core.step_plan import Int32Array
from sgl_jax.core.transfers import STORED_TOKENS
from sgl_jax.mem_cache.device_pool import ChipView

# Limits of one program run per rank.
_PIECE_BYTES = 64 << 20
_MAX_PIECE_PAGES = 64
# The arrays of a pool, each [layers, dp * pages, ...].
Arrays: TypeAlias = tuple[jax.Array, ...]
Bytes: TypeAlias = NDArray[Any]  # unsigned integers of the element size


class BlockPool:
    """The blocks of one pool: [blocks, layers, ...] for each local device and each array.

    Attributes:
        num_values: values of a block in a store.
    """

    def __init__(
        self, shapes: Sequence[Any], views: Sequence[ChipView], num_blocks: int, mesh: Mesh
    ) -> None:
        """Allocate blocks for arrays of these shapes, of which `views` are the chips' parts."""
        self._shapes = tuple(shapes)
        self._views = tuple(views)
        self.num_values = max(views[0].num_tokens // STORED_TOKENS, 1)
        self._mesh = mesh
        self._dp_size = mesh.shape["data"]
        self._num_pages = shapes[0].shape[1] // self._dp_size  # per rank
        page_bytes = sum(
            math.prod(each.shape) * each.dtype.itemsize // each.shape[1] for each in shapes
        )
        self.piece_pages = max(1, min(_PIECE_BYTES // page_bytes, _MAX_PIECE_PAGES))
        self._values = tuple(self._of_piece(each) for each in shapes)
        self._stored: dict[tuple[int, jax.Device], Bytes] = {}
        self._ranks: dict[jax.Device, int] = {}
        self._places = {device: place for place, device in enumerate(mesh.devices.flat)}
        self._padding: dict[tuple[int, jax.Device], jax.Array] = {}
        for index, (pool, piece) in enumerate(zip(self._shapes, self._values, strict=True)):
            for device, part in piece.sharding.addressable_devices_indices_map(piece.shape).items():
                self._ranks[device] = (part[0].start or 0) // self.piece_pages
                _, *page = piece.sharding.shard_shape(piece.shape)
                size = np.dtype(f"u{pool.dtype.itemsize}")
                self._stored[index, device] = np.empty((num_blocks, *page), size)
        self._gather: Any = None
        self._scatter: Any = None

    def _of_piece(self, pool: Any) -> jax.ShapeDtypeStruct:
        layers, _, *page = pool.shape
        shape = (self._dp_size * self.piece_pages, layers, *page)
        of_layers, of_pages, *of_page = pool.sharding.spec
        sharding = self._sharding(P(of_pages, of_layers, *of_page))
        return jax.ShapeDtypeStruct(shape, pool.dtype, sharding=sharding)

    # -- programs ---------------------------------------------------------------------------

    def compile(self) -> None:
        def gather(pools: Arrays, ids: jax.Array) -> Arrays:
            taken = [jnp.take(pool, ids[0], axis=1, mode="clip") for pool in pools]
            return tuple(jnp.moveaxis(own, 1, 0) for own in taken)

        def scatter(pools: Arrays, ids: jax.Array, values: Arrays) -> Arrays:
            return tuple(
                pool.at[:, ids[0]].set(jnp.moveaxis(own, 0, 1), mode="drop")
                for pool, own in zip(pools, values, strict=True)
            )

        ids = jax.ShapeDtypeStruct(
            (self._dp_size, self.piece_pages), jnp.int32, sharding=self._sharding(P("data"))
        )
        specs = tuple(shape.sharding.spec for shape in self._shapes)
        of_pieces = tuple(shape.sharding.spec for shape in self._values)
        self._gather = self._compiled(gather, (specs, P("data")), of_pieces, (self._shapes, ids))
        self._scatter = self._compiled(
            scatter,
            (specs, P("data"), of_pieces),
            specs,
            (self._shapes, ids, self._values),
            donate_argnums=0,
        )

    def _compiled(
        self, program: Callable[..., Any], in_specs: Any, out_specs: Any, args: Any, **options: Any
    ) -> Any:
        mapped = jax.shard_map(
            program, mesh=self._mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )
        return jax.jit(mapped, **options).lower(*args).compile()

    def _sharding(self, spec: P) -> NamedSharding:
        return NamedSharding(self._mesh, spec)

    def _ids(self, dp_rank: int, pages: Int32Array) -> Int32Array:
        """Return a rank's pages, padded with ids past the pool's end; other ranks: only padding."""
        ids = np.full((self._dp_size, self.piece_pages), self._num_pages, np.int32)
        ids[dp_rank, : len(pages)] = pages
        return ids

    def gather(self, pools: Arrays, dp_rank: int, pages: Int32Array) -> Arrays:
        """Return the values of a rank's pages and start copying them to this host."""
        if self._gather is None:
            self.compile()
        values: Arrays = self._gather(pools, self._ids(dp_rank, pages))
        for array in values:
            for shard in array.addressable_shards:
                if self._ranks[shard.device] == dp_rank:
                    shard.data.copy_to_host_async()
        return values

    def scatter(self, pools: Arrays, dp_rank: int, pages: Int32Array, values: Arrays) -> Arrays:
        """Return the pools with `values` in a rank's pages. `pools` are donated."""
        if self._scatter is None:
            self.compile()
        written: Arrays = self._scatter(pools, self._ids(dp_rank, pages), values)
        return written

    # -- blocks, on the thread of their transfer ----------------------------------------------

    def _of_chips(self, index: int, dp_rank: int, block: int) -> list[Bytes]:
        """Return the parts of a block of array `index` on this host's devices, in mesh order (not
        by device id), as [layers, parts, shared, tokens, size]: see `ChipView`."""
        view, layers = self._views[index], self._shapes[index].shape[0]
        own = [device for device, rank in self._ranks.items() if rank == dp_rank]
        stored = [
            self._stored[index, device][block]
            for device in sorted(own, key=self._places.__getitem__)
        ]
        shape = layers, view.num_parts, -1, view.num_tokens, view.size
        return [part.reshape(shape) for part in stored]

    def values(self, dp_rank: int, block: int) -> list[bytes]:
        """Return the contents of a rank's block as the values that a store keeps, which depend
        neither on the number of chips nor on the size of the page."""
        joined = [
            np.concatenate(self._of_chips(index, dp_rank, block), axis=2)[:, :, :: view.num_copies]
            for index, view in enumerate(self._views)
        ]
        cut = [np.split(array, self.num_values, axis=3) for array in joined]
        return [b"".join(part.tobytes() for part in parts) for parts in zip(*cut, strict=True)]

    def set_values(self, dp_rank: int, block: int, values: Sequence[bytes]) -> bool:
        """Write the contents of a rank's block; return False if a size does not match."""
        chips = [self._of_chips(index, dp_rank, block) for index in range(len(self._views))]
        num_bytes = sum(
            sum(part.nbytes for part in parts) // view.num_copies
            for parts, view in zip(chips, self._views, strict=True)
        )
        if any(len(value) * self.num_values != num_bytes for value in values):
            return False
        start = 0
        for parts, view in zip(chips, self._views, strict=True):
            layers, num_parts, shared, tokens, size = parts[0].shape
            num_shared = len(parts) * shared // view.num_copies
            shape = layers, num_parts, num_shared, tokens // self.num_values, size
            dtype, length = parts[0].dtype, math.prod(shape)
            joined = np.concatenate(
                [np.frombuffer(value, dtype, length, start).reshape(shape) for value in values],
                axis=3,
            )
            start += length * dtype.itemsize
            of_chips = np.split(joined.repeat(view.num_copies, axis=2), len(parts), axis=2)
            for part, own in zip(parts, of_chips, strict=True):
                part[...] = own
        return True

    def write(self, dp_rank: int, blocks: Int32Array, values: Arrays) -> None:
        """Write the first values of a piece to a rank's blocks."""
        for index, array in enumerate(values):
            for shard in array.addressable_shards:
                if self._ranks[shard.device] == dp_rank:
                    stored = self._stored[index, shard.device]
                    own = np.asarray(shard.data).view(stored.dtype)
                    stored[blocks] = own[: len(blocks)]

    def read(self, dp_rank: int, blocks: Int32Array) -> Arrays:
        """Upload a piece that begins with a rank's blocks."""
        return tuple(
            self._read(index, piece, dp_rank, blocks) for index, piece in enumerate(self._values)
        )

    def _read(
        self, index: int, piece: jax.ShapeDtypeStruct, dp_rank: int, blocks: Int32Array
    ) -> jax.Array:
        sharding: Any = piece.sharding
        parts = []
        for device in sharding.addressable_devices_indices_map(piece.shape):
            stored = self._stored[index, device]
            if self._ranks[device] == dp_rank:
                own = np.empty(sharding.shard_shape(piece.shape), stored.dtype)
                # Only in this mode, numpy copies the values once.
                np.take(stored, blocks, axis=0, out=own[: len(blocks)], mode="clip")
                parts.append(jax.device_put(own.view(piece.dtype), device))
            else:
                parts.append(self._padded(index, piece, device))
        return jax.make_array_from_single_device_arrays(piece.shape, sharding, parts)

    def _padded(self, index: int, piece: jax.ShapeDtypeStruct, device: jax.Device) -> jax.Array:
        if (index, device) not in self._padding:
            sharding: Any = piece.sharding
            zeros = np.zeros(sharding.shard_shape(piece.shape), piece.dtype)
            self._padding[index, device] = jax.device_put(zeros, device)
        return self._padding[index, device]
