"""Recorded prompts through the prefix tree of a model with sliding windows, and of one without.

Both have the same memory, counted in pages of one layer. Without windows every layer keeps every
token; with them, windowed layers keep the pages that the tree retains. As in
`sgl_jax.bench.trace.cache_only`, requests run one after another, and prompts are kept but outputs
are not. Here prompts are computed in chunks: each chunk is published when computed, and pages
before the window are freed.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sgl_jax.bench.trace.cache_only import Trace
from sgl_jax.bench.trace.reading import BLOCK_TOKENS, TracedRequest, block_tokens
from sgl_jax.core.engine_sizes import FULL_ATTENTION, CacheGroup
from sgl_jax.core.step_plan import Int32Array
from sgl_jax.mem_cache.pages.page_allocator import PageAllocator
from sgl_jax.mem_cache.tree.cache_walk import audit_cache
from sgl_jax.mem_cache.tree.radix_cache import RadixCache
from sgl_jax.mem_cache.tree.tree_component import LeaseOffer

_CHUNK_TOKENS = 2048
_ROW = 1


class LayerMix(NamedTuple):
    """The numbers of layers that keep every token and that keep a window of them."""

    name: str
    num_full: int
    num_windowed: int
    sliding_window: int  # tokens
    # Share of the memory in a pool for windows only; 0: one pool, groups of equal layers.
    window_share: float = 0.0


GPT_OSS = LayerMix("gpt-oss: 18 full, 18 of window 128, one pool", 18, 18, 128)
GEMMA_3 = LayerMix("Gemma 3 27B: 10 full, 52 of window 1,024, two pools", 10, 52, 1024, 0.75)
LAYER_MIXES = (GPT_OSS, GEMMA_3)


class WindowedRate(NamedTuple):
    """Shares of prompt tokens served, in the same memory."""

    full_alone: float
    windowed: float


def windowed_hit_rates(
    trace: Trace, capacity: int, mix: LayerMix, *, page_size: int, policy: str
) -> WindowedRate:
    """Return shares of prompt tokens served by trees with the windows of `mix` and without.

    `capacity` counts blocks of 512 tokens, of all layers. Longer prompts are left out of both.
    """
    if BLOCK_TOKENS % page_size:
        raise ValueError(f"the page size must divide {BLOCK_TOKENS}, got {page_size}")
    num_pages = capacity * (BLOCK_TOKENS // page_size)
    full = Replay(FULL_ATTENTION, [num_pages], page_size, policy)
    windowed = Replay(*_pools(mix, num_pages), page_size, policy)
    served = [request for request in trace if len(request.block_ids) <= capacity]
    total = sum(request.input_len for request in trace)
    return WindowedRate(*(replay.serve_all(served) / total for replay in (full, windowed)))


def _pools(mix: LayerMix, num_pages: int) -> tuple[tuple[CacheGroup, ...], list[int]]:
    """Return a mix's groups and pools, in the memory of `num_pages` pages of all its layers."""
    if not mix.window_share:
        num_groups = 2 * num_pages
        return (CacheGroup(None), CacheGroup(mix.sliding_window)), [num_groups]
    layer_pages = num_pages * (mix.num_full + mix.num_windowed)
    in_windows = int(layer_pages * mix.window_share) // mix.num_windowed
    in_full = (layer_pages - in_windows * mix.num_windowed) // mix.num_full
    return (CacheGroup(None, 0), CacheGroup(mix.sliding_window, 1)), [in_full, in_windows]


class Replay:
    """A tree and its pools of `pool_pages` pages; requests run one at a time."""

    def __init__(
        self, groups: Sequence[CacheGroup], pool_pages: Sequence[int], page_size: int, policy: str
    ) -> None:
        self.groups = groups
        self.page_size = page_size
        self.allocators = [PageAllocator(1 + num_pages) for num_pages in pool_pages]
        self.cache = RadixCache(groups, self.allocators, page_size, eviction_policy=policy)

    def serve_all(self, requests: Sequence[TracedRequest]) -> int:
        """Serve each request; return the prompt tokens found. Check the tree at the end."""
        num_found = 0
        for request in requests:
            num_found += min(self.serve(block_tokens(request.block_ids)), request.input_len)
        audit_cache(self.cache, [])
        return num_found

    def serve(self, tokens: Int32Array) -> int:
        """Match a prompt, compute the rest in chunks, and keep it; return the tokens found."""
        match = self.cache.match_prefix(tokens)
        node, length = match.node, match.length
        pages = np.zeros((len(self.groups), len(tokens) // self.page_size), np.int32)
        pages[:, : length // self.page_size] = match.pages
        first_pages = [self._first_read(group, length) for group in self.groups]
        while length < len(tokens):
            end = min(length + _CHUNK_TOKENS, len(tokens))
            first, last = length // self.page_size, end // self.page_size
            for number, group in enumerate(self.groups):
                pages[number, first:last] = self._take(last - first, group.pool)
            offer = LeaseOffer(_ROW, pages[:, :last], node, first_pages=first_pages)
            kept = self.cache.accept(tokens[:end], offer)
            assert kept is not None
            node = kept.node
            own = pages[:, first:last]
            kept_pages = kept.pages[:, first - last :]
            for number, group in enumerate(self.groups):
                is_own = own[number] != kept_pages[number]
                self.allocators[group.pool].free(own[number][is_own], _ROW)
            pages[:, first:last] = kept_pages
            length = end
            first_pages = [self._first_read(group, length) for group in self.groups]
        if node is not None:
            self.cache.unlock(node, first_pages)
        return match.length

    def _first_read(self, group: CacheGroup, length: int) -> int:
        window = group.sliding_window
        return 0 if window is None else max(length - window + 1, 0) // self.page_size

    def _take(self, num_pages: int, pool: int) -> Int32Array:
        allocator = self.allocators[pool]
        self.cache.evict(max(num_pages - allocator.num_free, 0), pool)
        return allocator.alloc(num_pages, _ROW)


class WindowedRow(NamedTuple):
    """Hit rates of a mix of layers in the memory of `blocks` blocks of all its layers."""

    layers: str
    blocks: int
    full_alone: float  # every layer keeps every token
    windowed: float


def windowed_table(rows: Sequence[WindowedRow]) -> str:
    """Return a table with a line for each mix and capacity."""
    width = max(len(row.layers) for row in rows)
    lines = [f"{'layers':<{width}}  blocks of 512  all kept  windows  ratio"]
    for row in rows:
        ratio = f"{row.windowed / row.full_alone:.2f}" if row.full_alone else "-"
        lines.append(
            f"{row.layers:<{width}}  {row.blocks:>13,}  {row.full_alone:>8.3f}  "
            f"{row.windowed:>7.3f}  {ratio:>5}"
        )
    return "\n".join(lines)
