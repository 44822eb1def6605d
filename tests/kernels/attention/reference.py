"""Ragged paged attention in float64 numpy, one token and one head at a time: the judge.

It shares no code with the implementations, and it never reads a slot that holds no token.
"""

import numpy as np
from numpy.typing import NDArray

Float64Array = NDArray[np.float64]


def ragged_paged_attention(
    q: NDArray,
    k: NDArray,
    v: NDArray,
    kv_cache: NDArray,
    layer: int,
    page_table: NDArray,
    kv_starts: NDArray,
    q_lens: NDArray,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: NDArray | None = None,
    is_chunked: bool = False,
    spans: NDArray | None = None,
) -> tuple[Float64Array, Float64Array]:
    """Same meaning and shapes as `api.RaggedPagedAttention`; returns (out, kv_cache).

    Padding tokens get an output of zero and write nothing, so page 0 is left as it was.
    """
    cache = np.array(kv_cache, np.float64)
    kv_heads, page_size = cache.shape[2] // 2, cache.shape[3]
    q_heads = q.shape[1]
    out = np.zeros(q.shape, np.float64)
    queries = [
        (row, position)
        for row, q_len in enumerate(q_lens)
        for position in range(kv_starts[row], kv_starts[row] + q_len)
    ]
    for token, (row, position) in enumerate(queries):
        page = page_table[row, position // page_size]
        cache[layer, page, :kv_heads, position % page_size] = k[token]
        cache[layer, page, kv_heads:, position % page_size] = v[token]
    token = 0
    for row, q_len in enumerate(q_lens):
        for position in range(kv_starts[row], kv_starts[row] + q_len):
            own = [] if spans is None else spans[row]
            end = max((end for begin, end in own if begin <= position < end), default=0)
            first = 0 if sliding_window is None else max(0, position - sliding_window + 1)
            if is_chunked:
                first = position // sliding_window * sliding_window
            seen = np.arange(first, max(position + 1, end))
            pages, slots = page_table[row, seen // page_size], seen % page_size
            for head in range(q_heads):
                kv_head = head // (q_heads // kv_heads)
                keys = cache[layer, pages, kv_head, slots]
                values = cache[layer, pages, kv_heads + kv_head, slots]
                scores = keys @ np.asarray(q[token, head], np.float64) * scale
                if soft_cap is not None:
                    scores = soft_cap * np.tanh(scores / soft_cap)
                top = scores.max() if sinks is None else max(scores.max(), float(sinks[head]))
                weights = np.exp(scores - top)
                total = weights.sum()
                if sinks is not None:
                    total += np.exp(float(sinks[head]) - top)
                out[token, head] = weights @ values / total
            token += 1
    return out, cache
