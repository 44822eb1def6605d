"""A store of blocks in a folder: a file for each, with a checksum, least recently used given up.

A file is written beside its place and then moved there, so it is whole or absent. A cut, changed or
foreign file is found by its checksum, which covers the key: it is removed, and the block missing.
"""

import contextlib
import hashlib
import logging
import os
import re
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from sgl_jax.core.private_files import make_private_folder, open_private

logger = logging.getLogger(__name__)

_MAGIC = b"sgl_jax KV 1\n"
_DIGEST_BYTES = 16
_HEAD_BYTES = len(_MAGIC) + _DIGEST_BYTES
_LONGEST_WRITE_S = 600.0  # of one block: an older unfinished file has no writer
_KEY = re.compile(r"[0-9a-f]+/[0-9a-f]+")


class FolderStore:
    """The blocks in `folder`, of `max_bytes` at most: see `BlockStore`.

    Several engines may use one folder. Each counts the files that it found at its start, and found
    or wrote since. A file that an engine could not finish is removed by a later start.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """Raises OSError if the folder cannot be made, read or written."""
        self._folder = folder
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._sizes: OrderedDict[str, int] = OrderedDict()  # by key, least recently used first
        self._lock = threading.RLock()  # of the sizes
        self._unfinished = folder / "unfinished"
        make_private_folder(self._unfinished)
        for path in self._unfinished.iterdir():
            with contextlib.suppress(FileNotFoundError):  # another engine has moved it
                if path.stat().st_mtime < time.time() - _LONGEST_WRITE_S:
                    path.unlink()
        found = []
        for path in folder.glob("*/*/*"):
            key = f"{path.parts[-3]}/{path.name}"
            if _KEY.fullmatch(key) and path.parts[-2] == path.name[:2] and path.is_file():
                with contextlib.suppress(FileNotFoundError):  # another engine has removed it
                    stat = path.stat()
                    found.append((stat.st_mtime, key, stat.st_size))
        for _, key, size in sorted(found):
            self._count(key, size)
        self._make_room(0)

    def exists(self, keys: Sequence[str]) -> list[bool]:
        """Return whether each key has a file."""
        return [self._path(key).exists() for key in keys]

    def get(self, keys: Sequence[str]) -> list[bytes | None]:
        """The value of each key, if its file is whole."""
        return [self._get(key) for key in keys]

    def put(self, keys: Sequence[str], values: Sequence[bytes]) -> None:
        """Write each value that is no larger than the store."""
        for key, value in zip(keys, values, strict=True):
            path, size = self._path(key), _HEAD_BYTES + len(value)
            if size > self._max_bytes:
                continue
            self._forget(key)
            self._make_room(size)
            make_private_folder(path.parent)
            beside = self._unfinished / secrets.token_hex(8)
            try:
                with open(beside, "xb", opener=open_private) as file:
                    file.write(_MAGIC + _digest(key, value))
                    file.write(value)
                beside.replace(path)
            except OSError:  # such as a full disk
                beside.unlink(missing_ok=True)
                raise
            self._count(key, size)

    def close(self) -> None:
        """Do nothing: no file is open between calls."""

    def _path(self, key: str) -> Path:
        fingerprint, name = key.split("/")
        return self._folder / fingerprint / name[:2] / name

    def _get(self, key: str) -> bytes | None:
        path = self._path(key)
        try:
            data = path.read_bytes()
            value = data[_HEAD_BYTES:]
            if data[:_HEAD_BYTES] != _MAGIC + _digest(key, value):
                logger.warning("%s is no whole block of KV: removed", path)
                self._remove(key)
                return None
            os.utime(path)
        except FileNotFoundError:
            self._forget(key)
            return None
        self._count(key, len(data))
        return value

    # -- room -------------------------------------------------------------------------------

    def _count(self, key: str, size: int) -> None:
        """The key's file was used now."""
        with self._lock:
            self._forget(key)
            self._sizes[key] = size
            self._num_bytes += size

    def _forget(self, key: str) -> None:
        with self._lock:
            self._num_bytes -= self._sizes.pop(key, 0)

    def _make_room(self, num_bytes: int) -> None:
        with self._lock:
            while self._num_bytes + num_bytes > self._max_bytes and self._sizes:
                self._remove(next(iter(self._sizes)))

    def _remove(self, key: str) -> None:
        self._path(key).unlink(missing_ok=True)
        self._forget(key)


def _digest(key: str, value: bytes) -> bytes:
    digest = hashlib.blake2b(key.encode(), digest_size=_DIGEST_BYTES)
    digest.update(value)
    return digest.digest()
