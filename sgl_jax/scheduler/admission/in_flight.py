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

import numpy as np

from sgl_jax.core.step_plan import Int32Array, IntpArray
from sgl_jax.mem_cache.tree.prefix_cursor import (
    PrefixCursor,
    SharedPrefix,
    common_prefix_len,
)
from sgl_jax.mem_cache.tree_node import TreeNode
from sgl_jax.scheduler.request import Request
from sgl_jax.scheduler.step_builder import StepBuilder
from sgl_jax.scheduler.step_builders import StepBuilders

# A step's fixed time equals the time of `chunk_size` / `_STEP_PRICE_PART` prompt tokens.
_STEP_PRICE_PART = 8


class Leader(NamedTuple):
    """A running request, by its row, and how many of another request's tokens it will compute."""

    row: int
    length: int


class InFlight:
    """The remaining prompts of all ranks' prefilling requests, in the step of `builders`.

    A rank's rows are listed when a request is first tried there, and read when one first asks for
    their leader.

    Args:
        builders: the ranks' parts of the step.
        tokens: column of the rows' tokens, by joint row.
    """

    def __init__(self, builders: StepBuilders, tokens: Int32Array) -> None:
        self._builders = builders
        self._tokens = tokens
        self._listed: dict[int, list[int]] = {}  # rows by rank
        self._on_rank: dict[int, RankInFlight] = {}  # of ranks that were asked for a leader
        self._unlisted = {each.rank.dp_rank for each in builders.made() if each.is_prefilling}
        # Of each listed row, its rank, its joint row, the length of its published part, and the
        # token after it: most prompts differ there, and the column of tokens is not read.
        self._rows: IntpArray = np.empty((64, 4), np.int64)
        self._num_rows = 0

    def rows(self, ranks: range) -> tuple[IntpArray, Int32Array]:
        """Return the rank, the joint row, the published length and the token after it, of each row
        that may compute a part of the prefix of a request tried on `ranks`, int64[n, 4], and the
        column of tokens."""
        for dp_rank in [each for each in self._unlisted if each in ranks]:
            self._list(dp_rank)
        return self._rows[: self._num_rows], self._tokens

    def leader(
        self, request: Request, prefix: SharedPrefix, dp_rank: int, num_read: int
    ) -> Leader | None:
        """Return the row of a rank that computes more of `request`'s tokens than the tree holds, if
        worth the wait.

        Args:
            request: a waiting request.
            prefix: its prefix.
            dp_rank: a rank with listed rows.
            num_read: tokens that it could read there if it started now.
        """
        asked = self._on_rank.get(dp_rank)
        if asked is None:
            asked = self._on_rank[dp_rank] = RankInFlight(self._builders[dp_rank])
            asked.add(self._listed[dp_rank])
        return asked.leader(request, PrefixCursor(prefix, dp_rank), num_read)

    def add(self, dp_rank: int, row: int) -> None:
        """Add the request that has started in a row of a rank."""
        if dp_rank in self._listed:
            self._add(dp_rank, [row])
        elif self._builders[dp_rank].is_prefilling:
            self._unlisted.add(dp_rank)

    def list_again(self, dp_rank: int) -> None:
        """List the rows of a rank again, after some were retracted."""
        self._on_rank.pop(dp_rank, None)
        if self._listed.pop(dp_rank, None) is not None:
            kept = self._rows[: self._num_rows]
            kept = kept[kept[:, 0] != dp_rank]
            self._num_rows = len(kept)
            self._rows[: len(kept)] = kept
        self._unlisted.discard(dp_rank)
        if self._builders[dp_rank].is_prefilling:
            self._unlisted.add(dp_rank)

    def _list(self, dp_rank: int) -> None:
        self._unlisted.discard(dp_rank)
        self._listed[dp_rank] = []
        self._add(dp_rank, self._builders[dp_rank].prefilling_rows())

    def _add(self, dp_rank: int, rows: Sequence[int]) -> None:
        self._listed[dp_rank] += rows
        if dp_rank in self._on_rank:
            self._on_rank[dp_rank].add(rows)
        tables = self._builders[dp_rank].rank.memory.rows
        for row in rows:
            if self._num_rows == len(self._rows):
                self._rows = np.concatenate([self._rows, self._rows])
            published, joint_row = tables.cache_protected_len.item(row), tables.first_row + row
            token = self._tokens.item(joint_row, published)
            self._rows[self._num_rows] = dp_rank, joint_row, published, token
            self._num_rows += 1


class RankInFlight:
    """The remaining prompts of one rank's listed rows, in the step of `builder`. They are read when
    a request is tried that continues from the same node."""

    def __init__(self, builder: StepBuilder) -> None:
        self._builder, self._rank = builder, builder.rank
        self._page_size = builder.rank.memory.page_size
        self._step_price = builder.chunk_size // _STEP_PRICE_PART
        # Rows with unread prompts, in order, by the id of the node at the end of their published
        # part. Once they are read, the node's list is empty.
        self._unread: dict[int, list[int]] = {}
        # Rows with read prompts: by the id of that node, then by the key of the next page.
        self._rows: dict[int, dict[bytes, int]] = {}
        # Rows that share the beginning of another row's tokens: by that row, the number of shared
        # tokens, and the key of the next page.
        self._branches: dict[tuple[int, int, bytes], int] = {}

    def add(self, rows: Sequence[int]) -> None:
        leases, root = self._rank.memory.leases, self._rank.memory.cache.tree.root
        for row in rows:
            node = leases[row].node or root
            self._unread.setdefault(node.node_id, []).append(row)

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
        wait: see `InFlight.leader`."""
        if not self._builder.is_prefilling:
            return None
        running, memory = self._rank.running, self._rank.memory
        for node, key in cursor.places(self._unread):
            first = self._rows_behind(node, self._unread[node.node_id]).get(key)
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
