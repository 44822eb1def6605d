"""The walk over a rank's memory records: all defects, page by page. It changes nothing.

It must work on inconsistent records, since it also names the suspects when counts disagree. So it
continues after the first finding.

For an engine that is never idle, the walk pauses between slices. A slice compares records between
two steps, so it is exact although steps run between slices. Each is bounded in entries and takes a
few milliseconds at most. Only `find_defects` checks the cursors of waiting requests, and the sums
and order of the eviction sets.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from typing import NamedTuple

import numpy as np

from sgl_jax.core.step_plan import Int32Array
from sgl_jax.mem_cache.errors import LedgerError
from sgl_jax.mem_cache.lease import KVLease
from sgl_jax.mem_cache.pages.locked_pages import LockedPages
from sgl_jax.mem_cache.pages.page_allocator import describe_owner
from sgl_jax.mem_cache.pages.pool_records import FREE, NULL_PAGE, RESERVED, TREE
from sgl_jax.mem_cache.pages.req_to_token_pool import NO_STATE
from sgl_jax.mem_cache.rank_memory import RankMemory
from sgl_jax.mem_cache.tree.cache_walk import CacheWalk, audit_cache
from sgl_jax.mem_cache.tree.tree_component import FirstPages
from sgl_jax.mem_cache.tree_node import TreeNode

# Entries per slice.
_LEASES = 16
_ROW_CELLS = 1 << 17
_NO_PAGES = np.zeros(0, np.int32)


class Finding(NamedTuple):
    """A defect in words, and the affected pages of a pool, if found."""

    what: str
    pages: Int32Array = _NO_PAGES
    pool: int = 0


def walk_failure(error: Exception) -> Finding:
    """Return a finding for an error that ended a walk; inconsistent records may raise anything."""
    if isinstance(error, LedgerError):
        return Finding(str(error), np.array(error.pages, np.int32))
    return Finding(f"the walk itself failed: {type(error).__name__}: {error}")


def find_defects(memory: RankMemory) -> list[Finding]:
    """Return all defects in the rows, the leases, the cache and the owners of pages."""
    slices = chain([_raised(lambda: audit_cache(memory.cache, locks_of(memory)))], walk(memory))
    found = findings_of(chain.from_iterable(map(findings_of, slices)))
    # Both walks over the cache may find the same defect.
    distinct = {(each.what, each.pool, each.pages.tobytes()): each for each in found}
    return list(distinct.values())


def findings_of(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings of a slice, and the error that ended it, if any."""
    found: list[Finding] = []
    try:
        found.extend(findings)
    except Exception as error:
        found.append(walk_failure(error))
    return found


def walk(memory: RankMemory) -> Iterator[Iterable[Finding]]:
    """Yield the slices of a walk. Each is computed when its findings are taken."""
    yield check_holders(memory)
    num_rows = memory.rows.num_rows
    rows_at_once = max(_ROW_CELLS // memory.rows.pages[0].size, 1)
    for first in range(0, num_rows, rows_at_once):
        yield check_rows(memory, first, min(first + rows_at_once, num_rows))
    leases = live_leases(memory)
    for first in range(0, len(leases), _LEASES):
        some = leases[first : first + _LEASES]
        yield chain.from_iterable(
            check_prefix(memory, lease) for lease in some if not lease.released
        )
    yield check_locked_pages(memory)
    cache_walk = CacheWalk(memory.cache)
    for pool in range(len(memory.allocators)):
        yield check_owners(memory, pool)
    while cache_walk.has_nodes:
        yield _raised(lambda: cache_walk.check_some(locks_of(memory)))
    for pool in range(len(memory.allocators)):
        yield _raised(partial(cache_walk.check_rest, pool))


def _raised(check: Callable[[], None]) -> Iterator[Finding]:
    """Run a check that raises its finding."""
    check()
    yield from ()


def live_leases(memory: RankMemory) -> list[KVLease]:
    return [lease for lease in memory.leases.values() if not lease.released]


def locks_of(memory: RankMemory) -> list[tuple[TreeNode, FirstPages]]:
    leases = live_leases(memory)
    return [(lease.node, lease.first_pages) for lease in leases if lease.node is not None]


def check_holders(memory: RankMemory) -> Iterator[Finding]:
    """Check that each row is free or has one lease, and each lease one request or session."""
    rows = memory.rows
    free, held = memory.row_pool.free_rows(), memory.row_pool.held_rows()
    listed = np.sort(np.concatenate([free, held]))
    if not np.array_equal(listed, np.arange(1, rows.num_rows)):
        yield Finding(f"rows are not free or held once each: free {free}, held {held}")
    if sorted(memory.leases) != held.tolist():
        yield Finding(f"rows held {held}, rows of leases {sorted(memory.leases)}")
    for lease in memory.leases.values():
        if lease.released:
            yield Finding(f"{lease!r} is still listed for row {lease.row}")
    yield from _check_sessions(memory)


def check_rows(memory: RankMemory, first: int, end: int) -> Iterator[Finding]:
    rows, page_size = memory.rows, memory.page_size
    for row in np.setdiff1d(np.arange(first, end), memory.row_pool.held_rows()).tolist():
        if rows.lengths[:, row].any() or rows.pages[row].any():
            yield Finding(f"row {row} is free, but not clean", rows.pages[row][rows.pages[row] > 0])
        if (rows.state_lens[:, row] != NO_STATE).any():
            lens = rows.state_lens[:, row].tolist()
            yield Finding(f"row {row} is free, but has states after {lens} tokens")
    yield from _check_states(memory, first, end)
    lengths = rows.lengths[:, first:end]
    out_of_order = (lengths[1:] < lengths[:-1]).any(axis=0)
    for row in (first + np.flatnonzero(out_of_order)).tolist():
        _, protected, committed, allocated = rows.lengths[:, row].tolist()
        what = f"row {row}: protected {protected}, committed {committed}, allocated {allocated}"
        yield Finding(what, rows.pages[row][rows.pages[row] > 0])
    columns = np.arange(rows.pages_per_row)
    num_pages = -(-rows.kv_allocated_len[first:end] // page_size)
    for number, group in enumerate(memory.groups):
        table = rows.pages[first:end, number]
        is_beyond = (table != 0) & (columns >= num_pages[:, None])
        is_passed = (table != 0) & (columns < rows.first_pages[number, first:end, None])
        for i in np.flatnonzero(is_beyond.any(axis=1)).tolist():
            what = f"row {first + i} lists pages beyond its allocated length"
            yield Finding(what, table[i][is_beyond[i]], group.pool)
        for i in np.flatnonzero(is_passed.any(axis=1)).tolist():
            what = f"row {first + i} lists pages that its window has passed"
            yield Finding(what, table[i][is_passed[i]], group.pool)
    partial = rows.cache_protected_len[first:end] % page_size
    for row in (first + np.flatnonzero(partial)).tolist():
        yield Finding(f"row {row} protects {rows.cache_protected_len[row]} tokens: no whole pages")


def _check_states(memory: RankMemory, first: int, end: int) -> Iterator[Finding]:
    rows = memory.rows
    is_ahead = (rows.state_lens > rows.kv_committed_len)[:, first:end].any(axis=0)
    for row in (first + np.flatnonzero(is_ahead)).tolist():
        lens = rows.state_lens[:, row].tolist()
        committed = rows.kv_committed_len[row]
        yield Finding(f"row {row} has states after {lens} tokens, {committed} are committed")


def _check_sessions(memory: RankMemory) -> Iterator[Finding]:
    """Check that each session has one lease, idle or checked out, listed, and not shared."""
    holders: dict[int, str] = {}
    checked_out = dict(memory.sessions.checked_out())
    for session_id, lease in checked_out.items():
        if memory.leases.get(lease.row) is not lease or lease.session_id != session_id:
            yield Finding(f"session {session_id!r} runs on {lease!r}, which is not its lease")
        holders[lease.row] = session_id
    for lease in memory.leases.values():
        if lease.session_id is not None and checked_out.get(lease.session_id) is not lease:
            yield Finding(f"{lease!r} is of session {lease.session_id!r}, which does not run on it")
    for session_id, lease in memory.sessions.idle():
        if memory.leases.get(lease.row) is not lease or lease.released:
            yield Finding(f"idle session {session_id!r} holds {lease!r}, which is not listed")
        if lease.row in holders:
            other = holders[lease.row]
            yield Finding(f"sessions {other!r} and {session_id!r} both have row {lease.row}")
        if session_id in checked_out:
            yield Finding(f"idle session {session_id!r} holds {lease!r}, but runs as well")
        holders[lease.row] = session_id


def check_prefix(memory: RankMemory, lease: KVLease) -> Iterator[Finding]:
    """Check that a lease's first pages are exactly the pages of its locked path."""
    protected = lease.cache_protected_len
    locked_len, path = 0, np.zeros((len(memory.groups), 0), np.int32)
    if lease.node is not None:
        locked_len, path = lease.node.end, memory.cache.tree.pages_to(lease.node)
        if lease.node.namespace != lease.namespace:
            yield Finding(f"{lease!r} has locked a path of another namespace", path[0])
    if locked_len != protected:
        yield Finding(f"{lease!r} has locked {locked_len} tokens", path[0])
        return
    prefix = lease.pages(memory.page_size, 0, protected)
    for number, group in enumerate(memory.groups):
        # Pages that a window has passed are no longer locked.
        first = memory.rows.first_pages[number, lease.row]
        listed, held = prefix[number, first:], path[number, first:]
        if len(listed) != len(held):
            yield Finding(
                f"{lease!r}: the path it has locked holds {len(path[number])} pages", held
            )
        elif (listed != held).any():
            what = f"{lease!r} reads prefix pages that its locked path does not have"
            yield Finding(what, listed[listed != held], group.pool)


def check_locked_pages(memory: RankMemory) -> Iterator[Finding]:
    """Recompute the lock counts that leases update when they lock, change their holder, and end."""
    leases = live_leases(memory)
    idle_rows = {lease.row for _, lease in memory.sessions.idle()}
    for pool, allocator in enumerate(memory.allocators):
        expected = LockedPages(allocator.num_pages)
        for lease in leases:
            is_idle = lease.row in idle_rows
            end = lease.kv_allocated_len if is_idle else lease.cache_protected_len
            locked = memory.by_pool(lease.pages(memory.page_size, 0, end))[pool]
            locked = locked[(locked >= 0) & (locked < allocator.num_pages)]
            expected.lock(locked)
            if is_idle:
                expected.mark_idle(locked)
        counted = memory.locked[pool]
        differing = counted.differing(expected)
        if len(differing):
            what = "pages are locked by other leases than was counted"
            yield Finding(what, differing, pool)
        if counted.totals != expected.totals:
            yield Finding(
                f"pages locked by (running, idle, any) leases: {counted.totals} were counted, a "
                f"walk finds {expected.totals}"
            )


def check_owners(memory: RankMemory, pool: int) -> Iterator[Finding]:
    """Check that each claimed page belongs to its only claimant, and that all other pages are free.
    The tree claims all pages recorded as the tree's."""
    allocator = memory.allocators[pool]
    owners = allocator.owners()
    expected = np.full(allocator.num_pages, FREE, np.int32)
    num_claims = np.zeros(allocator.num_pages, np.int32)
    claims = [
        (RESERVED, np.array([NULL_PAGE], np.int32)),
        (TREE, np.flatnonzero(owners == TREE).astype(np.int32)),
    ]
    claims += [
        (lease.row, memory.by_pool(lease.pages(memory.page_size, lease.cache_protected_len))[pool])
        for lease in live_leases(memory)
    ]
    for owner, claimed in claims:
        exists = (claimed >= 0) & (claimed < allocator.num_pages)
        if not exists.all():
            foreign = claimed[~exists].tolist()
            yield Finding(f"{describe_owner(owner)} claims no such pages: {foreign}", pool=pool)
        pages = claimed[exists]
        expected[pages] = owner
        np.add.at(num_claims, pages, 1)
    twice = np.flatnonzero(num_claims > 1).astype(np.int32)
    if len(twice):
        yield Finding("pages with two owners", twice, pool)
    wrong = np.flatnonzero(owners != expected).astype(np.int32)
    if len(wrong):
        yield Finding("owners that no holder claims", wrong, pool)
    misplaced = allocator.misplaced_pages()
    if len(misplaced):
        yield Finding("the free list is wrong", misplaced, pool)
