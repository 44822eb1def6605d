"""Checks the memory of a rank: `check_balance` on every step, `audit` by a full walk, and
`audit_slices` by a walk in slices.

The compared counts come from independent sources: the allocator's stack and owner array, the
lengths of the rows, and the tree's counters. The ledger changes nothing.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from sgl_jax.core.compiled import compiled
from sgl_jax.core.step_plan import Int32Array
from sgl_jax.mem_cache.errors import LedgerError
from sgl_jax.mem_cache.ledger_walk import Finding, find_defects, findings_of, walk
from sgl_jax.mem_cache.rank_memory import RankMemory

_FINDINGS_SHOWN = 6


def check_balance(memory: RankMemory, num_running: int | None = None) -> None:
    """Verify that counts agree, in time that does not grow with the pool, or raise `LedgerError`.

    `free + leased + cached + session_held + reserved == total` must hold, with leased pages counted
    by the rows and cached pages by the tree. The tree's locks must equal the rows' locks in number
    and tokens, and in pages while no session is idle, so that an extra lock cannot hide in
    "protected". Without idle sessions, no pages may be held for them. Free and held rows must add
    up to all rows, and each held row must have a lease. If counts differ, a walk finds the pages
    and their owners for the error's text.

    If `num_running`, the number of requests with a lease, is given, every other lease must belong
    to an idle session, so that each lease has exactly one holder.
    """
    imbalance = find_imbalance(memory, num_running)
    if imbalance is not None:
        raise _defect_error(memory, [Finding(imbalance), *find_defects(memory)])


def find_imbalance(memory: RankMemory, num_running: int | None = None) -> str | None:
    """Describe the counts that disagree in `check_balance`; return None if they balance."""
    imbalance, num_idle = _imbalance(memory), memory.sessions.num_idle
    if imbalance or num_running is None or len(memory.leases) == num_running + num_idle:
        return imbalance
    return (
        f"{num_running} requests run and {num_idle} sessions are idle, but there are "
        f"{len(memory.leases)} leases"
    )


def audit(memory: RankMemory, num_running: int | None = None) -> None:
    """Verify by a full walk, O(pages + nodes), that every page has one owner and every lock a live
    lease. Raise `LedgerError` with the rank, the pages, their owners and last moves if not."""
    check_balance(memory, num_running)
    findings = find_defects(memory)
    if findings:
        raise _defect_error(memory, findings)


def audit_slices(memory: RankMemory, num_running: Callable[[], int]) -> Iterator[None]:
    """Walk the memory of a rank, and pause after each slice. The memory may change in between.

    `num_running` returns the number of requests with a lease. A slice that finds a defect raises
    `LedgerError` with the findings of a full walk. The walk ends early if the memory is rebuilt.
    """
    cache = memory.cache
    check_balance(memory, num_running())
    for findings in walk(memory):
        found = findings_of(findings)
        if found:
            raise _defect_error(memory, [*found, *find_defects(memory)])
        yield
        if memory.cache is not cache:
            return


def _imbalance(memory: RankMemory) -> str | None:
    """Describe the counts that disagree; return None if they balance. This runs on every step."""
    rows, cache, page_size = memory.rows, memory.cache, memory.page_size
    protected, num_locking, held_pages = _row_totals(
        rows.cache_protected_len, rows.kv_committed_len, rows.kv_allocated_len, page_size
    )
    if protected < 0:
        lengths = rows.lengths
        bad = np.flatnonzero((lengths[1:] < lengths[:-1]).any(axis=0)).tolist()
        return f"lengths out of order: {[memory.leases.get(row, row) for row in bad]}"
    not_own = [protected // page_size]
    if not memory.lists_all:
        protected_pages = rows.cache_protected_len // page_size
        not_own = np.maximum(rows.first_pages, protected_pages).sum(axis=1).tolist()
    for pool, allocator in enumerate(memory.allocators):
        if pool == memory.state_pool:
            leased = _num_own_snapshots(
                rows.pages[:, memory.state_group], rows.cache_protected_len, page_size
            )
        else:
            leased = sum(held_pages - not_own[group] for group in memory.groups_of[pool])
        if leased != allocator.num_leased:
            return f"rows hold {leased} pages, {allocator.num_leased} are leased"
        cached = cache.num_evictable[pool] + cache.num_protected[pool]
        if cached != allocator.num_tree:
            return f"the tree counts {cached} pages, it owns {allocator.num_tree}"
    if num_locking != cache.num_locks or protected != cache.num_locked_tokens:
        return (
            f"{num_locking} rows have locked {protected} tokens, the tree gave "
            f"{cache.num_locks} locks on {cache.num_locked_tokens} tokens"
        )
    num_idle = memory.sessions.num_idle
    for locked, num_protected in zip(memory.locked, cache.num_protected, strict=True):
        # Idle sessions also lock pages that they own.
        if locked.num_locked < num_protected or (
            locked.num_locked > num_protected and not num_idle
        ):
            return f"leases have locked {locked.num_locked} pages, the tree counts {num_protected}"
        if locked.num_idle and not num_idle:
            return f"no session is idle, and {locked.num_idle} pages are held for some"
    held, free, total = memory.row_pool.num_held, memory.row_pool.num_free, rows.num_rows - 1
    if held != len(memory.leases) or held + free != total:
        return f"{held} rows are held by {len(memory.leases)} leases, {free} are free, of {total}"
    return None


@compiled("(int32[::1], int32[::1], int32[::1], int32)")
def _row_totals(
    protected_len: Int32Array, committed_len: Int32Array, allocated_len: Int32Array, page_size: int
) -> tuple[int, int, int]:
    """Sum over rows: protected tokens (-1: lengths out of order), rows with any, pages held."""
    protected = num_locking = num_pages = 0
    assert len(protected_len) == len(committed_len) == len(allocated_len)
    for row in range(len(protected_len)):
        # Free rows have lengths of 0, so they need no special case.
        if not 0 <= protected_len[row] <= committed_len[row] <= allocated_len[row]:
            return -1, 0, 0
        protected += protected_len[row]
        num_locking += protected_len[row] > 0
        num_pages += (allocated_len[row] + page_size - 1) // page_size
    return protected, num_locking, num_pages


@compiled("(int32[:, :], int32[::1], int32)")
def _num_own_snapshots(pages: Int32Array, protected_len: Int32Array, page_size: int) -> int:
    """Count the snapshots that all rows list past their protected tokens."""
    assert len(pages) == len(protected_len)
    count = 0
    for row in range(len(pages)):
        for column in range(protected_len[row] // page_size, pages.shape[1]):
            count += pages[row, column] != 0
    return count


def _defect_error(memory: RankMemory, findings: Sequence[Finding]) -> LedgerError:
    shown = []
    for what, pages, pool in findings[:_FINDINGS_SHOWN]:
        allocator = memory.allocators[pool]
        known = pages[(pages >= 0) & (pages < allocator.num_pages)]
        shown.append(f"{what}: {allocator.describe(known)}" if len(known) else what)
    more = len(findings) - _FINDINGS_SHOWN
    if more > 0:
        shown.append(f"and {more} more findings")
    concerned = np.unique(np.concatenate([finding.pages for finding in findings]))
    text = f"rank {memory.dp_rank}: {'; '.join(shown)}; {memory.view()}"
    return LedgerError(text, concerned.tolist())
