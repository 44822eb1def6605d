"""Latent attention in float64 numpy, one token and one head at a time: the judge.

Keys and values are expanded from the latents; no implementation's code is shared, and no slot that
holds no token is read.
"""

import numpy as np
from numpy.typing import NDArray

Float64Array = NDArray[np.float64]


def latent_attention(
    nope: NDArray,
    rope: NDArray,
    latents: NDArray,
    up_keys: NDArray,
    up_values: NDArray,
    kv_cache: NDArray,
    layer: int,
    page_table: NDArray,
    kv_starts: NDArray,
    q_lens: NDArray,
    index: tuple[NDArray, NDArray, NDArray, int] | None = None,
    *,
    scale: float,
) -> tuple[Float64Array, Float64Array]:
    """Same meaning and shapes as `interface.PagedLatentAttention`; returns (out, kv_cache).

    `index` has the queries, weights and keys of an indexer, and its top_k.

    Padding tokens get an output of zero and write nothing, so page 0 is left as it was.
    """
    cache = np.array(kv_cache, np.float64)
    page_size, (heads, _, rank) = cache.shape[3], up_keys.shape
    width = latents.shape[1]
    out = np.zeros((len(nope), heads, up_values.shape[2]))
    token = 0
    for row, q_len in enumerate(q_lens):
        for position in range(kv_starts[row], kv_starts[row] + q_len):
            page, slot = page_table[row, position // page_size], position % page_size
            cache[layer, page, 0, slot, :width] = latents[token]
            cache[layer, page, 0, slot, width:] = 0
            seen = np.arange(position + 1)
            if index is not None:
                key_dim = index[2].shape[1]
                first_lane = cache.shape[4] - -(-key_dim // 128) * 128
                lanes = slice(first_lane, first_lane + key_dim)
                cache[layer, page, 0, slot, lanes] = index[2][token]
                keys = cache[layer, page_table[row, seen // page_size], 0, seen % page_size, lanes]
                seen = chosen_tokens(index[0][token], index[1][token], keys, index[3])
            rows = cache[layer, page_table[row, seen // page_size], 0, seen % page_size]
            for head in range(heads):
                keys = rows[:, :rank] @ np.asarray(up_keys[head], np.float64).T
                scores = keys @ np.asarray(nope[token, head], np.float64)
                scores += rows[:, rank:width] @ np.asarray(rope[token, head], np.float64)
                weights = np.exp(scale * (scores - scores.max()))
                values = rows[:, :rank] @ np.asarray(up_values[head], np.float64)
                out[token, head] = weights @ values / weights.sum()
            token += 1
    return out, cache


def chosen_tokens(queries: NDArray, weights: NDArray, keys: NDArray, top_k: int) -> NDArray:
    """The `top_k` tokens with the highest scores, ascending; the first of equal ones."""
    products = np.asarray(keys, np.float64) @ np.asarray(queries, np.float64).T
    scores = np.maximum(products, 0) @ np.asarray(weights, np.float64)
    return np.sort(np.argsort(-scores, kind="stable")[:top_k])
