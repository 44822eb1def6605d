"""Keys of the contents of pages: equal for equal prefixes of a namespace, in all engines."""

import hashlib
from functools import lru_cache, partial

import numpy as np

from sgl_jax.core.step_plan import Int32Array
from sgl_jax.core.transfers import Keys

_HASH_BYTES = 16
KEY_BYTES = _HASH_BYTES + 1  # the last byte is the layer group's number
# Hashes are cached by pieces of prefixes: this many tokens each, and this many recent pieces.
_PIECE_TOKENS = 1024
_NUM_PIECES = 2048


class ContentKeys:
    """Computes keys for pages of `page_size` tokens and `num_groups` layer groups.

    A key is a BLAKE2b hash, chained from the namespace over the prefix's pages, and the group
    number. The namespace contains a tenant's salt, so no key can be computed without it.
    """

    def __init__(self, page_size: int, num_groups: int) -> None:
        self._page_size = page_size
        self._num_groups = num_groups
        self._piece_bytes = 4 * page_size * max(_PIECE_TOKENS // page_size, 1)
        self._hash_pages = partial(_hash_pages, 4 * page_size)
        self._hash_piece = lru_cache(_NUM_PIECES)(self._hash_pages)

    def of(self, tokens: Int32Array, namespace: str) -> Keys:
        """Return a key per group and whole page of `tokens`: uint8[groups, pages, KEY_BYTES]."""
        num_pages = len(tokens) // self._page_size
        data = tokens[: num_pages * self._page_size].astype("<i4").tobytes()
        hashes = [hashlib.blake2b(namespace.encode(), digest_size=_HASH_BYTES).digest()]
        for first in range(0, len(data), self._piece_bytes):
            piece = data[first : first + self._piece_bytes]
            is_whole = len(piece) == self._piece_bytes
            hash_pages = self._hash_piece if is_whole else self._hash_pages
            hashes.append(hash_pages(hashes[-1][-_HASH_BYTES:], piece))
        keys = np.zeros((self._num_groups, num_pages, KEY_BYTES), np.uint8)
        chained = np.frombuffer(b"".join(hashes[1:]), np.uint8)
        keys[:, :, :_HASH_BYTES] = chained.reshape(num_pages, _HASH_BYTES)
        keys[:, :, _HASH_BYTES] = np.arange(self._num_groups)[:, None]
        return keys


def _hash_pages(page_bytes: int, chained: bytes, pages: bytes) -> bytes:
    hashes = []
    for first in range(0, len(pages), page_bytes):
        page = pages[first : first + page_bytes]
        chained = hashlib.blake2b(page, key=chained, digest_size=_HASH_BYTES).digest()
        hashes.append(chained)
    return b"".join(hashes)
