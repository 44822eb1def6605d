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

from collections.abc import Sequence
from typing import NamedTuple

from sgl_jax.core.step_plan import Int32Array
from sgl_jax.mem_cache.tree.prefix_cursor import PrefixCursor, common_prefix_len
from sgl_jax.mem_cache.tree_node import TreeNode
from sgl_jax.scheduler.request import Request
from sgl_jax.scheduler.step_builder import StepBuilder

# A step's fixed time equals the time of `chunk_size` / `_STEP_PRICE_PART` prompt tokens.
_STEP_PRICE_PART = 8


class Leader(NamedTuple):
    """A running request, by its row, and how many of another request's tokens it will compute."""

    row: int
    length: int


class InFlight:
    """The remaining prompts of one rank's prefilling requests, in the step of `builder`.

    Rows are listed when a request is first tried, and their prompts read when a request is tried
    that continues from the same node: most steps need few of them.
    """

    def __init__(self, builder: StepBuilder) -> None:
        self._builder, self._rank = builder, builder.rank
        self._page_size = builder.rank.memory.page_size
        self._step_price = builder.chunk_size // _STEP_PRICE_PART
        # Rows with unread prompts, in order, by the id of the node at the end of their
        # published part; None until they are listed. Once they are read, the node's list is empty.
        self._unread: dict[int, list[int]] | None = None
        # Rows with read prompts: by the id of that node, then by the key of the next page.
        self._rows: dict[int, dict[bytes, int]] = {}
        # Rows that share the beginning of another row's tokens: by that row, the number of shared
        # tokens, and the key of the next page.
        self._branches: dict[tuple[int, int, bytes], int] = {}

    def add(self, row: int) -> None:
        """Add the request that has started in `row`."""
        if self._unread is not None:
            self._list([row], self._unread)

    def _list(self, rows: Sequence[int], unread: dict[int, list[int]]) -> None:
        leases, root = self._rank.memory.leases, self._rank.memory.cache.tree.root
        for row in rows:
            node = leases[row].node or root
            unread.setdefault(node.node_id, []).append(row)

    def _rows_behind(self, node: TreeNode, unread: list[int]) -> dict[bytes, int]:
        """Read the `unread` rows listed at `node`. Return the leading row after it for each key of
        a next page: of several, the one of the highest priority, else the first."""
        found = self._rows.setdefault(node.node_id, {})
        for row in unread:
            self._read(row, found)
        unread.clear()
        return found

    def _read(self, row: int, found: dict[bytes, int]) -> None:
        rank, running = self._rank, self._rank.running
        if running.request(row).kept_len:
            return  # a later turn of a session publishes only after it succeeds
        start = rank.memory.leases[row].cache_protected_len
        columns = running.columns
        if min(columns.known_len[row], columns.score_start[row]) < start + self._page_size:
            return
        key = rank.prompts.next_key(row)
        if key is None:
            return
        first = found.setdefault(key, row)
        if running.columns.priority[row] > running.columns.priority[first]:
            found[key], first, row = row, row, first
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
        if not self._builder.is_prefilling:
            return None
        unread = self._unread
        if unread is None:
            unread = self._unread = {}
            self._list(self._builder.prefilling_rows(), unread)
        running, memory = self._rank.running, self._rank.memory
        for node, key in cursor.places(unread):
            first = self._rows_behind(node, unread[node.node_id]).get(key)
            if first is None:
                continue
            if not memory.can_keep_state:
                return None  # no later request could continue without a kept state
            tokens = request.matchable()
            row, shared = self._furthest(first, tokens, node.end)
            if running.columns.priority[row] < request.priority or not self._builder.is_served(row):
                continue  # other requests may get the step's prompt tokens first, and delay the row
            length = shared // self._page_size * self._page_size
            num_saved = length - num_read
            # A wait gains nothing for tokens that the row has already published.
            if length <= node.end or num_saved <= 0:
                continue
            num_wanted = len(request.tokens) - num_read
            num_left = self._builder.num_tokens_left(request.priority, request.tenant, num_wanted)
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
        return running.known_tokens(row)[: running.columns.score_start[row]]
