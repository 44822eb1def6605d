"""Values with a checksum over key and contents, the format of every block store."""

import hashlib

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
