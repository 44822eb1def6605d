"""The one way out: the only code that frees a request's pages.

`publish_prefix` offers what a lease has written to the prefix cache while the request goes on;
`free_tail` gives back slots that were reserved ahead and are not needed after all;
`release_kv_cache` publishes likewise and then gives back all the rest. Finish, stop, abort,
retract, disconnect, error and shutdown all end a lease here.

Pages may be freed while a launched step still reads or writes them: steps run on the device in
launch order, so whoever is given such a page writes to it only afterwards.
"""

from sgl_jax.core.step_plan import Int32Array
from sgl_jax.mem_cache.errors import LeaseError
from sgl_jax.mem_cache.lease import KVLease
from sgl_jax.mem_cache.rank_memory import RankMemory
from sgl_jax.mem_cache.tree_component import LeaseOffer


def publish_prefix(memory: RankMemory, lease: KVLease, tokens: Int32Array) -> None:
    """Offer the committed whole pages of `tokens` to the cache; the lease goes on.

    `tokens` are the request's known tokens from position 0; those past `kv_committed_len` are
    not offered. Afterwards the tree owns every page up to the new `cache_protected_len`: pages
    it accepted, or its own where it had them already; the lease's duplicates are freed.
    """
    lease.require_live()
    rows, page_size = memory.rows, memory.page_size
    length = min(lease.kv_committed_len, len(tokens)) // page_size * page_size
    protected = lease.cache_protected_len
    if length <= protected:
        return
    offered = lease.pages(page_size, 0, length)
    kept = memory.cache.accept(tokens[:length], LeaseOffer(lease.row, protected, offered))
    if kept is None:
        return
    if lease.node is not None:
        memory.cache.unlock(lease.node)
    lease.node = kept.node
    rows.pages[lease.row, : length // page_size] = kept.pages
    rows.cache_protected_len[lease.row] = length
    memory.allocator.free(offered[offered != kept.pages], lease.row)


def release_kv_cache(
    memory: RankMemory, lease: KVLease, tokens: Int32Array, *, insert: bool
) -> None:
    """End a lease: publish what it wrote if `insert`, free all else, return the row.

    Args:
        memory: of the lease's rank.
        lease: live; afterwards released, and using it raises `LeaseError`.
        tokens: the request's known tokens from position 0, int32; KV beyond them (of a token
            sampled but not read yet, or past a stop) is freed, never offered.
        insert: False if what was written must not be reused (a failed step).
    """
    lease.require_live()
    if memory.leases.get(lease.row) is not lease:
        raise LeaseError(f"{lease!r} is to be released, but its row is not listed as its own")
    if insert:
        publish_prefix(memory, lease, tokens)
    memory.allocator.free(lease.pages(memory.page_size, lease.cache_protected_len), owner=lease.row)
    if lease.node is not None:
        memory.cache.unlock(lease.node)
        lease.node = None
    del memory.leases[lease.row]
    memory.rows.free(lease.row)
    lease.released = True


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
    memory.rows.pages[row, first:] = 0
    lease.set_lengths(
        protected=lease.cache_protected_len,
        committed=min(lease.kv_committed_len, length),
        allocated=length,
    )
    return len(pages)
