"""Open the block store named by a server's settings, and compute the fingerprint in its keys."""

import hashlib
import json
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from sgl_jax.core.server_args import ServerArgs
from sgl_jax.executor.block_stores.block_store import BlockStore
from sgl_jax.executor.block_stores.folder_store import FolderStore
from sgl_jax.executor.block_stores.mooncake_store import MooncakeStore
from sgl_jax.layers.tensor_keys import Places


def open_block_store(args: ServerArgs) -> BlockStore:
    """Open the store of `args.hicache_storage_backend`, which is not "none". Raises ValueError or
    RuntimeError, naming the setting, if the store cannot be used."""
    if args.hicache_storage_backend == "file":
        folder = args.storage_folder
        assert folder is not None, "checked by `ServerArgs`"
        try:
            return FolderStore(folder, int(args.hicache_storage_size * 1e9))
        except OSError as error:
            raise RuntimeError(f"the store in {folder} cannot be used: {error}") from error
    return MooncakeStore(json.loads(args.hicache_storage_backend_extra_config or "{}"))


# Odd multipliers of two sums; the first is derived from the golden ratio.
_MULTIPLIERS = (0x9E3779B1, 0x85EBCA77)


def weights_fingerprint(weights: Sequence[tuple[jax.Array, Places | None]]) -> str:
    """Hash the bits of all weights, in order, to 32 hexadecimal digits.

    The devices compute two sums of each array's elements modulo 2**32, weighted by position. The
    result is a BLAKE2b hash of shapes, dtypes and sums. If an array has places, each element counts
    at its place, and padding and copies do not count. So the hash is the same for any number of
    chips.
    """
    sums = _all_sums(list(weights))
    digest = hashlib.blake2b(digest_size=16)
    for (array, places), own in zip(weights, sums, strict=True):
        shape = array.shape if places is None else tuple(int((axis >= 0).sum()) for axis in places)
        digest.update(f"{array.dtype} {shape}".encode())
        digest.update(np.asarray(own).tobytes())
    return digest.hexdigest()


@jax.jit
def _all_sums(weights: list[tuple[jax.Array, Places | None]]) -> list[jax.Array]:
    return [_sums(*each) for each in weights]


def _sums(array: jax.Array, places: Places | None) -> jax.Array:
    bits = array.dtype.itemsize * 8
    if jnp.issubdtype(array.dtype, jnp.floating) and bits >= 8:
        array = jax.lax.bitcast_convert_type(array, f"uint{bits}")
    values = array.astype(jnp.uint32)
    place = jnp.zeros(array.shape, jnp.uint32)
    for axis, length in enumerate(array.shape):
        own, size = jax.lax.broadcasted_iota(jnp.int32, array.shape, axis), jnp.uint32(length)
        if places is not None:
            own = jnp.expand_dims(places[axis], [i for i in range(array.ndim) if i != axis])
            size = jnp.sum(places[axis] >= 0, dtype=jnp.uint32)
            values = jnp.where(own >= 0, values, 0)
        place = place * size + own.astype(jnp.uint32)
    # Mixed so that all positions have different, odd weights.
    sums = []
    for multiplier in _MULTIPLIERS:
        mixed = place * jnp.uint32(multiplier)
        mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(0xC2B2AE3D)
        sums.append(jnp.sum(values * (mixed | 1), dtype=jnp.uint32))
    return jnp.stack(sums)
