"""Checks the memory of a rank: `check_balance` every step, `audit` by a full walk.

The counts compared come from independent sources: the allocator's stack and owner array, the
lengths of the rows, and the tree's own counters. The ledger only reads.
"""

from collections.abc import Sequence

import numpy as np

from sgl_jax.mem_cache.errors import LedgerError
from sgl_jax.mem_cache.ledger_walk import Finding, find_defects
from sgl_jax.mem_cache.rank_memory import RankMemory

_FINDINGS_SHOWN = 6


def check_balance(memory: RankMemory, num_running: int | None = None) -> None:
    """Prove that counts agree, in time that does not grow with the pool. Raises `LedgerError`.

    `num_running`, where it is known, counts the requests that hold a lease: the other leases are
    those of idle sessions, so that none is counted for both, and each has a holder.

    Proved: `free + leased + cached + session_held + reserved == total`, where leased is what the
    rows hold and cached what the tree counts; the locks that were taken are those of the rows,
    in number and in tokens, and of as many pages, so that a lock too many is not hidden in
    "protected"; what idle sessions hold is nothing if there are none; rows likewise.
    If they disagree, a walk finds the pages and their owners for the error's text.
    """
    imbalance = _imbalance(memory) or _ownerless(memory, num_running)
    if imbalance is not None:
        raise _error(memory, [Finding(imbalance), *_suspects(memory)])


def audit(memory: RankMemory, num_running: int | None = None) -> None:
    """Prove by a full walk that every page has exactly one owner and every lock a live lease.

    O(pages + nodes). Raises `LedgerError` that names the rank, the pages, their owners and how
    they came by them.
    """
    check_balance(memory, num_running)
    findings = _suspects(memory)
    if findings:
        raise _error(memory, findings)


def _imbalance(memory: RankMemory) -> str | None:
    """What counts disagree on; None if they balance. Runs every step: each call counts."""
    rows, allocator, cache, page_size = (
        memory.rows,
        memory.allocator,
        memory.cache,
        memory.page_size,
    )
    lengths = rows.lengths
    if np.count_nonzero(lengths[1:] < lengths[:-1]):
        bad = np.flatnonzero((lengths[1:] < lengths[:-1]).any(axis=0)).tolist()
        return f"lengths out of order: {[memory.leases.get(row, row) for row in bad]}"
    # Free rows have lengths of 0 and need not be told from the others.
    protected = int(np.add.reduce(rows.cache_protected_len))
    held_pages = (rows.kv_allocated_len + (page_size - 1)) // page_size
    leased = int(np.add.reduce(held_pages)) - protected // page_size
    if leased != allocator.num_leased:
        return f"rows hold {leased} pages, {allocator.num_leased} are leased"
    cached = cache.num_evictable[0] + cache.num_protected[0]
    if cached != allocator.num_tree:
        return f"the tree counts {cached} pages, it owns {allocator.num_tree}"
    num_locking = np.count_nonzero(rows.cache_protected_len)
    if num_locking != cache.tree.num_locks or protected != cache.tree.num_locked_tokens:
        return (
            f"{num_locking} rows have locked {protected} tokens, the tree gave "
            f"{cache.tree.num_locks} locks on {cache.tree.num_locked_tokens} tokens"
        )
    if memory.locked.num_locked != cache.num_protected[0]:
        return (
            f"leases have locked {memory.locked.num_locked} pages, the tree counts "
            f"{cache.num_protected[0]}"
        )
    if memory.num_session_pages and not memory.sessions.num_idle:
        return f"no session is idle, and {memory.num_session_pages} pages are held for some"
    held, free, total = rows.num_held, rows.num_free, rows.num_rows - 1
    if held != len(memory.leases) or held + free != total:
        return f"{held} rows are held by {len(memory.leases)} leases, {free} are free, of {total}"
    return None


def _ownerless(memory: RankMemory, num_running: int | None) -> str | None:
    """What is wrong with the number of leases, if anything."""
    num_idle = memory.sessions.num_idle
    if num_running is None or len(memory.leases) == num_running + num_idle:
        return None
    return (
        f"{num_running} requests run and {num_idle} sessions are idle, but there are "
        f"{len(memory.leases)} leases"
    )


def _suspects(memory: RankMemory) -> list[Finding]:
    """What a walk finds, or the error that inconsistent records raised in it."""
    findings: list[Finding] = []
    try:
        findings.extend(find_defects(memory))
    except Exception as error:
        findings.append(Finding(f"the walk itself failed: {type(error).__name__}: {error}"))
    return findings


def _error(memory: RankMemory, findings: Sequence[Finding]) -> LedgerError:
    shown = []
    for what, pages in findings[:_FINDINGS_SHOWN]:
        known = pages[(pages >= 0) & (pages < memory.allocator.num_pages)]
        shown.append(f"{what}: {memory.allocator.describe(known)}" if len(known) else what)
    more = len(findings) - _FINDINGS_SHOWN
    if more > 0:
        shown.append(f"and {more} more findings")
    concerned = np.unique(np.concatenate([pages for _, pages in findings]))
    text = f"rank {memory.dp_rank}: {'; '.join(shown)}; {memory.view()}"
    return LedgerError(text, concerned.tolist())
