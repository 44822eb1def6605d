"""Keys of the contents of pages: equal for equal prefixes of a namespace, in all engines."""

import hashlib

import numpy as np

from sgl_jax.core.step_plan import Int32Array
from sgl_jax.core.transfers import Keys

_HASH_BYTES = 16
KEY_BYTES = _HASH_BYTES + 1  # the last is the number of the group of layers


def content_keys(tokens: Int32Array, page_size: int, namespace: str, num_groups: int) -> Keys:
    """The key of each group's contents of each whole page of `tokens` int32[n].

    A key is a BLAKE2b hash, chained from the namespace over the prefix's pages, and the group.
    Without the namespace, which has a tenant's salt, no key can be computed.

    Returns uint8[groups, pages, KEY_BYTES].
    """
    pages = tokens[: len(tokens) // page_size * page_size].reshape(-1, page_size).astype("<i4")
    keys = np.zeros((num_groups, len(pages), KEY_BYTES), np.uint8)
    chained = hashlib.blake2b(namespace.encode(), digest_size=_HASH_BYTES).digest()
    for number, page in enumerate(pages):
        chained = hashlib.blake2b(page.tobytes(), key=chained, digest_size=_HASH_BYTES).digest()
        keys[:, number, :_HASH_BYTES] = np.frombuffer(chained, np.uint8)
    keys[:, :, _HASH_BYTES] = np.arange(num_groups)[:, None]
    return keys
