"""Open the block store named by a server's settings."""

import json

from sgl_jax.core.server_args import ServerArgs
from sgl_jax.executor.block_stores.block_store import BlockStore
from sgl_jax.executor.block_stores.folder_store import FolderStore
from sgl_jax.executor.block_stores.mooncake_store import MooncakeStore


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
