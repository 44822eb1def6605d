"""Delays prompts that would evict prefixes which return soon: working-set admission.

If the conversations in progress need more memory than a rank has, each new prompt evicts the
history of another conversation, whose next turn computes it again and evicts a third. The rank then
computes little else. So while most evicted pages return (the rank *thrashes*), a request that must
compute most of its prompt waits, unless the pages that it needs are free or have not been used for
a window of time (Denning, "The Working Set Model for Program Behavior", 1968) or, while expected
returns order the evictions, are not expected back within twice the window. Requests that find most
of their prompt cached start as usual: turns of conversations whose history is still present.

After `--working-set-max-wait-s`, also behind prompts with fewer tokens to compute, a request is
due. It never waits for this reason on a rank that runs nothing.
"""

from collections import deque

from sgl_jax.mem_cache.rank_memory import RankMemory
from sgl_jax.mem_cache.tree.radix_cache import RadixCache
from sgl_jax.mem_cache.tree.radix_tree import RadixTree
from sgl_jax.scheduler.request import Request

# Steps until such a request is tried again.
HOLD_STEPS = 16
# A rank thrashes if more than this part of its evicted pages return.
_RETURNED_PART = 0.5
# Counts of pages are halved after evictions of as many pages as the rank has; before evictions of
# this part of its pages, no rank thrashes.
_FIRST_PART = 0.25
# A path that returns within some seconds is on average used half as long ago.
_PAUSES_PER_AGE = 2
# Seconds between two samples of the counts and of the tree's clock.
TICK_S = 1.0


class WorkingSet:
    """The prefixes that one rank used in the last `window_s` seconds (0: no request waits for
    them). `is_on` is False for ranks whose evicted pages come back from host memory."""

    def __init__(self, memory: RankMemory, window_s: float, *, is_on: bool) -> None:
        self._memory = memory
        self._window_s = window_s
        self.is_on = is_on and window_s > 0 and len(memory.groups) == 1
        self._now_s: float | None = None
        # Times of ticks, and the tree's clock then: the last before the window, and all in it.
        self._clocks: deque[tuple[float, int]] = deque()
        self._seen = (0, 0)  # pages evicted and returned up to the last tick
        self._num_evicted = self._num_returned = 0  # lately
        self._num_recent: int | None = None  # pages of the working set, once counted after a tick

    @property
    def is_thrashing(self) -> bool:
        return self._num_returned > _RETURNED_PART * self._num_evicted >= self._least_evicted

    @property
    def _least_evicted(self) -> float:
        return _RETURNED_PART * _FIRST_PART * self._memory.allocator.num_pages

    def tick(self, now_s: float) -> None:
        """Advance the time, and count the pages evicted and returned since the last tick."""
        tree = self._tree()
        if tree is None or (self._now_s is not None and now_s < self._now_s + TICK_S):
            return
        self._now_s, self._num_recent = now_s, None
        self._clocks.append((now_s, tree.clock))
        while len(self._clocks) > 1 and self._clocks[1][0] <= now_s - self._window_s:
            self._clocks.popleft()
        seen, before = (self._memory.cache.num_evicted, tree.policy.num_returned), self._seen
        self._seen = seen
        self._num_evicted += max(seen[0] - before[0], 0)
        self._num_returned += max(seen[1] - before[1], 0)
        if self._num_evicted > self._memory.allocator.num_pages:
            self._num_evicted //= 2
            self._num_returned //= 2

    def holds(self, request: Request, num_read: int) -> bool:
        """Return whether a waiting request, with `num_read` tokens cached, should wait because it
        would evict a part of the working set. Call this only while the rank thrashes."""
        num_lacking = len(request.tokens) - num_read
        is_continued = 2 * num_read >= len(request.tokens)
        if is_continued or request.num_retractions or self._now_s is None:
            return False
        num_spare = self._memory.num_reclaimable_pages - self._count_recent()
        return self._memory.request_pages(num_lacking) > num_spare

    def _tree(self) -> RadixTree | None:
        cache = self._memory.cache
        return cache.tree if self.is_on and isinstance(cache, RadixCache) else None

    def _count_recent(self) -> int:
        """Return the number of unlocked pages of prefixes used in the window."""
        tree = self._tree()
        if self._num_recent is None and tree is not None:
            since = self._clocks[0][1]
            self._num_recent = num_pages_in_use(tree, since, _PAUSES_PER_AGE * self._window_s)
        return self._num_recent or 0


def num_pages_in_use(tree: RadixTree, clock: int, most_s: float) -> int:
    """Return the number of unlocked pages that are a part of a path used after `clock` or, while
    expected returns order the evictions, of a path expected within `most_s` of its last use."""
    num_pages, used = 0, set()
    # A use below a lock does not change the age of the nodes above it: see `RadixTree.trim`.
    for node in reversed(list(tree.nodes())):
        pause_s = tree.policy.expected_pause_s(node)
        is_used = node.last_access > clock if pause_s is None else pause_s < most_s
        if is_used or node.node_id in used:
            if node.parent is not None:
                used.add(node.parent.node_id)
            if not node.locks[0]:
                num_pages += len(node.page_hashes)
    return num_pages
