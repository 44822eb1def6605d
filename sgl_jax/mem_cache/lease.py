"""The right to a row and its pages: one value with exactly one holder.

    0            protected          committed     allocated
    |  tree's pages  |  the row's pages, written  |  reserved, not yet written  |

`cache_protected_len` is page-aligned. Pages before it belong to the tree, and the lock on `node`
protects them from eviction. From there to `kv_allocated_len`, pages belong to the row. The lengths
stay in the order of the diagram and apply to all cache groups. The row does not list pages that a
group's window has passed, whether they are the row's or the tree's.

`namespace` is set when the lease is opened, and its prefixes are published under it. No later call
takes a namespace, so none can use another.
"""

from sgl_jax.core.engine_sizes import CacheGroup
from sgl_jax.core.step_plan import Int32Array
from sgl_jax.mem_cache.errors import LeaseError
from sgl_jax.mem_cache.pages.req_to_token_pool import RowTables
from sgl_jax.mem_cache.tree_node import TreeNode


class KVLease:
    """A lease on `row` of one rank. The row pool's arrays store the lengths, in tokens. Only
    `RankMemory.open_lease` creates a lease, and only `release_kv_cache` ends it."""

    __slots__ = (
        "_rows",
        "dp_rank",
        "is_stale",
        "namespace",
        "node",
        "released",
        "row",
        "session_id",
    )

    def __init__(self, dp_rank: int, row: int, rows: RowTables, namespace: str = "") -> None:
        self.dp_rank = dp_rank
        self.row = row
        self.namespace = namespace
        self.node: TreeNode | None = None  # deepest locked node; None if nothing is locked
        self.is_stale = False  # has KV of earlier weights, which no other request may use
        self.released = False
        self.session_id: str | None = None  # the session with a turn on it (`SessionLeases`)
        self._rows = rows

    def __repr__(self) -> str:
        if self.released:
            return f"KVLease(rank {self.dp_rank}, row {self.row}, released)"
        return (
            f"KVLease(rank {self.dp_rank}, row {self.row}, protected {self.cache_protected_len}, "
            f"committed {self.kv_committed_len}, allocated {self.kv_allocated_len})"
        )

    def require_live(self) -> None:
        if self.released:
            raise LeaseError(f"{self!r} was used after its release")

    @property
    def kv_committed_len(self) -> int:
        return self._rows.kv_committed_len.item(self.row)

    @property
    def kv_allocated_len(self) -> int:
        return self._rows.kv_allocated_len.item(self.row)

    @property
    def cache_protected_len(self) -> int:
        return self._rows.cache_protected_len.item(self.row)

    @property
    def first_pages(self) -> Int32Array:
        """Return the first page that the row lists of each cache group, int32[groups]; a copy."""
        return self._rows.first_pages[:, self.row].copy()

    def set_lengths(self, *, protected: int, committed: int, allocated: int) -> None:
        """Set all three lengths. Raise `LeaseError` if they are out of order."""
        self.require_live()
        if not 0 <= protected <= committed <= allocated:
            raise LeaseError(
                f"{self!r}: lengths must satisfy 0 <= protected <= committed <= allocated, got "
                f"{protected}, {committed}, {allocated}"
            )
        self._rows.cache_protected_len[self.row] = protected
        self._rows.kv_committed_len[self.row] = committed
        self._rows.kv_allocated_len[self.row] = allocated

    def change_holder(self, num_tokens: int) -> None:
        """Pass the lease to another holder, which has its first `num_tokens` tokens. The row's
        epoch grows, so unread results, which belong to the former holder, are dropped."""
        self.require_live()
        self._rows.epoch[self.row] += 1
        committed = min(self.kv_committed_len, num_tokens)
        self.set_lengths(
            protected=self.cache_protected_len,
            committed=committed,
            allocated=self.kv_allocated_len,
        )

    def pages(self, page_size: int, start: int = 0, end: int | None = None) -> Int32Array:
        """Copy the page ids that hold tokens [start, end); by default, `end` is the allocated
        length.

        Return int32[groups, n], 0 for pages that a window has passed. `start` must be page-aligned.
        The last page may be partly outside [start, end).
        """
        self.require_live()
        stop = self.kv_allocated_len if end is None else end
        return self._rows.pages[self.row, :, start // page_size : -(-stop // page_size)].copy()


def first_page_of(window: int, page_size: int, num_tokens: int) -> int:
    """Return the first page that the token after `num_tokens` reads through a window."""
    return max(num_tokens - window + 1, 0) // page_size


def num_pages_read(group: CacheGroup, page_size: int, num_tokens: int) -> int:
    """Count the pages (or the state) of a prefix of whole pages that its next token reads."""
    if group.is_recurrent:
        return 1
    num_pages = num_tokens // page_size
    if group.sliding_window is None:
        return num_pages
    return num_pages - first_page_of(group.sliding_window, page_size, num_tokens)
