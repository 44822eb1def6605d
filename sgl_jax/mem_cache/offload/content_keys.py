"""Keys of the contents of pages: equal for equal prefixes of a namespace, in all engines."""

import hashlib
from functools import lru_cache, partial

import numpy as np

from sgl_jax.core.step_plan import Int32Array
from sgl_jax.core.transfers import HASH_BYTES, STORED_TOKENS, Keys

# Hashes are cached by pieces of prefixes: this many tokens each, and this many recent pieces. The
# size of a piece determines the hashes.
_PIECE_TOKENS = 1024
_NUM_PIECES = 2048


class ContentKeys:
    """Computes keys for pages of `page_size` tokens and `num_groups` layer groups.

    A key holds BLAKE2b hashes of the prefix up to the end of each of the page's values in a store,
    chained from the namespace over pieces of the prefix. So a position's hash does not depend on
    the page size. The namespace contains a tenant's salt, so no key can be computed without it.
    """

    def __init__(self, page_size: int, num_groups: int) -> None:
        self._page_size = page_size
        self._num_groups = num_groups
        self._value_tokens = min(page_size, STORED_TOKENS)
        self._hash_values = partial(_hash_values, 4 * self._value_tokens)
        self._hash_piece = lru_cache(_NUM_PIECES)(self._hash_values)

    def of(self, tokens: Int32Array, namespace: str) -> Keys:
        """Return a key per group and whole page of `tokens`: uint8[groups, pages, bytes]."""
        num_pages = len(tokens) // self._page_size
        data = tokens[: num_pages * self._page_size].astype("<i4").tobytes()
        hashes = [hashlib.blake2b(namespace.encode(), digest_size=HASH_BYTES).digest()]
        piece_bytes = 4 * _PIECE_TOKENS
        for first in range(0, len(data), piece_bytes):
            piece = data[first : first + piece_bytes]
            is_whole = len(piece) == piece_bytes
            hash_values = self._hash_piece if is_whole else self._hash_values
            hashes.append(hash_values(hashes[-1][-HASH_BYTES:], piece))
        of_page = HASH_BYTES * (self._page_size // self._value_tokens)
        keys = np.zeros((self._num_groups, num_pages, of_page + 2), np.uint8)
        chained = np.frombuffer(b"".join(hashes[1:]), np.uint8)
        keys[:, :, :of_page] = chained.reshape(num_pages, of_page)
        keys[:, :, of_page] = np.arange(self._num_groups)[:, None]
        keys[:, :, of_page + 1] = self._value_tokens.bit_length() - 1
        return keys


def _hash_values(value_bytes: int, chained: bytes, piece: bytes) -> bytes:
    prefix, hashes = hashlib.blake2b(key=chained, digest_size=HASH_BYTES), []
    for first in range(0, len(piece), value_bytes):
        prefix.update(piece[first : first + value_bytes])
        hashes.append(prefix.digest())
    return b"".join(hashes)
