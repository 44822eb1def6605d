"""Host time of the prefix tree and of the page allocator."""

from collections.abc import Iterator

import numpy as np

from benchmarks.host.steps import ROWS_PER_RANK, VOCAB_SIZE
from benchmarks.host.timing import Timing, timed, timed_once
from sgl_jax.core.engine_sizes import FULL_ATTENTION
from sgl_jax.mem_cache.pages.page_allocator import PageAllocator
from sgl_jax.mem_cache.tree.radix_cache import RadixCache
from sgl_jax.mem_cache.tree.tree_component import LeaseOffer

_ROW = 1


class LoadedTree:
    """A radix cache with `num_entries` prompts of 2,000 tokens in families that share half."""

    def __init__(self, page_size: int, num_entries: int) -> None:
        self.page_size = page_size
        self.prompt_len = 2000 // page_size * page_size
        self.allocator = PageAllocator(2 + (num_entries + 2000) * self.prompt_len // page_size)
        self.cache = RadixCache(FULL_ATTENTION, [self.allocator], page_size)
        self.rng = np.random.default_rng(0)
        self.prefixes = self.rng.integers(0, VOCAB_SIZE, (100, self.prompt_len // 2), np.int32)
        for _ in range(num_entries):
            self.insert(self.prompt())

    def prompt(self) -> np.ndarray:
        """Return a prompt that begins with one of the shared prefixes."""
        prefix = self.prefixes[self.rng.integers(len(self.prefixes))]
        tail = self.rng.integers(0, VOCAB_SIZE, self.prompt_len - len(prefix), np.int32)
        return np.concatenate([prefix, tail])

    def insert(self, tokens: np.ndarray) -> None:
        """Match a request's prompt, allocate pages for the rest, insert it and unlock its nodes."""
        match = self.cache.match_prefix(tokens[:-1])
        own = self.allocator.alloc(len(tokens) // self.page_size - match.pages.shape[1], _ROW)
        offer = LeaseOffer(_ROW, np.concatenate([match.pages[0], own])[None])
        kept = self.cache.accept(tokens, offer)
        for node in (match.node, kept.node if kept else None):
            if node is not None:
                self.cache.unlock(node)


def bench_tree(page_size: int, repeats: int) -> Iterator[Timing]:
    """Time peek, and match plus insert, of 2,000-token prompts in a tree of 4,000 entries."""
    tree = LoadedTree(page_size, num_entries=4000)
    prompts = iter([tree.prompt() for _ in range(2 * repeats + 2)])
    where = f"2,000 tokens, tree of 4,000 entries, page {page_size}"
    yield timed(f"peek, {where}", lambda: tree.cache.peek(next(prompts)), repeats=repeats)
    yield timed(f"match + insert, {where}", lambda: tree.insert(next(prompts)), repeats=repeats)


def bench_eviction(edge_pages: int, repeats: int) -> Iterator[Timing]:
    """Time the eviction of 1,000 of 100,000 pages in tree edges of `edge_pages` pages."""
    num_pages, num_evicted = 100_000, 1000
    allocator = PageAllocator(num_pages + 1)
    cache = RadixCache(FULL_ATTENTION, [allocator], 1)
    for first in range(0, num_pages, edge_pages):
        tokens = np.full(edge_pages, first, np.int32)
        kept = cache.accept(tokens, LeaseOffer(_ROW, allocator.alloc(edge_pages, _ROW)[None]))
        assert kept is not None
        assert kept.node is not None
        cache.unlock(kept.node)
    name = f"evict {num_evicted:,} of {num_pages:,} pages, edges of {edge_pages}"
    repeats = min(repeats, num_pages // num_evicted // 2)
    yield timed(name, lambda: cache.evict(num_evicted), repeats=repeats, num_ops=num_evicted)


def bench_allocator(repeats: int) -> Iterator[Timing]:
    """Time how a pool of 65,536 pages allocates and frees pages."""
    allocator = PageAllocator(65_537)
    for num_pages in (1, ROWS_PER_RANK, 65_536):
        held: list[np.ndarray] = []
        owners = np.full(num_pages, _ROW, np.int32)

        def alloc(owners: np.ndarray = owners, held: list[np.ndarray] = held) -> None:
            held.append(allocator.alloc_each(owners))

        def free(held: list[np.ndarray] = held) -> None:
            allocator.free(held.pop(), _ROW)

        taken, given = [], []
        for _ in range(repeats):
            taken.append(timed_once(alloc))
            given.append(timed_once(free))
        yield Timing(f"alloc {num_pages:,} of 65,536 pages", taken, num_pages)
        yield Timing(f"free {num_pages:,} of 65,536 pages", given, num_pages)
