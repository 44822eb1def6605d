"""The protocol of a store of blocks, and the error of one that is busy."""

from collections.abc import Sequence
from typing import Protocol


class StoreBusyError(OSError):
    """A put came too early: the store serves searches and reads, but writes nothing just now."""


class BlockStore(Protocol):
    """Values of bytes by key, which may be lost at any time, but are never wrong.

    A key is the text of a fingerprint (of the model, its weights and the layout of blocks), a slash
    and a hexadecimal number. Equal keys have equal values. All methods may raise
    OSError. Threads search, read and put at once.
    """

    def exists(self, keys: Sequence[str]) -> list[bool]:
        """Return whether `get` would probably find each key."""
        ...

    def get(self, keys: Sequence[str]) -> list[bytes | None]:
        """Return the whole value of each key, None without one."""
        ...

    def put(self, keys: Sequence[str], values: Sequence[bytes]) -> None:
        """Keep each value, if there is room or others give way. After an error, values may be
        missing. Raises `StoreBusyError` if they can be put again soon."""
        ...

    def close(self) -> None:
        """Cannot be used afterwards."""
        ...
