"""Prefixes that running requests are computing now, so that others can wait for them and read.

What a running request has computed is on its rank's tree as soon as the step was launched. What it
has still to compute of its prompt is its share in flight: a waiting request whose tokens go on
alike can wait for that instead of computing it a second time.

The wait is worth it if it saves no fewer prompt tokens than it loses. It saves the shared tokens,
once for each request that would otherwise start in this step and compute them: as many as wait at
the same place of the tree, while the step has room. It loses that room, but no more than the price
of a step: a step that computes less is over sooner. A request whose prompt the step cannot
complete gets its first token no later by the wait.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from sgl_jax.core.step_plan import Int32Array
from sgl_jax.mem_cache.prefix_cursor import PrefixCursor, common_prefix_len
from sgl_jax.scheduler.rank_scheduler import RankScheduler
from sgl_jax.scheduler.request import Request

# A step takes as much time as this share of its prompt tokens, beside the tokens that it computes.
_STEP_PRICE_PART = 8


class Leader(NamedTuple):
    """A running request, by its row, and how many of another's tokens it will have computed."""

    row: int
    length: int


class InFlight:
    """The prefixes that prefilling requests of one rank have still to compute, as of one step.

    Args:
        rank: with the running requests.
        rows: of those, oldest first.
        chunk_size: prompt tokens of a step.
        num_tokens_left: those that the step has left for a request of a priority.
    """

    def __init__(
        self,
        rank: RankScheduler,
        rows: Sequence[int],
        chunk_size: int,
        num_tokens_left: Callable[[int], int],
    ) -> None:
        self._rank = rank
        self._num_tokens_left = num_tokens_left
        self._page_size = rank.memory.page_size
        self._step_price = chunk_size // _STEP_PRICE_PART
        # By the tree's node where the row's published part ends, and the key of what comes next.
        self._rows: dict[tuple[int, bytes], int] = {}
        # Rows that go on as another does at first: by that row, the tokens they share, and the
        # page that comes next.
        self._branches: dict[tuple[int, int, bytes], int] = {}
        for row in rows:
            self.add(row)

    def add(self, row: int) -> None:
        """A request prefills in `row`; of two that go on alike, the leader is that of the higher
        priority, else the first."""
        rank, memory = self._rank, self._rank.memory
        request, lease = rank.running.request(row), memory.leases[row]
        if request.kept_len:
            return  # a later turn of a session publishes nothing before it has succeeded
        tokens, start = self._tokens(row), lease.cache_protected_len
        if len(tokens) < start + self._page_size:
            return
        key = memory.cache.next_key(lease.node, tokens[start:], lease.namespace)
        if key is None:
            return
        place = (lease.node or memory.cache.tree.root).node_id, key
        first = self._rows.setdefault(place, row)
        if rank.running.priority[row] > rank.running.priority[first]:
            self._rows[place], first, row = row, row, first
        if first != row:
            self._add_branch(first, row, start)

    def _add_branch(self, first: int, row: int, start: int) -> None:
        """`row` goes on as `first` does behind their first `start` tokens."""
        tokens = self._tokens(row)
        other, shared = self._furthest(first, tokens, start)
        page = tokens[shared : shared + self._page_size]
        if len(page) == self._page_size:
            self._branches[other, shared, page.tobytes()] = row

    def leader(self, request: Request, cursor: PrefixCursor, num_read: int) -> Leader | None:
        """The row computing more of `request`'s tokens than can be read now, if worth the wait.

        Args:
            request: waiting.
            cursor: of its tokens on the rank's tree.
            num_read: tokens that it would not compute if it started now.
        """
        memory = self._rank.memory
        if not self._rows or not memory.can_keep_state:
            return None  # nothing could go on from where the row comes past
        for node, key in cursor.places():
            first = self._rows.get((node.node_id, key))
            if first is None:
                continue
            tokens = request.matchable()
            row, shared = self._furthest(first, tokens, node.end)
            if self._rank.running.priority[row] < request.priority:
                continue  # others may get the step's prompt tokens before it, and hold it up
            length = shared // self._page_size * self._page_size
            num_saved = length - num_read
            # Tokens that the row has published come no nearer to being read by a wait.
            if length <= node.end or num_saved <= 0:
                continue
            num_left = self._num_tokens_left(request.priority)
            num_starts = -(-num_left // (len(request.tokens) - num_read))
            num_alike = memory.cache.cursors.num_awaiting(node, key, num_starts)
            if num_alike * num_saved >= min(num_left, self._step_price):
                return Leader(row, length)
        return None

    def _furthest(self, row: int, tokens: Int32Array, start: int) -> tuple[int, int]:
        """The row that goes on longest as `tokens` do, and how many tokens they share: `row`, which
        shares `start` and the next page, or one that goes on as it does at first."""
        while True:
            start += common_prefix_len(self._tokens(row)[start:], tokens[start:])
            page = tokens[start : start + self._page_size]
            branch = self._branches.get((row, start, page.tobytes()))
            if branch is None:
                return row, start
            row = branch

    def _tokens(self, row: int) -> Int32Array:
        """Those of the row's tokens that come at a step's pace: tokens that are scored come a
        little at a time, which is not worth waiting for."""
        running = self._rank.running
        return running.known_tokens(row)[: running.score_start[row]]
