"""A block store in a folder: one file per block, evicted least recently used first.

A file is written to a temporary path and then renamed, so it is complete or absent. If a checksum
over key and value detects a truncated, changed or foreign file, the file is removed.

Engines that use one folder share its limit. The file `size` contains the total bytes of all blocks
and is locked while they change. A block is counted before it is written: if an engine was killed,
the count may be too high, but never too low. It is measured at each start, and when all files of
the last measurement are gone or were used again.
"""

import contextlib
import fcntl
import logging
import os
import re
import secrets
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from sgl_jax.core.private_files import make_private_folder, open_private
from sgl_jax.executor.block_stores.block_store import HEAD_BYTES, StoreBusyError, head, unsealed

logger = logging.getLogger(__name__)

# A suspended engine may hold the lock: puts fail then.
_LOCK_LIMIT_S = 2.0
_POLL_S = 0.002
# Bytes of values written under one lock: a large page is several small values.
_LOCKED_BYTES = 1 << 25
_KEY = re.compile(r"[0-9a-f]+/[0-9a-f]+")


class _File(NamedTuple):
    """A block's file at the last measurement."""

    mtime_ns: int
    path: Path
    size: int


class FolderStore:
    """The blocks in `folder`, at most `max_bytes` in total; see `BlockStore`.

    Several engines may use one folder. If their limits differ, the lowest applies.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """Open the folder. Raises OSError if it cannot be created, read or written."""
        self._folder = folder
        self._max_bytes = max_bytes
        self._oldest: deque[_File] = deque()  # least recently used first; read under the lock
        self._unfinished = folder / "unfinished"
        make_private_folder(self._unfinished)
        with self._count() as count:
            if count is not None:
                count.write(self._make_room(self._measure(), 0))

    def exists(self, keys: Sequence[str]) -> list[bool]:
        return [self._path(key).exists() for key in keys]

    def get(self, keys: Sequence[str]) -> list[bytes | None]:
        return [self._get(key) for key in keys]

    def put(self, keys: Sequence[str], values: Sequence[bytes]) -> None:
        """Write each value that is not larger than the store. Raises `StoreBusyError` if another
        engine holds the lock."""
        for number, part in enumerate(self._parts(dict(zip(keys, values, strict=True)))):
            if number:
                time.sleep(2 * _POLL_S)  # an engine that waits for the lock takes it
            with self._count() as count:
                if count is None:
                    raise StoreBusyError(f"{self._folder}: another engine holds the lock")
                self._put(part, count)

    def _parts(self, values: dict[str, bytes]) -> Iterator[dict[str, bytes]]:
        """Divide the values that are not larger than the store into parts to write under one
        lock."""
        most = min(_LOCKED_BYTES, self._max_bytes)
        part: dict[str, bytes] = {}
        size = 0
        for key, value in values.items():
            num_bytes = HEAD_BYTES + len(value)
            if num_bytes > self._max_bytes:
                continue
            if part and size + num_bytes > most:
                yield part
                part, size = {}, 0
            part[key] = value
            size += num_bytes
        if part:
            yield part

    def _put(self, part: dict[str, bytes], count: "_Count") -> None:
        paths = {key: self._path(key) for key in part}
        num_bytes = count.read()
        if num_bytes is None:
            num_bytes = self._measure()
        size = sum(HEAD_BYTES + len(value) for value in part.values())
        num_bytes = self._make_room(num_bytes - sum(map(_remove, paths.values())), size)
        count.write(num_bytes + size)
        for key, value in part.items():
            beside = self._unfinished / secrets.token_hex(8)
            try:
                make_private_folder(paths[key].parent)
                with open(beside, "xb", opener=open_private) as file:
                    file.write(head(key, value))
                    file.write(value)
                beside.replace(paths[key])
            except OSError:  # such as a full disk
                _remove(beside)
                count.write(num_bytes)
                raise
            num_bytes += HEAD_BYTES + len(value)

    def close(self) -> None:
        """Do nothing: no file is open between calls."""

    def _path(self, key: str) -> Path:
        fingerprint, name = key.split("/")
        return self._folder / fingerprint / name[:2] / name

    def _get(self, key: str) -> bytes | None:
        path = self._path(key)
        try:
            value = unsealed(key, path.read_bytes())
            if value is not None:
                os.utime(path)
        except FileNotFoundError:
            return None
        if value is None:
            logger.warning("%s is no whole block of KV: removed", path)
            with self._count() as count:
                size = _remove(path)
                num_bytes = count.read() if count is not None else None
                if count is not None and num_bytes is not None:
                    count.write(num_bytes - size)
        return value

    # -- room, under the lock ---------------------------------------------------------------

    @contextlib.contextmanager
    def _count(self) -> Iterator["_Count | None"]:
        """Lock the blocks and yield their count; yield None if another holder keeps the lock."""
        file = open_private(self._folder / "size", os.O_RDWR | os.O_CREAT)
        try:
            yield _Count(file) if _lock(file) else None
        finally:
            os.close(file)

    def _measure(self) -> int:
        """Find all blocks and return their total bytes. Removes unfinished files: their writers
        have been killed."""
        for path in self._unfinished.iterdir():
            _remove(path)
        found = []
        for path in self._folder.glob("*/*/*"):
            key = f"{path.parts[-3]}/{path.name}"
            if _KEY.fullmatch(key) and path.parts[-2] == path.name[:2] and path.is_file():
                with contextlib.suppress(FileNotFoundError):  # a reader found it damaged
                    stat = path.stat()
                    found.append(_File(stat.st_mtime_ns, path, stat.st_size))
        self._oldest = deque(sorted(found))
        return sum(file.size for file in found)

    def _make_room(self, num_bytes: int, size: int) -> int:
        """Remove blocks until one of `size` bytes fits; return the bytes of the rest. Initially,
        the blocks take `num_bytes`."""
        is_measured = False
        while num_bytes + size > self._max_bytes:
            if self._oldest:
                file = self._oldest.popleft()
                # Another engine may have removed it. If it was used since, it is not the oldest.
                if is_measured or _mtime_ns(file.path) == file.mtime_ns:
                    num_bytes -= _remove(file.path)
            elif is_measured:
                break
            else:
                num_bytes, is_measured = self._measure(), True
        return num_bytes


class _Count:
    """The total bytes of a folder's blocks, in a locked file."""

    def __init__(self, file: int) -> None:
        self._file = file

    def read(self) -> int | None:
        """Return the count; None if the file is new or damaged."""
        data = os.pread(self._file, 32, 0)
        return int(data) if re.fullmatch(rb"[0-9]{20}", data) else None

    def write(self, num_bytes: int) -> None:
        os.pwrite(self._file, b"%020d" % max(num_bytes, 0), 0)


def _lock(file: int) -> bool:
    end_s = time.monotonic() + _LOCK_LIMIT_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end_s:
                return False
            time.sleep(_POLL_S)
        else:
            return True


def _mtime_ns(path: Path) -> int | None:
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_mtime_ns
    return None


def _remove(path: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        size = path.stat().st_size
        path.unlink()
        return size
    return 0
