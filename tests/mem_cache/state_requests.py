"""Requests of a model with recurrent layers, as the memory of a rank sees them; no scheduler.

Every slot of a state is known by what was written to it: the tokens that its state is after. So a
request that would go on from a wrong state is found at once.
"""

import numpy as np

from sgl_jax.core.engine_sizes import LAST_VALUE, CacheGroup, EngineSizes
from sgl_jax.core.step_plan import Int32Array
from sgl_jax.mem_cache.lease import KVLease
from sgl_jax.mem_cache.ledger import audit
from sgl_jax.mem_cache.pages.req_to_token_pool import NO_STATE
from sgl_jax.mem_cache.rank_memory import RankMemory
from sgl_jax.mem_cache.release import publish_prefix, release_kv_cache
from sgl_jax.mem_cache.row_states import NULL_SLOT, state_source, take_snapshot_slot

INTERVAL = 8  # tokens between snapshots
TAIL = 4
MAX_LEN = 48
REFUSED = b"a state after a draft that was refused"
UNWRITTEN = b"nothing yet"

FULL, STATES = CacheGroup(None, 0), CacheGroup(LAST_VALUE, 1, (), True)
WITH_WINDOW = (FULL, CacheGroup(5, 0), STATES)


def make_memory(
    page_size: int = 4,
    *,
    num_pages: int = 60,
    num_snapshots: int = 20,
    num_rows: int = 6,
    max_draft_tokens: int = 0,
    groups: tuple[CacheGroup, ...] = (FULL, STATES),
    use_radix_cache: bool = True,
) -> RankMemory:
    """Of one rank; numbers of pages and snapshots are those that can be taken."""
    sizes = EngineSizes(
        dp_size=1,
        page_size=page_size,
        pool_pages=(1 + num_pages, 1 + num_snapshots),
        num_rows=num_rows,
        max_context_len=MAX_LEN,
        max_step_tokens=64,
        max_prompt_logprob_tokens=64,
        vocab_size=100,
        max_draft_tokens=max_draft_tokens,
        groups=groups,
        snapshot_interval=max(INTERVAL, page_size),
        tail_interval=max(TAIL, page_size),
        max_step_snapshots=8,
    )
    return RankMemory(0, sizes, use_radix_cache=use_radix_cache, eviction_policy="lru")


def numbers(count: int = MAX_LEN, *, then: int = 0, at: int = MAX_LEN) -> Int32Array:
    """The tokens 0, 1, ..., of which those from `at` on are others, by `then`."""
    tokens = np.arange(count, dtype=np.int32)
    tokens[at:] += 1000 * then
    return tokens


class Request:
    """A request's tokens, all that it will ever have, and its lease."""

    def __init__(self, tokens: Int32Array, lease: KVLease) -> None:
        self.tokens = tokens
        self.lease = lease
        self.slot: int | None = None  # of its state; None where it starts, or starts again
        self.generates = False  # then it computes no more chunks

    def prefix(self, length: int) -> bytes:
        return self.tokens[:length].tobytes()


class Device:
    """What is in the slots of states, and the steps that write there."""

    def __init__(self, memory: RankMemory) -> None:
        self.memory = memory
        self.sizes = memory.sizes
        self.written: dict[int, bytes] = {NULL_SLOT: b""}

    def open(self, tokens: Int32Array) -> Request:
        """A request starts on what is cached of all its tokens but the last."""
        return Request(tokens, self.memory.open_lease(tokens[:-1]))

    def prefill(self, request: Request, end: int, keep: tuple[int, ...] | None = None) -> bool:
        """A step computes the tokens up to `end` and keeps the states after `keep` of them, as far
        as there are slots: by default those at multiples of the interval, and at the last page."""
        lease, sizes = request.lease, self.sizes
        start = lease.kv_committed_len
        if end <= start or not self.memory.grow_row(lease.row, end):
            return False
        own = self._half_to_write(request)
        if keep is None:
            page = sizes.page_size
            keep = (*range(0, end + 1, sizes.snapshot_interval), end // page * page)
        for length in sorted({each for each in keep if start < each <= end}):
            slot = take_snapshot_slot(self.memory, lease.row, length)
            if slot:
                self.written[slot] = request.prefix(length)
        self._write(request, own, end, [request.prefix(end)])
        self.memory.commit_rows(np.array([lease.row]), np.array([end]))
        request.slot = own
        return True

    def decode(
        self, request: Request, num_drafts: int = 0, num_accepted: int = 0, *, is_known: bool = True
    ) -> bool:
        """A step computes a token and drafts, of which the first ones are accepted: as `commit`
        is told later. Not `is_known`: the step before it was not read, either."""
        lease, sizes, row = request.lease, self.sizes, request.lease.row
        start = lease.kv_committed_len
        end = start + 1 + num_drafts
        if end > MAX_LEN or not self.memory.grow_row(row, end):
            return False
        request.generates = True
        own = self._half_to_write(request)
        following = (start // sizes.tail_interval + 1) * sizes.tail_interval
        slot = take_snapshot_slot(self.memory, row, following) if following <= end else NULL_SLOT
        if slot:
            is_written = following <= start + 1 + num_accepted
            self.written[slot] = request.prefix(following) if is_written else UNWRITTEN
        states = [request.prefix(start + 1 + i) for i in range(1 + num_accepted)]
        states += [REFUSED] * (num_drafts - num_accepted)
        self._write(request, own, start + 1, states)
        if not is_known:
            self.memory.rows.state_lens[self.memory.rows.state_half[row], row] = NO_STATE
        self.memory.commit_rows(np.array([row]), np.array([start + 1]))
        request.slot = own + num_accepted
        return True

    def accept(self, request: Request, num_accepted: int) -> None:
        """The result of a step with drafts was read."""
        row = request.lease.row
        committed = request.lease.kv_committed_len + num_accepted
        self.memory.commit_rows(np.array([row]), np.array([committed]))

    def publish(self, request: Request) -> None:
        publish_prefix(self.memory, request.lease, request.tokens)

    def end(self, request: Request, num_known: int = MAX_LEN, *, insert: bool = True) -> None:
        release_kv_cache(self.memory, request.lease, request.tokens[:num_known], insert=insert)
        request.slot = None

    def check(self, num_running: int | None = None) -> None:
        """The ledger, and that every snapshot of the tree is after the tokens that lead to it."""
        audit(self.memory, num_running)
        group, page_size = self.memory.state_group, self.sizes.page_size
        for node in self.memory.cache.nodes():
            tokens, slots = tokens_of(node), self.memory.cache.tree.pages_to(node)[group]
            for column in slots.nonzero()[0].tolist():
                expected = tokens[: (column + 1) * page_size].tobytes()
                assert self.written[int(slots[column])] == expected

    def _half_to_write(self, request: Request) -> int:
        """The first slot of the half that the next step writes; checks the one it reads."""
        sizes, rows, row = self.sizes, self.memory.rows, request.lease.row
        latest = int(rows.state_half[row])
        if request.slot is None:
            request.slot = state_source(self.memory, request.lease)
            first = sizes.own_slot(row, 0)
            if request.slot >= first:
                latest = (request.slot - first) // (1 + sizes.max_draft_tokens)
        expected = request.prefix(request.lease.kv_committed_len)
        assert self.written[request.slot] == expected, "the state is after other tokens"
        return sizes.own_slot(row, 1 - latest)

    def _write(self, request: Request, own: int, first: int, states: list[bytes]) -> None:
        """States after `first` tokens and more, from the slot `own` on."""
        sizes, rows, row = self.sizes, self.memory.rows, request.lease.row
        half = (own - sizes.own_slot(row, 0)) // (1 + sizes.max_draft_tokens)
        rows.state_half[row], rows.state_lens[half, row] = half, first
        rows.state_drafts[half, row] = len(states) - 1
        self.written.update(enumerate(states, own))


def tokens_of(node) -> Int32Array:
    """All tokens from the root to the end of `node`."""
    parts = []
    while node is not None:
        parts.append(node.key)
        node = node.parent
    return np.concatenate(parts[::-1])
