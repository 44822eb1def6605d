"""A block store in Mooncake's distributed store, accessed through its client.

Needs the package `mooncake-transfer-engine-non-cuda` (the extra `mooncake`) and a running master.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from sgl_jax.executor.block_stores.block_store import head, unsealed

logger = logging.getLogger(__name__)

_DEFAULTS: dict[str, str | int] = {
    "local_hostname": "127.0.0.1",
    "metadata_server": "http://127.0.0.1:8080/metadata",
    "global_segment_size": 1 << 30,
    "local_buffer_size": 256 << 20,
    "protocol": "tcp",
    "device_name": "",
    "master_server_address": "127.0.0.1:50051",
}


class MooncakeStore:
    """The blocks in a Mooncake cluster, which replicates and evicts them; see `BlockStore`.

    `settings` are the client's: `local_hostname`, `metadata_server`, `global_segment_size` and
    `local_buffer_size` in bytes, `protocol`, `device_name`, `master_server_address`.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        unknown = sorted(set(settings) - set(_DEFAULTS))
        if unknown:
            raise ValueError(
                f"--hicache-storage-backend-extra-config: unknown {', '.join(unknown)}; known are "
                f"{', '.join(_DEFAULTS)}"
            )
        try:
            from mooncake.store import MooncakeDistributedStore
        except ImportError as error:
            raise RuntimeError(
                f"--hicache-storage-backend mooncake needs the extra 'mooncake': {error}"
            ) from error
        self._store = MooncakeDistributedStore()
        values = [settings.get(name, default) for name, default in _DEFAULTS.items()]
        code = self._store.setup(*values)
        if code != 0:
            raise RuntimeError(f"Mooncake's store could not be set up: error {code}")

    def exists(self, keys: Sequence[str]) -> list[bool]:
        return [found == 1 for found in self._store.batch_is_exist(list(keys))]

    def get(self, keys: Sequence[str]) -> list[bytes | None]:
        found = self._store.get_batch(list(keys))
        return [self._checked(key, bytes(data)) for key, data in zip(keys, found, strict=True)]

    def _checked(self, key: str, data: bytes) -> bytes | None:
        value = unsealed(key, data)
        if data and value is None:
            # While it exists, the cluster accepts no other value for this key.
            code = self._store.remove(key)
            logger.warning("%s is no whole block of KV: removed with code %s", key, code)
        return value

    def put(self, keys: Sequence[str], values: Sequence[bytes]) -> None:
        """Put the values. Raises OSError if the cluster does not accept them."""
        sealed = [head(key, value) + value for key, value in zip(keys, values, strict=True)]
        code = self._store.put_batch(list(keys), sealed)
        if code != 0:
            raise OSError(f"Mooncake's store did not take {len(keys)} values: error {code}")

    def close(self) -> None:
        self._store.close()
