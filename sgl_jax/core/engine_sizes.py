"""The sizes an engine was built for, fixed at start-up and the same on every rank."""

from typing import NamedTuple


class EngineSizes(NamedTuple):
    """What the executor offers and the scheduler must stay within.

    Page 0 of each rank (the null page) and row 0 (the null row) are counted in `num_pages` and
    `num_rows`, are never handed out, and take the writes of padding.
    """

    dp_size: int
    page_size: int  # tokens
    num_pages: int  # per rank, null page included
    num_rows: int  # per rank, null row included: at most num_rows - 1 requests run on a rank
    max_context_len: int  # tokens of one request, prompt and output together
    max_step_tokens: int  # query tokens per rank and step
    # Prompt tokens per rank and step whose successors' log-probabilities are reported.
    max_prompt_logprob_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()  # those that end an output
    # Query tokens per rank that steps are padded to, ascending, so that a step may be planned to
    # fill one; empty if the executor does not pad.
    step_token_shapes: tuple[int, ...] = ()
    # Tokens drafted per row and step at most; 0 without speculative decoding.
    max_draft_tokens: int = 0

    @property
    def pages_per_row(self) -> int:
        """Pages that hold one request of the longest context."""
        return -(-self.max_context_len // self.page_size)

    @property
    def max_chunk_tokens(self) -> int:
        """Prefill tokens per rank and step: decode rows and their drafts come on top of them."""
        return self.max_step_tokens - (self.num_rows - 1) * (1 + self.max_draft_tokens)

    @property
    def max_request_tokens(self) -> int:
        """Tokens of the longest request one rank can hold when it is alone there."""
        return min(self.max_context_len, (self.num_pages - 1) * self.page_size)
