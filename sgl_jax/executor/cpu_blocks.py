"""The contents of the host blocks, and the programs and the thread that move them.

A copy is gathered from the device pools, in step order, and a thread then writes it to its blocks.
The same thread reads the blocks of a fetch and uploads them to staging arrays on the devices. When
the upload is complete and the scheduler places the fetch, a program writes the arrays to their
pages. So no step waits for the link. The thread runs one transfer at a time, so all hosts of an
engine read and write blocks in the same order.

Each host stores the parts of pages that its devices hold.
"""

import logging
import math
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from numpy.typing import NDArray

from sgl_jax.core.engine_sizes import EngineSizes
from sgl_jax.core.step_plan import Int32Array, PageTransfer
from sgl_jax.core.transfers import StoreTransfer, TransferEnd, Transfers
from sgl_jax.executor.block_stores.block_store import BlockStore
from sgl_jax.executor.step import StepState
from sgl_jax.executor.store_transfers import StoreTransfers
from sgl_jax.mem_cache.device_pool import LayerStates

logger = logging.getLogger(__name__)

# Limits of one program run per rank.
_PIECE_BYTES = 64 << 20
_MAX_PIECE_PAGES = 64
# Copies left by a failed step must end before its pools are replaced.
_DEVICE_LIMIT_S = 60.0
_NUM_TIMED = 3  # timed fetches; the first may take longer

# The arrays of a pool, each [layers, dp * pages, ...].
Arrays: TypeAlias = tuple[jax.Array, ...]
Bytes: TypeAlias = NDArray[Any]  # unsigned integers of the element size


class _Piece(NamedTuple):
    """Values of one pool moved by one program run."""

    pool: int
    pages: Int32Array  # [n]
    values: Arrays  # [dp * piece pages, layers, ...]: each page is contiguous, as in its block


class CpuBlocks:
    """The blocks on this host for the pools of a mesh.

    Args:
        state: shapes of the tables and pools, see `EngineConfig.state_shapes`.
        sizes: the engine's sizes, with `host_blocks`.
        mesh: ('data', 'tensor').
    """

    def __init__(self, state: Any, sizes: EngineSizes, mesh: Mesh) -> None:
        self._sizes = sizes
        self._pools = [
            _Pool(shapes, num_blocks, mesh)
            for shapes, num_blocks in zip(_pools_of(state), sizes.host_blocks, strict=True)
        ]
        self._thread = ThreadPoolExecutor(1, "cpu blocks")
        self._fetches: dict[tuple[int, int], Future[list[_Piece]]] = {}
        self._jobs: list[Future[Any]] = []
        self._ended: queue.SimpleQueue[TransferEnd] = queue.SimpleQueue()
        self._behind: StoreTransfers | None = None

    def open_store(
        self, store: BlockStore, fingerprint: str, awaited_limit_s: float | None
    ) -> None:
        """Attach a block store as the tier below host memory; arguments as in `StoreTransfers`."""
        self._behind = StoreTransfers(
            store, self._pools, fingerprint, self._ended.put, awaited_limit_s
        )

    @property
    def has_store(self) -> bool:
        return self._behind is not None

    @property
    def fingerprint(self) -> str:
        assert self._behind is not None, "there is a store"
        return self._behind.fingerprint

    def set_fingerprint(self, fingerprint: str) -> None:
        assert self._behind is not None
        self._behind.fingerprint = fingerprint

    def compile(self) -> None:
        for pool in self._pools:
            pool.compile()

    def measure(self, state: StepState) -> tuple[StepState, float]:
        """Time fetches of a prefix of about one piece to the first pages of the first rank.

        No other transfer may be in flight. Returns the new state (`state` is donated) and the
        tokens per second, 0 if no layer attends to all tokens.
        """
        num_pages, listed = self._timed_pages()
        if num_pages == 0:
            return state, 0.0
        move = PageTransfer(0, 0, listed, listed)
        seconds = []
        self.copy(state, [move])
        for _ in range(_NUM_TIMED):
            self.reset()
            state = self.transfer(state, Transfers(fetches=(move,)))
            self.wait()
            (end,) = self.ended()
            seconds.append(end.seconds)
            state = self.transfer(state, Transfers(placed=(move,)))
        return state, num_pages * self._sizes.page_size / min(seconds)

    def measure_store(self) -> float:
        """Put the same prefix into the store and load it; return the tokens per second. Returns 0
        without a measurement. The store may serve this prefix from a faster cache."""
        num_pages, listed = self._timed_pages()
        if self._behind is None or num_pages == 0:
            return 0.0
        pools = [np.full_like(blocks, pool) for pool, blocks in enumerate(listed)]
        keys = [np.stack(each, axis=1).view(np.uint8) for each in zip(pools, listed, strict=True)]
        move = StoreTransfer(0, 0, tuple(keys), listed)
        self._behind.begin([], [], [move])
        self._behind.begin([], [move], [])
        self._behind.wait()
        _, end = self.ended()
        has_all = end.succeeded and all(found.all() for found in end.found)
        return num_pages * self._sizes.page_size / end.seconds if has_all else 0.0

    def _timed_pages(self) -> tuple[int, tuple[Int32Array, ...]]:
        """Return the number of pages of a prefix of about one piece, and its ids in each pool."""
        full = [group.pool for group in self._sizes.groups if group.sliding_window is None]
        counts = [full.count(pool) for pool in range(len(self._pools))]
        pieces = [pool.piece_pages for pool in self._pools]
        limits = map(min, pieces, self._sizes.host_blocks, self._sizes.pool_pages)
        shares = [most // count for most, count in zip(limits, counts, strict=True) if count]
        num_pages = min(shares, default=0)
        return num_pages, tuple(np.arange(count * num_pages, dtype=np.int32) for count in counts)

    def transfer(self, state: StepState, transfers: Transfers) -> StepState:
        """Begin transfers; return the new state. `state` is donated."""
        for move in transfers.placed:
            state = self._place(state, move)
        for move in transfers.dropped:
            del self._fetches[move.dp_rank, move.number]
        self.copy(state, transfers.copies)
        for move in transfers.fetches:
            self._fetches[move.dp_rank, move.number] = self._start(move, self._fetch)
        if self._behind is not None:
            self._behind.begin(transfers.searches, transfers.loads, transfers.puts)
        return state

    def copy(self, state: StepState, moves: Sequence[PageTransfer]) -> None:
        """Begin copying the values of pages, ordered after all launched steps."""
        arrays = _pools_of(state)
        for move in moves:
            pieces = [
                (
                    _Piece(
                        number,
                        pages,
                        self._pools[number].gather(arrays[number], move.dp_rank, pages),
                    ),
                    blocks,
                )
                for number, pages, blocks in self._cut(move)
            ]
            self._start(move, partial(self._save, pieces))

    def ended(self) -> list[TransferEnd]:
        """Return the transfers that have ended since the last call."""
        self._jobs = [job for job in self._jobs if not job.done()]
        found = []
        while not self._ended.empty():
            found.append(self._ended.get())
        return found

    def look_at_store(self) -> list[bool]:
        """Return the store's results since the last call, see `StoreTransfers.look`."""
        return self._behind.look(time.monotonic()) if self._behind is not None else []

    def give_up_store(self) -> None:
        if self._behind is not None:
            self._behind.give_up()

    def reset(self) -> None:
        """Wait for device transfers, fail the store's transfers, and drop all records."""
        self.wait()
        self.give_up_store()
        self._fetches.clear()
        self.ended()

    def wait(self) -> None:
        """Wait for all device transfers. Raises RuntimeError if they do not end in time."""
        _, running = wait(self._jobs, _DEVICE_LIMIT_S)
        if running:
            raise RuntimeError(f"transfers of a device did not end within {_DEVICE_LIMIT_S:.0f} s")

    def close(self) -> None:
        """Wait for all device transfers, and a limited time for the store's. Final."""
        self._thread.shutdown()
        if self._behind is not None:
            self._behind.close()

    def _start(self, move: PageTransfer, job: Callable[[PageTransfer], Any]) -> Future[Any]:
        def run() -> Any:
            begin_s, succeeded = time.monotonic(), False
            try:
                result = job(move)
                succeeded = True
                return result
            except Exception:  # such as too little memory on host or device
                logger.exception("transfer %d of rank %d failed", move.number, move.dp_rank)
                raise
            finally:
                seconds = time.monotonic() - begin_s
                self._ended.put(TransferEnd(move.dp_rank, move.number, succeeded, seconds))

        future = self._thread.submit(run)
        self._jobs.append(future)
        return future

    def _cut(self, move: PageTransfer) -> Iterator[tuple[int, Int32Array, Int32Array]]:
        for number, pool in enumerate(self._pools):
            pages, blocks = move.pages[number], move.blocks[number]
            for first in range(0, len(pages), pool.piece_pages):
                part = slice(first, first + pool.piece_pages)
                yield number, pages[part], blocks[part]

    def _save(self, pieces: list[tuple[_Piece, Int32Array]], move: PageTransfer) -> None:
        for piece, blocks in pieces:
            self._pools[piece.pool].write(move.dp_rank, blocks, piece.values)

    def _fetch(self, move: PageTransfer) -> list[_Piece]:
        pieces = [
            _Piece(number, pages, self._pools[number].read(move.dp_rank, blocks))
            for number, pages, blocks in self._cut(move)
        ]
        jax.block_until_ready([piece.values for piece in pieces])
        return pieces

    def _place(self, state: StepState, move: PageTransfer) -> StepState:
        pools = list(_pools_of(state))
        for piece in self._fetches.pop((move.dp_rank, move.number)).result():
            pool = self._pools[piece.pool]
            pools[piece.pool] = pool.scatter(
                pools[piece.pool], move.dp_rank, piece.pages, piece.values
            )
        return _with_pools(state, pools)


class _Pool:
    """The blocks of one pool: [blocks, layers, ...] for each local device and each array."""

    def __init__(self, shapes: Sequence[Any], num_blocks: int, mesh: Mesh) -> None:
        self._shapes = tuple(shapes)
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
        """Compile the programs that read and write the device pools."""

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

    def _parts(self, dp_rank: int, block: int) -> list[Bytes]:
        """Return a block's arrays on this host's devices, in mesh order (not by device id)."""
        own = [device for device, rank in self._ranks.items() if rank == dp_rank]
        return [
            self._stored[index, device][block]
            for device in sorted(own, key=self._places.__getitem__)
            for index in range(len(self._shapes))
        ]

    def value(self, dp_rank: int, block: int) -> bytes:
        return b"".join(part.tobytes() for part in self._parts(dp_rank, block))

    def set_value(self, dp_rank: int, block: int, value: bytes) -> bool:
        """Write the contents of a rank's block; return False if the size does not match."""
        parts = self._parts(dp_rank, block)
        if len(value) != sum(part.nbytes for part in parts):
            return False
        start = 0
        for part in parts:
            part[...] = np.frombuffer(value, part.dtype, part.size, start).reshape(part.shape)
            start += part.nbytes
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


def _pools_of(state: Any) -> list[Any]:
    """Return each pool's arrays or shapes: pools of pages, then of recurrent states."""
    pools: list[Any] = [(pool,) for pool in state.kv_pools]
    if state.states is not None:
        pools.append(tuple(state.states.layers))
    return pools


def _with_pools(state: StepState, pools: Sequence[Arrays]) -> StepState:
    num_paged = len(state.kv_pools)
    state = state._replace(kv_pools=tuple(pool[0] for pool in pools[:num_paged]))
    if state.states is None:
        return state
    return state._replace(states=state.states._replace(layers=LayerStates(*pools[num_paged])))
