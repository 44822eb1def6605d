"""Hit rates of the radix tree and of other kinds of cache on recorded prompts, without a scheduler.

As in published figures, requests come one after another; prompts are kept, outputs are not. A cache
holds `capacity` blocks of 512 tokens; a partial last block counts as a whole block. A request hits
the longest prefix of its blocks in the cache; a request with more blocks than the capacity is
neither served nor kept. The references for the tree are two policies without its structure, and the
optimum given all future requests.
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

import numpy as np

from sgl_jax.bench.trace.reading import BLOCK_TOKENS, VOCAB_SIZE, TracedRequest, block_tokens
from sgl_jax.core.engine_sizes import EngineSizes
from sgl_jax.mem_cache.eviction.path_records import PathEnd
from sgl_jax.mem_cache.ledger import audit, check_balance
from sgl_jax.mem_cache.rank_memory import RankMemory
from sgl_jax.mem_cache.release import release_kv_cache

Trace = Sequence[TracedRequest]
_GHOSTS_PER_BLOCK = 4  # ghost ids per block of capacity
_NEVER = 1 << 62


class BlockCache(Protocol):
    """A set of blocks by id."""

    def __contains__(self, block_id: int) -> bool: ...

    def use(self, index: int, block_ids: Sequence[int]) -> None:
        """Read the cached blocks of request number `index`, and keep all its blocks."""
        ...


def hit_rate(trace: Trace, cache: BlockCache, capacity: int) -> float:
    """Return the share of all prompt tokens that `cache` serves with `capacity` blocks."""
    num_cached = 0
    for index, request in enumerate(trace):
        if len(request.block_ids) > capacity:
            continue
        num_blocks = 0
        for block_id in request.block_ids:
            if block_id not in cache:
                break
            num_blocks += 1
        num_cached += min(num_blocks * BLOCK_TOKENS, request.input_len)
        cache.use(index, request.block_ids)
    return num_cached / sum(request.input_len for request in trace)


class LruBlocks:
    """Evicts the least recently used block; within one request, the last block first."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._blocks: OrderedDict[int, None] = OrderedDict()  # least recently used first

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._blocks

    def use(self, index: int, block_ids: Sequence[int]) -> None:
        for block_id in reversed(block_ids):
            self._blocks[block_id] = None
            self._blocks.move_to_end(block_id)
        while len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)


class GhostListBlocks:
    """Blocks seen once in a queue, blocks seen again in an LRU list, ghosts of evicted blocks.

    A block that returns while its ghost exists was evicted too early: it goes to the LRU list.
    Blocks are evicted from the queue while it holds more than a quarter of the capacity. (2Q,
    Johnson and Shasha, VLDB 1994, with ghosts of both lists.)
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._once: OrderedDict[int, None] = OrderedDict()
        self._again: OrderedDict[int, None] = OrderedDict()
        self._ghosts: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._once or block_id in self._again

    def use(self, index: int, block_ids: Sequence[int]) -> None:
        for block_id in reversed(block_ids):
            self._use(block_id)
        while len(self._once) + len(self._again) > self._capacity:
            is_queue_large = 4 * len(self._once) > self._capacity
            source = self._once if is_queue_large or not self._again else self._again
            self._ghosts[source.popitem(last=False)[0]] = None
        while len(self._ghosts) > _GHOSTS_PER_BLOCK * self._capacity:
            self._ghosts.popitem(last=False)

    def _use(self, block_id: int) -> None:
        if block_id in self._again:
            self._again.move_to_end(block_id)
        elif block_id in self._once:
            del self._once[block_id]
            self._again[block_id] = None
        elif block_id in self._ghosts:
            del self._ghosts[block_id]
            self._again[block_id] = None
        else:
            self._once[block_id] = None


class FarthestUseBlocks:
    """Evicts the block with the farthest next use; of ties, the deepest block in its prompt.

    Belady's rule (1966) on prefixes. Each use of a block also uses the blocks before it, so the
    victim is always the end of a prefix. No block of the current request is evicted: its prompt is
    kept, as in a cache without knowledge of the future.
    """

    def __init__(self, trace: Trace, capacity: int) -> None:
        self._capacity = capacity
        self._next_uses = _next_uses(trace)
        self._next_use: dict[int, int] = {}  # by cached block
        # (-next use, -depth, block id); an entry is stale if the block's next use has changed
        self._victims: list[tuple[int, int, int]] = []

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._next_use

    def use(self, index: int, block_ids: Sequence[int]) -> None:
        next_uses = self._next_uses[index]
        self._next_use.update(zip(block_ids, next_uses, strict=True))
        while len(self._next_use) > self._capacity:
            negative_use, _, block_id = heapq.heappop(self._victims)
            if self._next_use.get(block_id) == -negative_use:
                del self._next_use[block_id]
        # After the evictions, so that this request's blocks are not victims: old entries are stale.
        for depth, (block_id, next_use) in enumerate(zip(block_ids, next_uses, strict=True)):
            heapq.heappush(self._victims, (-next_use, -depth, block_id))


def _next_uses(trace: Trace) -> list[list[int]]:
    """Return for each block of each request the index of the next request with that block."""
    next_uses: list[list[int]] = []
    last_seen: dict[int, int] = {}
    for index in range(len(trace) - 1, -1, -1):
        block_ids = trace[index].block_ids
        next_uses.append([last_seen.get(block_id, _NEVER) for block_id in block_ids])
        last_seen.update(dict.fromkeys(block_ids, index))
    next_uses.reverse()
    return next_uses


ORACLES: Mapping[str, Callable[[Trace, int], BlockCache]] = MappingProxyType(
    {
        "LRU": lambda trace, capacity: LruBlocks(capacity),
        "ghost list": lambda trace, capacity: GhostListBlocks(capacity),
        "farthest use": FarthestUseBlocks,
    }
)


def oracle_hit_rates(trace: Trace, capacity: int) -> dict[str, float]:
    """Return the share of prompt tokens served with `capacity` blocks, by name of the oracle."""
    return {
        name: hit_rate(trace, make(trace, capacity), capacity) for name, make in ORACLES.items()
    }


def num_distinct_blocks(trace: Trace) -> int:
    """Return the capacity in blocks with which a cache never evicts."""
    return len({block_id for request in trace for block_id in request.block_ids})


def tree_hit_rate(
    trace: Trace,
    capacity: int,
    *,
    page_size: int,
    policy: str,
    check_each_request: bool = False,
) -> float:
    """Return the share of all prompt tokens that the radix tree serves.

    The page size must divide 512, and affects only the time of the run. A full audit ends it; with
    `check_each_request` the ledger's balance is also checked after each request. Raises
    `LedgerError` if the memory's counts do not balance.
    """
    if BLOCK_TOKENS % page_size:
        raise ValueError(f"the page size must divide {BLOCK_TOKENS}, got {page_size}")
    longest = max(len(request.block_ids) for request in trace)
    sizes = EngineSizes(
        dp_size=1,
        page_size=page_size,
        pool_pages=(1 + capacity * (BLOCK_TOKENS // page_size),),
        num_rows=2,
        max_context_len=longest * BLOCK_TOKENS,
        max_step_tokens=longest * BLOCK_TOKENS,
        max_prompt_logprob_tokens=1,
        vocab_size=VOCAB_SIZE,
    )
    memory = RankMemory(0, sizes, eviction_policy=policy)
    num_cached = 0
    for request in trace:
        if len(request.block_ids) > capacity:
            continue
        num_cached += _serve(memory, request)
        if check_each_request:
            check_balance(memory, 0)
    audit(memory, 0)
    return num_cached / sum(request.input_len for request in trace)


def _serve(memory: RankMemory, request: TracedRequest) -> int:
    """Match, compute and keep one prompt; return its number of cached tokens."""
    tokens = block_tokens(request.block_ids)
    now_s = request.arrival_ms * 1e-3
    memory.tick(now_s)
    lease = memory.open_lease(tokens)
    num_cached = min(lease.kv_committed_len, request.input_len)
    rows, lens = np.array([lease.row]), np.array([len(tokens)], np.int32)
    fits = memory.grow_rows(rows, lens)
    assert fits, "a prompt within the capacity fits once all others are evicted"
    memory.commit_rows(rows, lens)
    end = None
    if request.agent is not None:
        is_final, agent = request.stop == "end_turn", ("", request.agent)
        end = PathEnd(len(tokens), now_s, is_final=is_final, agent=agent)
    release_kv_cache(memory, lease, tokens, insert=True, end=end)
    return num_cached
