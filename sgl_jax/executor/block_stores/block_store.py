"""The protocol of a block store, and the error of a busy store."""

import hashlib
from collections.abc import Sequence
from typing import Protocol


class StoreBusyError(OSError):
    """A put came too early: the store serves searches and reads, but temporarily no writes."""


class BlockStore(Protocol):
    """Byte values by key. Values may be lost at any time, but are never wrong.

    A key is a fingerprint (of the model, its weights and the layout of blocks), a slash and a
    hexadecimal number. Equal keys have equal values. All methods may raise OSError. Threads search,
    read and put concurrently.
    """

    def exists(self, keys: Sequence[str]) -> list[bool]:
        """Return for each key whether `get` would probably find it."""
        ...

    def get(self, keys: Sequence[str]) -> list[bytes | None]: ...

    def put(self, keys: Sequence[str], values: Sequence[bytes]) -> None:
        """Store each value, if there is room or older values can be evicted. After an error, values
        may be missing. Raises `StoreBusyError` if the put can be retried soon."""
        ...

    def close(self) -> None:
        """Release all resources. The store cannot be used afterwards."""
        ...


_MAGIC = b"sgl_jax KV 1\n"
_DIGEST_BYTES = 16
HEAD_BYTES = len(_MAGIC) + _DIGEST_BYTES


def head(key: str, value: bytes) -> bytes:
    """Return the header of a value: a format mark and the checksum."""
    digest = hashlib.blake2b(key.encode(), digest_size=_DIGEST_BYTES)
    digest.update(value)
    return _MAGIC + digest.digest()


def unsealed(key: str, data: bytes) -> bytes | None:
    """Return the value after its header; None if it is truncated, changed, or of another key."""
    value = data[HEAD_BYTES:]
    return value if data[:HEAD_BYTES] == head(key, value) else None
