"""Sizes of an engine: fixed at start-up and equal on all ranks."""

from typing import NamedTuple

from sgl_jax.core.cache_groups import FULL_ATTENTION, CacheGroup
from sgl_jax.core.sampling_params import MAX_STOP_TOKEN_IDS

# Steps for whose tokens a decode row may hold slots: two in flight, and one that is planned.
_STEPS_AHEAD = 3


class EngineSizes(NamedTuple):
    """The sizes of the executor, which the scheduler must stay within.

    Page 0 of each pool (the null page) and row 0 (the null row) receive the writes of padding. No
    request gets them, but `pool_pages` and `num_rows` count them.
    """

    dp_size: int
    page_size: int  # tokens
    pool_pages: tuple[int, ...]  # of each pool, per rank, null page included
    num_rows: int  # per rank, null row included: at most num_rows - 1 requests run on a rank
    max_context_len: int  # tokens of one request, prompt and output together
    max_step_tokens: int  # query tokens per rank and step
    # Prompt positions per rank and step that report the log-probability of the next token, at most.
    max_prompt_logprob_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()  # each ends an output
    # Padded sizes of a step in query tokens per rank, ascending, each for any number of rows; the
    # scheduler may fill a step up to one of them. Empty if the executor does not pad.
    step_token_shapes: tuple[int, ...] = ()
    max_draft_tokens: int = 0  # drafted per row and step; 0 without speculative decoding
    # Slots past a row's drafts, to which a draft layer writes KV while it makes the next ones.
    lookahead_slots: int = 0
    groups: tuple[CacheGroup, ...] = FULL_ATTENTION  # of the model's layers
    # Recurrent layers: tokens between kept states, multiples of the page size. A state is kept at
    # each multiple of `snapshot_interval` in prompt and output. In the output, the state at the
    # last multiple of `tail_interval` is kept too.
    snapshot_interval: int = 0
    tail_interval: int = 0
    max_step_snapshots: int = 0  # states that one rank keeps in one step, at most
    # Blocks of each pool in the host's memory, per rank, null block included; empty: none.
    host_blocks: tuple[int, ...] = ()

    @property
    def max_stop_ids(self) -> int:
        """Token ids that end one request, at most: the model's and the request's."""
        return len(self.eos_token_ids) + MAX_STOP_TOKEN_IDS

    @property
    def state_group(self) -> int | None:
        """Index of the recurrent group in `groups`; None if there is none."""
        last = len(self.groups) - 1
        return last if self.groups[last].is_recurrent else None

    @property
    def num_snapshots(self) -> int:
        """Slots of the pool of kept states, including the null slot; 0 without recurrent layers."""
        group = self.state_group
        return 0 if group is None else self.pool_pages[self.groups[group].pool]

    @property
    def num_state_slots(self) -> int:
        """State slots of one rank: first the pool of kept states, then each row's own slots."""
        if self.state_group is None:
            return 0
        return self.own_slot(self.num_rows, 0)

    def own_slot(self, row: int, half: int, index: int = 0) -> int:
        """The slot of `row`, in its half 0 or 1, for the state after `index` drafts."""
        return self.num_snapshots + (2 * row + half) * (1 + self.max_draft_tokens) + index

    @property
    def pages_per_row(self) -> int:
        """Pages that hold one request of the longest context."""
        return -(-self.max_context_len // self.page_size)

    @property
    def max_chunk_tokens(self) -> int:
        """Prefill tokens per rank and step, at most; the rest of a step is for decode rows."""
        return self.max_step_tokens - (self.num_rows - 1) * (1 + self.max_draft_tokens)

    def row_pages(self, group: CacheGroup, num_tokens: int | None = None) -> int:
        """Most pages of `group` that a request of `num_tokens` (None: the longest) holds.

        With a sliding window: the pages that the first query of a step reads, and the pages of the
        step's tokens. The position of the first query is rounded down to a page, since a cached
        prefix ends at a page's end.
        """
        pages = self.pages_per_row if num_tokens is None else self.pages_for(num_tokens)
        if group.sliding_window is None:
            return pages
        return min(pages, self._window_pages(group.sliding_window, self.max_chunk_tokens))

    def resting_pages(self, group: CacheGroup) -> int:
        """Most pages of a sliding-window group that a row holds without a prompt chunk."""
        assert group.sliding_window is not None
        return min(self.pages_per_row, self._window_pages(group.sliding_window, 1))

    def _window_pages(self, window: int, num_ahead: int) -> int:
        most_ahead = _STEPS_AHEAD * (1 + self.max_draft_tokens) + self.lookahead_slots
        num_ahead = max(num_ahead, most_ahead)
        return self.pages_for(window - 1) + self.pages_for(num_ahead - 1) + 1

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def request_pages(self, num_tokens: int) -> int:
        """Most pages of the first pool that a request of `num_tokens` holds."""
        return sum(self.row_pages(group, num_tokens) for group in self.groups if group.pool == 0)

    def tokens_within(self, num_pages: int) -> int:
        """Tokens of the longest request that holds no more than `num_pages` of the first pool."""
        sharing = [group for group in self.groups if group.pool == 0]
        windows = [group for group in sharing if group.sliding_window is not None]
        num_tables = len(sharing)
        # Once a window is full, it takes no more pages, however long the request becomes.
        for full in sorted(map(self.row_pages, windows)):
            if num_tables * full > num_pages:
                break
            num_pages, num_tables = num_pages - full, num_tables - 1
        most = num_pages // num_tables if num_tables else self.pages_per_row
        return most * self.page_size

    @property
    def max_request_tokens(self) -> int:
        """Tokens of the longest request that a rank can hold when no other request runs there."""
        return min(self.max_context_len, self.tokens_within(self.pool_pages[0] - 1))
