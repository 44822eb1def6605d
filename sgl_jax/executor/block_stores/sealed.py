"""Values with a checksum over their key and contents, as every store keeps them."""

import hashlib

_MAGIC = b"sgl_jax KV 1\n"
_DIGEST_BYTES = 16
HEAD_BYTES = len(_MAGIC) + _DIGEST_BYTES


def head(key: str, value: bytes) -> bytes:
    """Return the bytes before a value: a mark of the format, and the checksum."""
    digest = hashlib.blake2b(key.encode(), digest_size=_DIGEST_BYTES)
    digest.update(value)
    return _MAGIC + digest.digest()


def unsealed(key: str, data: bytes) -> bytes | None:
    """Return the value behind its head; None if it was cut or changed, or is another key's."""
    value = data[HEAD_BYTES:]
    return value if data[:HEAD_BYTES] == head(key, value) else None
