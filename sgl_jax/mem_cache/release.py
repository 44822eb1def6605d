"""The one way out: the only code that frees a request's pages.

`publish_prefix` offers what a lease has written to the prefix cache while the request goes on;
`free_tail` gives back slots that were reserved ahead and are not needed after all;
`adopt_prefix` those whose tokens the tree turns out to have as well;
`release_kv_cache` publishes likewise and then gives back all the rest. Finish, stop, abort,
retract, disconnect, error and shutdown all end a lease here. Unless the cache takes the lease
over: the session keeps that of its turn, and nothing is freed. `resume_lease` hands it to the next
turn, and `release_idle_lease` ends it when the session is closed or evicted.

Pages may be freed while a launched step still reads or writes them: steps run on the device in
launch order, so the next owner of such a page writes to it only afterwards.
"""

import numpy as np

from sgl_jax.core.step_plan import Int32Array
from sgl_jax.mem_cache.errors import LeaseError
from sgl_jax.mem_cache.lease import KVLease
from sgl_jax.mem_cache.rank_memory import RankMemory
from sgl_jax.mem_cache.tree_component import LeaseOffer

_NO_PAGES = np.zeros(0, np.int32)


def publish_prefix(memory: RankMemory, lease: KVLease, tokens: Int32Array) -> None:
    """Offer the committed whole pages of `tokens` to the cache; the lease goes on.

    `tokens` are the request's known tokens from position 0; those past `kv_committed_len` are
    not offered. Afterwards the tree owns every page up to the new `cache_protected_len`: pages
    it accepted, or its own where it had them already; the lease's duplicates are freed.
    """
    lease.require_live()
    memory.locked.lock(_hand_to_tree(memory, lease, tokens))


def _hand_to_tree(memory: RankMemory, lease: KVLease, tokens: Int32Array) -> Int32Array:
    """`publish_prefix`, but that what it locks is not counted in `memory.locked` yet: its pages."""
    rows, page_size = memory.rows, memory.page_size
    length = min(lease.kv_committed_len, len(tokens)) // page_size * page_size
    protected = lease.cache_protected_len
    if length <= protected:
        return _NO_PAGES
    offered = lease.pages(page_size, 0, length)
    offer = LeaseOffer(lease.row, protected, offered[None], lease.node, lease.namespace)
    kept = memory.cache.accept(tokens[:length], offer)
    if kept is None:
        return _NO_PAGES
    lease.node = kept.node
    first = protected // page_size
    rows.cache_protected_len[lease.row] = length
    fresh = offered[first:]
    pages: Int32Array = kept.pages[0]
    duplicates = fresh[fresh != pages]
    if len(duplicates):
        rows.list_pages(lease.row, first, pages)
        memory.allocator.free(duplicates, lease.row)
    return pages


def release_kv_cache(
    memory: RankMemory, lease: KVLease, tokens: Int32Array, *, insert: bool
) -> None:
    """End a lease: publish what it wrote if `insert`, free all else, return the row.

    Args:
        memory: of the lease's rank.
        lease: live; afterwards released, and using it raises `LeaseError`.
        tokens: the request's known tokens from position 0, int32; KV beyond them (of a token
            sampled but not read yet, or past a stop) is freed, never offered.
        insert: False if what was written must not be reused (a failed step); nor does the cache
            take the lease over then.
    """
    lease.require_live()
    if memory.leases.get(lease.row) is not lease:
        raise LeaseError(f"{lease!r} is to be released, but its row is not listed as its own")
    protected = lease.cache_protected_len
    if insert:
        added = _hand_to_tree(memory, lease, tokens)
        if memory.sessions.take_over(lease, len(tokens)):
            memory.locked.lock(added)
            memory.park(lease)
            return
    memory.allocator.free(lease.pages(memory.page_size, lease.cache_protected_len), owner=lease.row)
    if lease.node is not None:
        # What was handed over just now was not counted.
        memory.locked.unlock(lease.pages(memory.page_size, 0, protected))
        memory.cache.unlock(lease.node)
        lease.node = None
    del memory.leases[lease.row]
    memory.rows.free(lease.row)
    lease.released = True


def resume_lease(memory: RankMemory, session_id: str, num_tokens: int) -> KVLease:
    """The next turn of a session starts on the lease that the session keeps.

    Args:
        memory: of the rank that holds the session.
        session_id: of an idle session.
        num_tokens: prefix of the turn's tokens whose KV may be reused; those that follow are
            computed. Never less than the lease protects: turns only append.

    Returns the lease, its committed and allocated length the prefix that is there.
    """
    lease = memory.sessions.lend(session_id)
    memory.unpark(lease)
    free_tail(memory, lease, min(lease.kv_committed_len, num_tokens))
    return lease


def adopt_prefix(memory: RankMemory, lease: KVLease, tokens: Int32Array) -> bool:
    """Go on with the pages of the tree if it has more of `tokens` than `lease`; the lease goes on.

    Args:
        memory: of the lease's rank.
        lease: that has no slots past its committed length. Its lock moves down to where the
            tree's prefix ends, and its own pages, which hold a part of the same tokens, are freed.
        tokens: that a cache may serve, int32. The first of them are those of the lease, as far as
            it goes.

    Returns whether the tree had more; all three lengths are then that of its prefix.
    """
    lease.require_live()
    if memory.cache.peek(tokens, lease.namespace, lease.node) <= lease.kv_allocated_len:
        return False
    first = lease.cache_protected_len // memory.page_size
    match = memory.cache.match_prefix(tokens, lease.namespace, lease.node)
    memory.locked.lock(match.pages[0])
    own = lease.pages(memory.page_size, lease.cache_protected_len)
    memory.allocator.free(own, lease.row)
    lease.node = match.node
    memory.rows.list_pages(lease.row, first, match.pages[0])
    lease.set_lengths(protected=match.length, committed=match.length, allocated=match.length)
    return True


def release_idle_lease(memory: RankMemory, session_id: str) -> bool:
    """End the lease that an idle session holds, if any; what the tree has of it stays there."""
    lease = memory.sessions.remove(session_id)
    if lease is None:
        return False
    memory.unpark(lease)
    # All that may be published was, when the session took the lease over.
    release_kv_cache(memory, lease, np.zeros(0, np.int32), insert=False)
    return True


def roll_back_lease(memory: RankMemory, session_id: str, num_tokens: int) -> None:
    """A session goes back to its first `num_tokens` tokens, and with it the lease that it keeps.

    Pages behind them are freed. If the tree owns more of the lease than that, the lease ends: the
    next turn matches the tree.
    """
    lease = memory.sessions.idle_lease(session_id)
    if lease is None:
        return
    if num_tokens < max(lease.cache_protected_len, 1):
        release_idle_lease(memory, session_id)
    else:
        num_freed = free_tail(memory, lease, min(lease.kv_committed_len, num_tokens))
        memory.num_session_held_pages -= num_freed


def free_tail(memory: RankMemory, lease: KVLease, length: int) -> int:
    """Free whole pages past the first `length` tokens; the lease goes on. Returns how many.

    Slots are reserved for drafts before it is known how many are accepted, so a lease may hold
    more than it needs. A partial page at `length` stays and is filled further.
    """
    lease.require_live()
    if length >= lease.kv_allocated_len:
        return 0
    if length < lease.cache_protected_len:
        raise LeaseError(f"{lease!r} cannot be cut to {length} tokens: the tree owns more of it")
    page_size, row = memory.page_size, lease.row
    first = -(-length // page_size)
    pages = lease.pages(page_size, first * page_size)
    memory.allocator.free(pages, owner=row)
    memory.rows.unlist_pages(row, first)
    lease.set_lengths(
        protected=lease.cache_protected_len,
        committed=min(lease.kv_committed_len, length),
        allocated=length,
    )
    return len(pages)
