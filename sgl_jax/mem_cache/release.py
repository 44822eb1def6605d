"""The only code that frees a request's pages.

Finish, stop, abort, retract, disconnect, error and shutdown all end a lease in `release_kv_cache`.
If the lease is a session's, the session keeps the part that its next turn can resume:
`resume_lease` passes it to that turn, and `release_idle_lease` ends it when the session is closed
or evicted.

Pages may be freed while a launched step still reads or writes them: steps run on the device in
launch order, so the next owner of such a page writes to it only afterwards.
"""

from collections.abc import Sequence

import numpy as np

from sgl_jax.core.step_plan import Int32Array, RowIndex
from sgl_jax.mem_cache.errors import LeaseError
from sgl_jax.mem_cache.eviction.path_records import PathEnd
from sgl_jax.mem_cache.lease import KVLease, first_page_of
from sgl_jax.mem_cache.pages.req_to_token_pool import RowTables
from sgl_jax.mem_cache.rank_memory import RankMemory
from sgl_jax.mem_cache.row_states import (
    drop_snapshots_past,
    forget_states_past,
    go_back,
    resumable_len,
)
from sgl_jax.mem_cache.tree.radix_cache import PrefixMatch
from sgl_jax.mem_cache.tree.tree_component import LeaseOffer
from sgl_jax.mem_cache.tree_node import is_on_tree

_NO_TOKENS = np.zeros(0, np.int32)


def publish_prefix(memory: RankMemory, lease: KVLease, tokens: Int32Array) -> None:
    """Offer the committed whole pages of `tokens` to the cache; the lease continues.

    `tokens` start at position 0 and end at the request's last known token. Tokens past
    `kv_committed_len` are not offered, and a stale lease offers nothing. Afterwards the tree owns
    every page up to the new `cache_protected_len`. If it had a page already, the lease uses that
    page, and its duplicate is freed.
    """
    lease.require_live()
    memory.lock(_hand_to_tree(memory, lease, tokens))
    if not memory.lists_all:  # else the CPU tier gets one offer, at the lease's end
        _offer_to_host(memory, lease, tokens)


def _offer_to_host(memory: RankMemory, lease: KVLease, tokens: Int32Array) -> None:
    """Report the cached prefix of a lease to the CPU tier. Pages that windows pass are gone by the
    lease's end, so a lease with windows reports each publication."""
    if memory.watcher is not None and lease.cache_protected_len and not lease.is_stale:
        memory.watcher.gained(tokens[: lease.cache_protected_len], lease.namespace)


def _hand_to_tree(memory: RankMemory, lease: KVLease, tokens: Int32Array) -> Int32Array:
    """Publish without updating `memory.locked`; return newly locked pages, int32[groups, n]."""
    rows, page_size = memory.rows, memory.page_size
    length = min(lease.kv_committed_len, len(tokens)) // page_size * page_size
    protected = lease.cache_protected_len
    if length <= protected or lease.is_stale:
        return np.zeros((rows.num_groups, 0), np.int32)
    offered = lease.pages(page_size, 0, length)
    firsts = _first_pages(memory, lease)
    offer = LeaseOffer(lease.row, offered, lease.node, lease.namespace, firsts)
    kept = memory.cache.accept(tokens[:length], offer)
    if kept is None:
        return np.zeros((rows.num_groups, 0), np.int32)
    lease.node = kept.node
    first = protected // page_size
    rows.cache_protected_len[lease.row] = length
    if firsts is not None:  # pages before a window are not read again
        for number, passed in enumerate(firsts.tolist()):
            kept.pages[number, : max(passed - first, 0)] = 0
    fresh = offered[:, first:]
    if fresh.tobytes() != kept.pages.tobytes():
        rows.list_pages(lease.row, first, kept.pages)
        is_duplicate = (fresh != kept.pages) & (fresh > 0)
        for allocator, numbers in zip(memory.allocators, memory.groups_of, strict=True):
            allocator.free(fresh[numbers][is_duplicate[numbers]], lease.row)
    return kept.pages if memory.lists_all else _leave_windows(memory, lease, kept.pages, first)


def _leave_windows(memory: RankMemory, lease: KVLease, pages: Int32Array, first: int) -> Int32Array:
    """Keep only the window locks that are needed at the lease's end, after `pages` int32[groups, n]
    are published from page `first` on. Return the pages still locked."""
    rows, row = memory.rows, lease.row
    end = lease.cache_protected_len // memory.page_size
    for number, group in enumerate(memory.groups):
        if group.sliding_window is None:
            continue
        before = int(rows.first_pages[number, row])
        seen = max(
            before, first_page_of(group.sliding_window, memory.page_size, lease.cache_protected_len)
        )
        if group.is_recurrent and seen < end and not rows.pages[row, number, seen]:
            # There is no snapshot. The lease must not lock a snapshot that another row adds.
            assert lease.node is not None
            memory.cache.unlock_passed(lease.node, number, seen, end)
            seen = end
        passed = rows.pages[row, number, before : min(seen, first)]
        memory.locked[group.pool].unlock(passed[passed > 0])
        rows.pass_pages(row, number, seen)
        pages[number, : max(seen - first, 0)] = 0
    return pages


def _first_pages(memory: RankMemory, lease: KVLease) -> Int32Array | None:
    """Return the first window pages that `lease` still has locked; None if it has all of them."""
    return None if memory.lists_all else lease.first_pages


def release_kv_cache(
    memory: RankMemory,
    lease: KVLease,
    tokens: Int32Array,
    *,
    insert: bool,
    end: PathEnd | None = None,
) -> None:
    """End a lease: publish its pages if `insert`, free all other pages, and free the row.

    Args:
        memory: memory of the lease's rank.
        lease: a live lease. Any later use of it raises `LeaseError`.
        tokens: int32, the request's known tokens from position 0. KV after them (of a sampled but
            unread token, or past a stop) is freed and never offered.
        insert: False if the written KV must not be reused (a failed step). Then no session keeps
            the lease either.
        end: if the answer is complete, what is known of the conversation's next request.
    """
    lease.require_live()
    if memory.leases.get(lease.row) is not lease:
        raise LeaseError(f"{lease!r} is to be released, but its row is not listed as its own")
    protected = lease.cache_protected_len
    if insert:
        added = _hand_to_tree(memory, lease, tokens)
        _offer_to_host(memory, lease, tokens)
        if end is not None and lease.node is not None:
            tree = memory.cache.tree
            path = tree.path_to(lease.node)
            were_shared = [node.is_shared for node in path]
            tree.policy.ended(path, end.prompt_len // memory.page_size, end)
            if [node.is_shared for node in path] != were_shared:  # some may be alike now
                for node in path[::-1]:
                    if is_on_tree(node):
                        tree.merge_up(node)
        if lease.session_id is not None and _keep_for_session(memory, lease, added, len(tokens)):
            return
    _free(memory, lease.pages(memory.page_size, lease.cache_protected_len), lease.row)
    if lease.node is not None:
        # The pages published just now were not counted as locked.
        memory.unlock(lease.pages(memory.page_size, 0, protected))
        memory.cache.unlock(lease.node, _first_pages(memory, lease))
        lease.node = None
    del memory.leases[lease.row]
    memory.row_pool.free(lease.row)
    lease.released = True


def _keep_for_session(
    memory: RankMemory, lease: KVLease, added: Int32Array, num_tokens: int
) -> bool:
    """Keep the part of the first `num_tokens` tokens that the session's next turn can resume.

    Return False if there is none, or if its prefix is withdrawn: then the next turn shares another
    copy of it; and if the lease is stale. All other pages are freed, because a pool of windows has
    pages only for the windows of idle rows and for the chunk of one step. `added` is the result of
    `_hand_to_tree`.
    """
    length = resumable_len(memory, lease, num_tokens)
    if length < 1 or lease.is_stale or not memory.cache.finds(lease.node):
        memory.sessions.unbind(lease)
        return False
    memory.lock(added)
    memory.sessions.check_in(lease, length)
    forget_states_past(memory, lease, length)
    _cut(memory, lease, length)
    free_passed_window_pages(memory.rows, [memory], np.array([lease.row]), np.array([length]))
    memory.mark_idle(lease)
    return True


def resume_lease(memory: RankMemory, session_id: str, num_tokens: int) -> KVLease:
    """Start a session's next turn on the lease that the session keeps.

    Args:
        memory: memory of the rank that holds the session.
        session_id: an idle session.
        num_tokens: length of the prefix of the turn's tokens with reusable KV; later tokens are
            computed. At least the lease's protected length, since turns only append.

    Return the lease. Its committed and allocated lengths equal the available prefix: with recurrent
    layers, the part before the last usable state. Raise `LeaseError`, changing nothing, if
    `resumable_len` returns -1. Then the caller must release the lease and match the tree for the
    turn.
    """
    idle = memory.sessions.idle_lease(session_id)
    length = num_tokens if idle is None else resumable_len(memory, idle, num_tokens)
    if length < 0:
        raise LeaseError(
            f"{idle!r} cannot go on from its first {num_tokens} tokens: the tree owns more of it, "
            "or a window has passed them"
        )
    lease = memory.sessions.check_out(session_id)
    memory.mark_running(lease)
    go_back(memory, lease, length)
    _cut(memory, lease, length)
    return lease


def adopt_prefix(memory: RankMemory, lease: KVLease, tokens: Int32Array) -> bool:
    """Switch to the tree's pages if it has more of `tokens` than `lease`; the lease continues.

    Args:
        memory: memory of the lease's rank.
        lease: has no slots past its committed length. Its lock moves down to the end of the tree's
            prefix, and its pages that duplicate the tree's are freed.
        tokens: int32, tokens that a cache may serve. They begin with the lease's tokens.

    Return whether the tree had more. Then all three lengths equal the length of its prefix.
    """
    lease.require_live()
    if memory.cache.peek(tokens, lease.namespace, lease.node) <= lease.kv_allocated_len:
        return False
    first = lease.cache_protected_len // memory.page_size
    firsts = _first_pages(memory, lease)
    match = memory.cache.match_prefix(tokens, lease.namespace, lease.node, firsts)
    if memory.watcher is not None:
        memory.watcher.used(tokens[: match.length], lease.namespace)
    _free(memory, lease.pages(memory.page_size, lease.cache_protected_len), lease.row)
    if memory.lists_all:
        memory.lock(match.pages)
        memory.rows.list_pages(lease.row, first, match.pages)
    else:
        _read_anew(memory, lease, match)
    lease.node = match.node
    lease.set_lengths(protected=match.length, committed=match.length, allocated=match.length)
    return True


def _read_anew(memory: RankMemory, lease: KVLease, match: PrefixMatch) -> None:
    """List the pages that `lease` reads of its new locked prefix, instead of the old one's."""
    assert match.node is not None
    memory.unlock(lease.pages(memory.page_size, 0, lease.cache_protected_len))
    memory.rows.unlist_pages(lease.row)
    memory.set_first_pages(lease, match.length)
    pages = memory.cache.tree.pages_to(match.node)
    for number, first in enumerate(lease.first_pages.tolist()):
        pages[number, :first] = 0
    memory.lock(pages)
    memory.rows.list_pages(lease.row, 0, pages)


def release_idle_lease(memory: RankMemory, session_id: str) -> bool:
    """End an idle session's lease, if any, but keep the tree's pages; return whether it existed."""
    lease = memory.sessions.remove(session_id)
    if lease is None:
        return False
    memory.mark_running(lease)
    # The session published all it could when it took the lease.
    release_kv_cache(memory, lease, _NO_TOKENS, insert=False)
    return True


def roll_back_lease(memory: RankMemory, session_id: str, num_tokens: int) -> None:
    """Reduce a session, and the lease that it keeps, to its first `num_tokens` tokens.

    Later pages are freed; with recurrent layers, also pages past the last state within these
    tokens. If the tree owns more of the lease, or a window has passed pages needed from there, the
    lease ends, and the next turn matches the tree.
    """
    lease = memory.sessions.idle_lease(session_id)
    if lease is None:
        return
    length = resumable_len(memory, lease, num_tokens)
    if length < 1:
        release_idle_lease(memory, session_id)
    else:
        memory.mark_running(lease)
        go_back(memory, lease, length)
        _cut(memory, lease, length)
        memory.mark_idle(lease)


def free_passed_window_pages(
    tables: RowTables, memories: Sequence[RankMemory], rows: RowIndex, lens: Int32Array
) -> None:
    """Free window pages that no later query of `rows` reads.

    Args:
        tables: the columns of all `memories`, one after another.
        memories: the memories of all ranks, with equal numbers of rows.
        rows: indices into `tables`, distinct and leased.
        lens: int32[len(rows)], tokens that no row drops again. Rounded down to a page, since
            published prefixes and matches end there.
    """
    page_size, num_rows = memories[0].page_size, memories[0].rows.num_rows
    for group, (window, _, _, is_recurrent) in enumerate(memories[0].groups):
        if window is None or is_recurrent:
            continue
        ends = lens // page_size * page_size
        firsts = np.maximum(ends + (1 - window), 0) // page_size
        for i in (firsts > tables.first_pages[group, rows]).nonzero()[0].tolist():
            rank, row = divmod(int(rows[i]), num_rows)
            memory = memories[rank]
            _pass_pages(memory, memory.leases[row], group, int(firsts[i]))


def _pass_pages(memory: RankMemory, lease: KVLease, group: int, first: int) -> None:
    """Free the row's pages before page `first`, where the window now begins; unlock the tree's."""
    rows, row, pool = memory.rows, lease.row, memory.groups[group].pool
    passed, listed = int(rows.first_pages[group, row]), rows.pages[row, group]
    protected = lease.cache_protected_len // memory.page_size
    end = min(first, protected)
    if lease.node is not None and passed < end:
        read = listed[passed:end]
        memory.locked[pool].unlock(read[read > 0])
        memory.cache.unlock_passed(lease.node, group, passed, end)
    own = listed[max(passed, protected) : first].copy()
    memory.allocators[pool].free(own[own > 0], row)
    rows.pass_pages(row, group, first)


def free_tail(memory: RankMemory, lease: KVLease, length: int) -> list[int]:
    """Free whole pages past the first `length` tokens; return the number freed in each pool.

    The lease continues. Slots for drafts are reserved before the number of accepted drafts is
    available, so a lease may hold more than it needs. A partial page at `length` stays and is
    filled further. Raise `LeaseError` if the lease cannot resume from `length`.
    """
    lease.require_live()
    if length >= lease.kv_allocated_len:
        return [0] * len(memory.allocators)
    if length < lease.cache_protected_len:
        raise LeaseError(f"{lease!r} cannot be cut to {length} tokens: the tree owns more of it")
    if length < lease.kv_committed_len and resumable_len(memory, lease, length) < length:
        raise LeaseError(
            f"{lease!r} cannot be cut to {length} tokens: a window has passed them, or there is no "
            "state after them"
        )
    if length < lease.kv_committed_len:
        go_back(memory, lease, length)
    return _cut(memory, lease, length)


def free_tails(memory: RankMemory, rows: RowIndex, lens: Int32Array) -> bool:
    """Free the whole pages of each of `rows` past its length in `lens`; return whether any was."""
    has_tail = memory.rows.kv_allocated_len[rows] > lens
    freed = 0
    for row, length in zip(rows[has_tail].tolist(), lens[has_tail].tolist(), strict=True):
        freed += sum(free_tail(memory, memory.leases[row], length))
    return freed > 0


def _cut(memory: RankMemory, lease: KVLease, length: int) -> list[int]:
    page_size, row = memory.page_size, lease.row
    num_snapshots = drop_snapshots_past(memory, lease, length)
    first = -(-length // page_size)
    pages = lease.pages(page_size, first * page_size)
    num_freed = _free(memory, pages, row)
    if memory.state_pool is not None:
        num_freed[memory.state_pool] += num_snapshots
    memory.rows.unlist_pages(row, first)
    lease.set_lengths(
        protected=lease.cache_protected_len,
        committed=min(lease.kv_committed_len, length),
        allocated=length,
    )
    return num_freed


def _free(memory: RankMemory, pages: Int32Array, row: int) -> list[int]:
    """Free pages of `row`, int32[groups, n]; return the number freed in each pool."""
    listed = memory.by_pool(pages)
    for allocator, of_pool in zip(memory.allocators, listed, strict=True):
        allocator.free(of_pool, row)
    return [len(of_pool) for of_pool in listed]
