"""Finds prefixes being computed by running requests, for other requests to wait for and read.

The computed tokens of a running request are on its rank's tree as soon as the step was launched.
The rest of its prompt is in flight: a waiting request with the same tokens can wait for it instead
of computing it a second time.

The wait pays if it saves at least as many prompt tokens as it loses. It saves the shared tokens,
once for each request that would otherwise start in this step and compute them: the requests waiting
at the same place of the tree, while the step has room. It loses that room, but at most the price of
a step, since a step that computes less ends sooner. If the step cannot complete a request's prompt,
the wait does not delay its first token.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from sgl_jax.core.step_plan import Int32Array
from sgl_jax.mem_cache.tree.prefix_cursor import PrefixCursor, common_prefix_len
from sgl_jax.scheduler.rank_scheduler import RankScheduler
from sgl_jax.scheduler.request import Request

# A step's fixed time equals the time of `chunk_size` / `_STEP_PRICE_PART` prompt tokens.
_STEP_PRICE_PART = 8


class Leader(NamedTuple):
    """A running request, by its row, and how many of another request's tokens it will compute."""

    row: int
    length: int


class InFlight:
    """The remaining prompts of one rank's prefilling requests, as of one step.

    Args:
        rank: the rank of the running requests.
        rows: rows of the prefilling requests, the highest priority first, then the oldest.
        chunk_size: prompt tokens of a step.
        num_tokens_left: returns the tokens that the step has left for a request, by priority,
            tenant and number of tokens to compute.
        is_served: returns whether a row gets prompt tokens of the step.
    """

    def __init__(
        self,
        rank: RankScheduler,
        rows: Sequence[int],
        chunk_size: int,
        num_tokens_left: Callable[[int, int, int], int],
        is_served: Callable[[int], bool],
    ) -> None:
        self._rank = rank
        self._num_tokens_left = num_tokens_left
        self._is_served = is_served
        self._page_size = rank.memory.page_size
        self._step_price = chunk_size // _STEP_PRICE_PART
        # Row by the tree's node at the end of its published part, and the key of the next page.
        self._rows: dict[tuple[int, bytes], int] = {}
        self._node_ids: set[int] = set()  # the nodes in `_rows`
        # Rows that share the beginning of another row's tokens: by that row, the number of shared
        # tokens, and the key of the next page.
        self._branches: dict[tuple[int, int, bytes], int] = {}
        for row in rows:
            self.add(row)

    def add(self, row: int) -> None:
        """Add the request that prefills in `row`. If two share a beginning, the one of higher
        priority leads, else the first."""
        rank, memory = self._rank, self._rank.memory
        request, lease = rank.running.request(row), memory.leases[row]
        if request.kept_len:
            return  # a later turn of a session publishes only after it succeeds
        start, end = lease.cache_protected_len, rank.running.score_start[row]
        if min(rank.running.known_len[row], end) < start + self._page_size:
            return
        key = rank.next_key(row)
        if key is None:
            return
        place = (lease.node or memory.cache.tree.root).node_id, key
        first = self._rows.setdefault(place, row)
        self._node_ids.add(place[0])
        if rank.running.priority[row] > rank.running.priority[first]:
            self._rows[place], first, row = row, row, first
        if first != row:
            self._add_branch(first, row, start)

    def _add_branch(self, first: int, row: int, start: int) -> None:
        """Record that `row` continues as `first` does after their first `start` tokens."""
        tokens = self._tokens(row)
        other, shared = self._furthest(first, tokens, start)
        page = tokens[shared : shared + self._page_size]
        if len(page) == self._page_size:
            self._branches[other, shared, page.tobytes()] = row

    def leader(self, request: Request, cursor: PrefixCursor, num_read: int) -> Leader | None:
        """Return the row that computes more of `request`'s tokens than the tree holds, if worth the
        wait.

        Args:
            request: a waiting request.
            cursor: the cursor of its tokens on the rank's tree.
            num_read: tokens that it could read if it started now.
        """
        memory = self._rank.memory
        if not self._rows or not memory.can_keep_state:
            return None  # no recurrent state is kept there, so nothing can resume from it
        for node, key in cursor.places(self._node_ids):
            first = self._rows.get((node.node_id, key))
            if first is None:
                continue
            tokens = request.matchable()
            row, shared = self._furthest(first, tokens, node.end)
            if self._rank.running.priority[row] < request.priority or not self._is_served(row):
                continue  # other requests may get the step's prompt tokens first
            length = shared // self._page_size * self._page_size
            num_saved = length - num_read
            # A wait gains nothing for tokens that the row has already published.
            if length <= node.end or num_saved <= 0:
                continue
            num_wanted = len(request.tokens) - num_read
            num_left = self._num_tokens_left(request.priority, request.tenant, num_wanted)
            num_starts = -(-num_left // num_wanted)
            num_alike = memory.cache.cursors.num_awaiting(node, key, num_starts)
            if num_alike * num_saved >= min(num_left, self._step_price):
                return Leader(row, length)
        return None

    def _furthest(self, row: int, tokens: Int32Array, start: int) -> tuple[int, int]:
        """Return the row with the longest beginning shared with `tokens`, and its length: `row`,
        which shares `start` tokens and the next page, or a branch of it."""
        while True:
            start += common_prefix_len(self._tokens(row)[start:], tokens[start:])
            page = tokens[start : start + self._page_size]
            branch = self._branches.get((row, start, page.tobytes()))
            if branch is None:
                return row, start
            row = branch

    def _tokens(self, row: int) -> Int32Array:
        """Return the row's tokens before any scored token. Scored tokens are computed a few at a
        time, so they are not worth a wait."""
        running = self._rank.running
        return running.known_tokens(row)[: running.score_start[row]]
