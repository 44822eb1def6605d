"""The prompts of a rank's running requests: publishes computed parts for other requests."""

from collections.abc import Sequence

from sgl_jax.core.step_plan import RowIndex
from sgl_jax.mem_cache.rank_memory import RankMemory
from sgl_jax.mem_cache.release import publish_prefix
from sgl_jax.scheduler.running_rows import RunningRows

# Limit of waiting requests checked for the tokens that they await from a row.
_MAX_BRANCHES = 16


class RunningPrompts:
    """The prompts of the requests in `running`; `unpublished` has the rows of partly computed
    prompts with tokens that are not published yet, an ordered set."""

    def __init__(self, memory: RankMemory, running: RunningRows) -> None:
        self._memory = memory
        self._running = running
        self._has_states = memory.sizes.state_group is not None
        self._has_windows = any(group.sliding_window is not None for group in memory.groups)
        self.unpublished: dict[int, None] = {}
        # By row, the length of its published part and the key of the next page.
        self._next_keys: dict[int, tuple[int, bytes | None]] = {}
        # With recurrent layers: rows before the launch of their first step, and the positions at
        # which other prompts branch off from rows' prompts.
        self._starting: set[int] = set()
        self._branch_lens: dict[int, set[int]] = {}

    def enter(self, row: int, cached_len: int) -> None:
        """Add a request with `cached_len` tokens on the tree."""
        if self._has_states:
            self._starting.add(row)
            self._branch_lens[row] = {cached_len}

    def leave(self, row: int) -> None:
        self.unpublished.pop(row, None)
        self._next_keys.pop(row, None)
        self._starting.discard(row)
        self._branch_lens.pop(row, None)

    def clear(self) -> None:
        self.unpublished.clear()
        self._next_keys.clear()
        self._starting.clear()
        self._branch_lens.clear()

    def offer(self, rows: Sequence[int]) -> None:
        """Make prompt tokens of `rows`, from a launched step, readable by other requests. Tokens of
        an incomplete prompt are published once another request could continue from them."""
        for row in rows:
            # A later turn of a session is published when it has succeeded: until then the session
            # may have to return to its start.
            if self._running.request(row).kept_len:
                continue
            lease = self._memory.leases[row]
            # The last token is computed in a decode row, not in a chunk. Publish before a window
            # passes pages: another prompt that continues from there needs them.
            known_len = self._running.columns.known_len[row]
            if self._has_windows or lease.kv_committed_len + 1 >= known_len:
                self.unpublished.pop(row, None)
                publish_prefix(self._memory, lease, self._running.known_tokens(row))
            else:
                self.unpublished[row] = None

    def keep_branch(self, row: int, length: int) -> None:
        """Record that a waiting request will continue from the first `length` tokens of `row`."""
        if self._has_states:
            self._branch_lens[row].add(length)

    def branch_lens(self, row: int) -> list[int]:
        """Return the positions at which other prompts branch off from `row`'s: the cached length at
        its admission, and the lengths shared with waiting requests."""
        lens = list(self._branch_lens[row])
        if not self._running.request(row).kept_len:  # else nothing is published yet
            lease = self._memory.leases[row]
            tokens = self._running.known_tokens(row)[lease.cache_protected_len :]
            ahead = self._memory.cache.cursors.awaited_lens(
                lease.node, self.next_key(row), tokens, _MAX_BRANCHES
            )
            lens += [lease.cache_protected_len + each for each in ahead]
        return lens

    def take_starting(self, rows: RowIndex) -> list[tuple[int, int]]:
        """Return index and row of the step's `rows` that run for the first time since their
        admission. Each is returned once."""
        if not self._starting:
            return []
        found = [(i, row) for i, row in enumerate(rows.tolist()) if row in self._starting]
        self._starting.difference_update(row for _, row in found)
        return found

    def publish_awaited(self) -> None:
        """Publish computed tokens of prompts that waiting requests could continue from."""
        memory = self._memory
        computed, published = memory.rows.kv_committed_len, memory.rows.cache_protected_len
        for row in self.unpublished:
            if computed.item(row) < published.item(row) + memory.page_size:
                continue  # there is no further page
            lease = memory.leases[row]
            if memory.cache.cursors.is_awaited(lease.node, self.next_key(row)):
                publish_prefix(memory, lease, self._running.known_tokens(row))

    def next_key(self, row: int) -> bytes | None:
        """Return the key of the first page after `row`'s published part; None while that page is
        incomplete."""
        length = self._memory.rows.cache_protected_len.item(row)
        known_length, key = self._next_keys.get(row, (-1, None))
        if known_length == length:
            return key
        if self._running.columns.known_len[row] < length + self._memory.page_size:
            return None
        lease = self._memory.leases[row]
        tokens = self._running.known_tokens(row)[length:]
        key = self._memory.cache.next_key(lease.node, tokens, lease.namespace)
        self._next_keys[row] = length, key
        return key
