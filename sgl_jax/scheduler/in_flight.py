"""Prefixes that running requests are computing now, so that others can wait for them and read.

What a running request has computed is on its rank's tree as soon as the step was launched. What it
has still to compute of its prompt is its share in flight: a waiting request whose tokens go on
alike can wait for that instead of computing it a second time.
"""

from collections.abc import Sequence
from typing import NamedTuple

from sgl_jax.mem_cache.prefix_cursor import PrefixCursor, common_prefix_len
from sgl_jax.scheduler.rank_scheduler import RankScheduler
from sgl_jax.scheduler.request import Request

_AT_ROOT = -1


class Leader(NamedTuple):
    """A running request, by its row, and how many of another's tokens it will have computed."""

    row: int
    length: int


class InFlight:
    """The prefixes that prefilling requests of one rank have still to compute, as of one step.

    Args:
        rank: whose running requests they are.
        rows: of those, oldest first.
        min_tokens: less than this is not worth waiting for: it is computed again.
    """

    def __init__(self, rank: RankScheduler, rows: Sequence[int], min_tokens: int) -> None:
        self._rank = rank
        self._min_tokens = max(min_tokens, rank.memory.page_size)
        # By where the row's published part ends in the tree, and the page that comes next.
        self._rows: dict[tuple[int, bytes], int] = {}
        for row in rows:
            self.add(row)

    def add(self, row: int) -> None:
        """What runs in `row` is prefilling; of two that go on alike, the first is the leader."""
        rank, memory = self._rank, self._rank.memory
        request, lease = rank.running.request(row), memory.leases[row]
        if request.kept_len:
            return  # a later turn of a session publishes nothing before it has succeeded
        start = lease.cache_protected_len
        page = rank.running.known_tokens(row)[start : start + memory.page_size]
        key = memory.cache.next_key(lease.node, page, lease.namespace)
        if key is not None and len(page) == memory.page_size:
            place = _AT_ROOT if lease.node is None else lease.node.node_id
            self._rows.setdefault((place, key), row)

    def leader(self, request: Request, cursor: PrefixCursor) -> Leader | None:
        """The row computing more of `request`'s tokens than the tree has, if worth the wait."""
        if not self._rows or cursor.next_key is None or cursor.node is None:
            return None
        place = cursor.node.node_id if cursor.matched else _AT_ROOT
        row = self._rows.get((place, cursor.next_key))
        if row is None:
            return None
        # What is scored is computed a little at a time: that is not worth waiting for.
        running, tokens = self._rank.running, request.matchable()
        theirs, start = running.known_tokens(row)[: running.score_start[row]], cursor.matched
        shared = common_prefix_len(theirs[start:], tokens[start:])
        length = start + shared // self._rank.memory.page_size * self._rank.memory.page_size
        # What the tree has and cannot go on from is saved by waiting as well, if there is an end to
        # wait for: what the row has computed already is no such.
        is_worth_it = length > start and length - cursor.length >= self._min_tokens
        return Leader(row, length) if is_worth_it else None
