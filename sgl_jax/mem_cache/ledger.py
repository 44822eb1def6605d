"""The books of a rank, proved: `check_balance` every step, `audit` by a full walk.

The counts compared come from independent sources: the allocator's stack and owner array, the
lengths of the rows, and the tree's own counters. The ledger only reads.
"""

import numpy as np

from sgl_jax.core.step_plan import Int32Array
from sgl_jax.mem_cache.errors import LedgerError
from sgl_jax.mem_cache.page_allocator import FREE, NULL_PAGE, RESERVED, TREE
from sgl_jax.mem_cache.rank_memory import RankMemory


def check_balance(memory: RankMemory) -> None:
    """Prove that counts agree, in time that does not grow with the pool. Raises `LedgerError`."""
    rows, allocator = memory.rows, memory.allocator
    held = rows.held_rows()
    committed, allocated = rows.kv_committed_len[held], rows.kv_allocated_len[held]
    protected = rows.cache_protected_len[held]
    ordered = (protected >= 0) & (protected <= committed) & (committed <= allocated)
    if not ordered.all():
        bad = held[~ordered].tolist()
        raise _error(memory, f"lengths out of order: {[memory.leases.get(row) for row in bad]}")
    leased = int((-(-allocated // memory.page_size) - protected // memory.page_size).sum())
    if leased != allocator.num_leased:
        raise _error(memory, f"rows hold {leased} pages, {allocator.num_leased} are leased")
    cached = memory.cache.num_evictable + memory.cache.num_protected
    if cached != allocator.num_tree:
        raise _error(memory, f"the tree counts {cached} pages, it owns {allocator.num_tree}")
    if len(held) != len(memory.leases) or len(held) + rows.num_free != rows.num_rows - 1:
        raise _error(
            memory,
            f"{len(held)} rows are held by {len(memory.leases)} leases, {rows.num_free} are free, "
            f"of {rows.num_rows - 1}",
        )


def audit(memory: RankMemory) -> None:
    """Prove by a full walk that every page has exactly one owner and every lock a live lease.

    O(pages + nodes). Raises `LedgerError` that names the rank, the pages and their last owners.
    """
    check_balance(memory)
    leases = list(memory.leases.values())
    for lease in leases:
        lease.require_live()
    locked = [lease.node for lease in leases if lease.node is not None]
    try:
        tree_pages = memory.cache.audit(locked)
    except LedgerError as error:
        raise _error(memory, str(error)) from error

    _require_each_row_once(memory)
    page_size = memory.page_size
    is_tree_page = np.zeros(memory.allocator.num_pages, np.bool_)
    is_tree_page[tree_pages] = True
    claims = [(RESERVED, np.array([NULL_PAGE], np.int32)), (TREE, tree_pages)]
    for lease in leases:
        protected = lease.cache_protected_len
        node_end = lease.node.end if lease.node is not None else 0
        if node_end != protected:
            raise _error(memory, f"{lease!r} has locked {node_end} tokens")
        claims.append((lease.row, lease.pages(page_size, protected)))
        prefix = lease.pages(page_size, 0, protected)
        if not is_tree_page[prefix].all():
            raise _error(memory, f"{lease!r} reads a prefix page that the tree does not own")
    _compare_owners(memory, claims)


def _require_each_row_once(memory: RankMemory) -> None:
    rows = memory.rows
    free, held = rows.free_rows(), rows.held_rows()
    listed = np.sort(np.concatenate([free, held]))
    if not np.array_equal(listed, np.arange(1, rows.num_rows)):
        raise _error(memory, f"rows are not free or held once each: free {free}, held {held}")
    if sorted(memory.leases) != held.tolist():
        raise _error(memory, f"rows held {held}, rows of leases {sorted(memory.leases)}")


def _compare_owners(memory: RankMemory, claims: list[tuple[int, Int32Array]]) -> None:
    expected = np.full(memory.allocator.num_pages, FREE, np.int32)
    num_claims = np.zeros(memory.allocator.num_pages, np.int32)
    for owner, pages in claims:
        expected[pages] = owner
        np.add.at(num_claims, pages, 1)
    twice = np.flatnonzero(num_claims > 1).astype(np.int32)
    if len(twice):
        raise _error(memory, f"pages with two owners: {memory.allocator.describe(twice)}")
    wrong = np.flatnonzero(memory.allocator.owners() != expected).astype(np.int32)
    if len(wrong):
        raise _error(memory, f"owners that no holder claims: {memory.allocator.describe(wrong)}")
    free = np.sort(memory.allocator.free_pages())
    if not np.array_equal(free, np.flatnonzero(expected == FREE)):
        unlisted = np.setxor1d(free, np.flatnonzero(expected == FREE)).astype(np.int32)
        raise _error(memory, f"the free list is wrong about {memory.allocator.describe(unlisted)}")


def _error(memory: RankMemory, what: str) -> LedgerError:
    return LedgerError(f"rank {memory.dp_rank}: {what}; {memory.view()}")
