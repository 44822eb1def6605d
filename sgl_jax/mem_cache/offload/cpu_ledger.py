"""Checks a rank's blocks in CPU memory, without changing them; `ledger.py` checks device pages."""

from collections.abc import Iterator

import numpy as np

from sgl_jax.mem_cache.errors import LedgerError
from sgl_jax.mem_cache.ledger_walk import walk_failure
from sgl_jax.mem_cache.offload.cpu_pool import CpuPool
from sgl_jax.mem_cache.offload.cpu_tier import CpuTier
from sgl_jax.mem_cache.pages.pool_records import FREE, NULL_PAGE, RESERVED, TREE
from sgl_jax.mem_cache.tree.cache_walk import CacheWalk, audit_cache
from sgl_jax.mem_cache.tree_node import TreeNode


def check_cpu_balance(tier: CpuTier) -> None:
    """Verify `free + arriving + cached + reserved == total` for each pool, or raise `LedgerError`.

    The copies count the arriving blocks, and the tree counts the cached blocks. The tree's locks
    must be exactly the locks of copies, fetches and writes in flight.
    """
    blocks = tier.blocks
    arriving = [0] * len(blocks.allocators)
    for copy in blocks.copies.values():
        for pool, listed in enumerate(blocks.by_pool(copy.blocks)):
            arriving[pool] += len(listed)
    for pool, allocator in enumerate(blocks.allocators):
        if arriving[pool] != allocator.num_leased:
            raise _error(
                blocks, f"copies have {arriving[pool]} blocks, {allocator.num_leased} are owned"
            )
        cached = blocks.cache.num_evictable[pool] + blocks.cache.num_protected[pool]
        if cached != allocator.num_tree:
            raise _error(blocks, f"the tree counts {cached} blocks, owns {allocator.num_tree}")
    nodes = [copy.node for copy in blocks.copies.values() if copy.node is not None]
    nodes += blocks.leaving.values()
    cache, num_tokens = blocks.cache, sum(node.end for node in nodes)
    if (len(nodes), num_tokens) != (cache.num_locks, cache.num_locked_tokens):
        raise _error(
            blocks,
            f"copies and fetches have locked {num_tokens} tokens {len(nodes)} times, the tree gave "
            f"{cache.num_locks} locks on {cache.num_locked_tokens} tokens",
        )
    running = set(tier.fetches) | (set(tier.store.writes.in_flight) if tier.store else set())
    if set(blocks.leaving) != running:
        raise _error(blocks, f"fetches and puts {running} run, {set(blocks.leaving)} have locks")


def audit_cpu_tier(tier: CpuTier) -> None:
    """Verify by a full walk that every block has exactly one owner, or raise `LedgerError`."""
    for _ in _slices(tier, tier.blocks):
        pass
    audit_cache(tier.blocks.cache, _locks(tier.blocks))


def audit_cpu_slices(tier: CpuTier) -> Iterator[None]:
    """Walk a rank's blocks in slices, between which steps may run; raise `LedgerError` on a defect.
    The walk ends early if the blocks are replaced."""
    blocks = tier.blocks
    try:
        for _ in _slices(tier, blocks):
            yield
            if tier.blocks is not blocks:
                return
    except LedgerError:
        raise
    except Exception as error:
        raise _error(blocks, walk_failure(error).what) from error


def _slices(tier: CpuTier, blocks: CpuPool) -> Iterator[None]:
    check_cpu_balance(tier)
    yield
    walk = CacheWalk(blocks.cache)
    for pool in range(len(blocks.allocators)):
        _check_owners(blocks, pool)
        yield
    try:
        while walk.has_nodes:
            walk.check_some(_locks(blocks))
            yield
        for pool in range(len(blocks.allocators)):
            walk.check_rest(pool)
            yield
    except LedgerError as error:
        raise _error(blocks, str(error)) from error


def _locks(blocks: CpuPool) -> list[tuple[TreeNode, None]]:
    copying = [(node, None) for copy in blocks.copies.values() if (node := copy.node) is not None]
    return copying + [(node, None) for node in blocks.leaving.values()]


def _check_owners(blocks: CpuPool, pool: int) -> None:
    """Verify that each block belongs to its copy or the tree, or is free."""
    allocator = blocks.allocators[pool]
    owners = allocator.owners()
    expected = np.full(allocator.num_pages, FREE, np.int32)
    expected[NULL_PAGE] = RESERVED
    expected[owners == TREE] = TREE
    for number, copy in blocks.copies.items():
        expected[blocks.by_pool(copy.blocks)[pool]] = number
    wrong = np.flatnonzero(expected != owners).astype(np.int32)
    if len(wrong):
        raise _error(blocks, f"wrong owners: {allocator.describe(wrong)}")
    misplaced = allocator.misplaced_pages()
    if len(misplaced):
        known = misplaced[(misplaced >= 0) & (misplaced < allocator.num_pages)]
        raise _error(blocks, f"the free list is wrong: {allocator.describe(known)}")


def _error(blocks: CpuPool, text: str) -> LedgerError:
    return LedgerError(f"host memory of rank {blocks.dp_rank}: {text}")
