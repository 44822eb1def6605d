"""Checks the blocks of a rank in the host's memory, as `ledger.py` checks pages. It only reads."""

import numpy as np

from sgl_jax.mem_cache.errors import LedgerError
from sgl_jax.mem_cache.host.host_blocks import HostBlocks
from sgl_jax.mem_cache.host.host_tier import HostTier
from sgl_jax.mem_cache.pages.page_allocator import FREE, NULL_PAGE, RESERVED, TREE


def check_host_balance(tier: HostTier) -> None:
    """Prove `free + arriving + cached + reserved == total` for each pool. Raises `LedgerError`.

    Arriving blocks are counted by the copies, cached ones by the tree, whose locks must be the ones
    of copies and fetches in flight.
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
    tree, num_tokens = blocks.cache.tree, sum(node.end for node in nodes)
    if (len(nodes), num_tokens) != (tree.num_locks, tree.num_locked_tokens):
        raise _error(
            blocks,
            f"copies and fetches have locked {num_tokens} tokens {len(nodes)} times, the tree gave "
            f"{tree.num_locks} locks on {tree.num_locked_tokens} tokens",
        )
    running = set(tier.fetches) | (tier.store.puts if tier.store else set())
    if set(blocks.leaving) != running:
        raise _error(blocks, f"fetches and puts {running} run, {set(blocks.leaving)} have locks")


def audit_host(tier: HostTier) -> None:
    """Prove by a full walk that every block has exactly one owner. Raises `LedgerError`."""
    check_host_balance(tier)
    blocks = tier.blocks
    locks = [(node, None) for copy in blocks.copies.values() if (node := copy.node) is not None]
    locks += [(node, None) for node in blocks.leaving.values()]
    blocks.cache.audit(locks)
    for pool, allocator in enumerate(blocks.allocators):
        expected = np.full(allocator.num_pages, FREE, np.int32)
        expected[NULL_PAGE] = RESERVED
        expected[blocks.cache.held_pages(pool)] = TREE
        for number, copy in blocks.copies.items():
            expected[blocks.by_pool(copy.blocks)[pool]] = number
        wrong = np.flatnonzero(expected != allocator.owners()).astype(np.int32)
        if len(wrong):
            raise _error(blocks, f"wrong owners: {allocator.describe(wrong)}")


def _error(blocks: HostBlocks, text: str) -> LedgerError:
    return LedgerError(f"host memory of rank {blocks.dp_rank}: {text}")
