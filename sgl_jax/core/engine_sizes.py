"""Sizes of an engine, fixed at start-up and equal on all ranks."""

from typing import NamedTuple

from sgl_jax.core.sampling_params import MAX_STOP_TOKEN_IDS

# Sliding window of recurrent layers: a query with a window of n tokens reads n - 1 cached tokens,
# and a recurrence reads only the state after the last token.
LAST_VALUE = 2


class CacheGroup(NamedTuple):
    """Layers of one kind: full attention, sliding-window attention, or a recurrence.

    A page holds the KV of its tokens for all layers of one group. Groups with the same number of
    layers have pages of the same shape and share a pool. A recurrent group has no KV. Its states,
    one per snapshot, have a separate pool: each cell of its page table is the slot of the state
    after the page's last token, or 0 if that state was not kept. At most one group is recurrent,
    and it is the last.
    """

    sliding_window: int | None  # in tokens, including the query; None: full attention
    pool: int = 0  # index of the group's pool
    layers: tuple[int, ...] = ()  # indices of the model's layers
    is_recurrent: bool = False  # then `sliding_window` is LAST_VALUE


# Every layer attends to every token.
FULL_ATTENTION = (CacheGroup(None),)

# Launches for which a decode row may hold slots: two in flight and one planned.
_LAUNCHES_AHEAD = 3


class EngineSizes(NamedTuple):
    """Limits of the executor, which the scheduler must not exceed.

    Page 0 of each pool (the null page) and row 0 (the null row) receive the writes of padding. They
    are never assigned to a request, but `pool_pages` and `num_rows` include them.
    """

    dp_size: int
    page_size: int  # tokens
    pool_pages: tuple[int, ...]  # pages of each pool per rank, including the null page
    num_rows: int  # per rank, including the null row: at most num_rows - 1 requests run on a rank
    max_context_len: int  # tokens of one request, prompt and output
    max_step_tokens: int  # query tokens per rank and step
    # Maximum prompt positions per rank and step that report the next token's log-probability.
    max_prompt_logprob_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()  # each ends an output
    # Padded sizes of a step in query tokens per rank, ascending, for any number of rows; the
    # scheduler may fill a step up to one of them. Empty if the executor does not pad.
    step_token_shapes: tuple[int, ...] = ()
    max_draft_tokens: int = 0  # per row and step; 0 without speculative decoding
    # Slots past a row's drafts where a draft layer writes KV while it computes the next drafts.
    lookahead_slots: int = 0
    max_decode_steps: int = 1  # decode steps of one plan; 1 with drafts
    groups: tuple[CacheGroup, ...] = FULL_ATTENTION  # cache groups of the model's layers
    # Recurrent layers: tokens between kept states, multiples of the page size. A state is kept at
    # each multiple of `snapshot_interval` in prompt and output, and at the last multiple of
    # `tail_interval` in the output.
    snapshot_interval: int = 0
    tail_interval: int = 0
    max_step_snapshots: int = 0  # maximum states kept per rank and step
    # Blocks of each pool in host memory per rank, including the null block; empty: none.
    host_blocks: tuple[int, ...] = ()
    # Images: rows of a rank's table of vectors, a row for each token; 0: no images are served.
    image_slots: int = 0
    max_images: int = 0  # of a request
    max_image_tokens: int = 0  # of an image
    image_token_side: int = 1  # pixels of a token in each direction
    whole_images: bool = False  # a step computes all tokens of an image, or none

    @property
    def image_token_values(self) -> int:
        """Return the bytes of the pixels of an image's token, of three colours."""
        return 3 * self.image_token_side**2

    @property
    def max_stop_ids(self) -> int:
        """Return the maximum number of token ids that end one request, including the model's."""
        return len(self.eos_token_ids) + MAX_STOP_TOKEN_IDS

    @property
    def state_group(self) -> int | None:
        """Return the index of the recurrent group in `groups`, or None."""
        last = len(self.groups) - 1
        return last if self.groups[last].is_recurrent else None

    @property
    def num_snapshots(self) -> int:
        """Return the slots in the pool of kept states, null slot included; 0 if not recurrent."""
        group = self.state_group
        return 0 if group is None else self.pool_pages[self.groups[group].pool]

    @property
    def num_state_slots(self) -> int:
        """Return the state slots of one rank: the pool of kept states, then the rows' slots."""
        if self.state_group is None:
            return 0
        return self.own_slot(self.num_rows, 0)

    def own_slot(self, row: int, half: int, index: int = 0) -> int:
        """Return the slot of `row` in its half 0 or 1 for the state after `index` drafts."""
        return self.num_snapshots + (2 * row + half) * (1 + self.max_draft_tokens) + index

    @property
    def pages_per_row(self) -> int:
        return -(-self.max_context_len // self.page_size)

    @property
    def max_chunk_tokens(self) -> int:
        """Return the maximum prefill tokens per rank and step; the rest is for decode rows."""
        return self.max_step_tokens - (self.num_rows - 1) * (1 + self.max_draft_tokens)

    def row_pages(self, group: CacheGroup, num_tokens: int | None = None) -> int:
        """Return the maximum pages of `group` for a request of `num_tokens` (None: the longest).

        With a sliding window: the pages that the first query of a step reads, plus the pages of the
        step's tokens. The position of the first query is rounded down to a page, because a cached
        prefix ends at a page boundary.
        """
        pages = self.pages_per_row if num_tokens is None else self.pages_for(num_tokens)
        if group.sliding_window is None:
            return pages
        return min(pages, self._window_pages(group.sliding_window, self.max_chunk_tokens))

    def resting_pages(self, group: CacheGroup) -> int:
        """Return the maximum pages of a sliding-window group for a row without a prompt chunk."""
        assert group.sliding_window is not None
        return min(self.pages_per_row, self._window_pages(group.sliding_window, 1))

    def _window_pages(self, window: int, num_ahead: int) -> int:
        most_gained = max(1 + self.max_draft_tokens, self.max_decode_steps)  # tokens of a launch
        most_ahead = _LAUNCHES_AHEAD * most_gained + self.lookahead_slots
        num_ahead = max(num_ahead, most_ahead)
        return self.pages_for(window - 1) + self.pages_for(num_ahead - 1) + 1

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def request_pages(self, num_tokens: int) -> int:
        """Return the maximum pages of the first pool held by a request of `num_tokens` tokens."""
        return sum(self.row_pages(group, num_tokens) for group in self.groups if group.pool == 0)

    def tokens_within(self, num_pages: int) -> int:
        """Return the length of the longest request that fits in `num_pages` of the first pool."""
        sharing = [group for group in self.groups if group.pool == 0]
        windows = [group for group in sharing if group.sliding_window is not None]
        num_tables = len(sharing)
        # A full window takes no more pages, however long the request becomes.
        for full in sorted(map(self.row_pages, windows)):
            if num_tables * full > num_pages:
                break
            num_pages, num_tables = num_pages - full, num_tables - 1
        most = num_pages // num_tables if num_tables else self.pages_per_row
        return most * self.page_size

    @property
    def max_request_tokens(self) -> int:
        """Return the length of the longest request that fits on a rank without other requests."""
        return min(self.max_context_len, self.tokens_within(self.pool_pages[0] - 1))
