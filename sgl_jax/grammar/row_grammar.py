"""The position of one output in its grammar."""

from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher
from llguidance.numpy import fill_next_token_bitmask

from sgl_jax.core.step_plan import Int32Array, mask_words


class RowGrammar:
    """Follows the tokens of an output, and masks the possible next tokens.

    It reads each token once. A retract changes nothing, because the output keeps its tokens.
    """

    def __init__(self, matcher: LLMatcher, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._matcher = matcher
        self._num_read = 0
        self._end: Int32Array = np.zeros(mask_words(vocab_size), np.int32)
        ids = np.array(eos_token_ids, np.int64)
        np.bitwise_or.at(
            self._end.view(np.uint32), ids >> 5, np.uint32(1) << (ids & 31).astype(np.uint32)
        )

    @property
    def error(self) -> str:
        """Return the reason for a failed grammar, a forbidden token or its cost; "" if none."""
        # The rest of llguidance's message holds the output.
        message: str = self._matcher.get_error()
        return message.partition("\n")[0]

    def read(self, output: Int32Array) -> None:
        """Read the new tokens of `output`, int32[n], the whole output so far."""
        fresh = output[self._num_read :].tolist()
        self._num_read = len(output)
        if fresh:
            self._matcher.consume_tokens(fresh)

    def masks(self, drafts: Sequence[int], masks: Int32Array) -> None:
        """Write the tokens allowed next, and after each draft, to `masks`.

        `masks` is int32[1 + len(drafts), mask_words(vocab_size)]. If no token may follow, a mask
        holds the end tokens. Nothing is written after a draft that the grammar forbids.
        """
        num_tried = 0
        for place in range(1 + len(drafts)):
            self._write_mask(masks[place])
            if place == len(drafts) or self._matcher.is_stopped():
                break
            if not self._matcher.try_consume_tokens([drafts[place]]):
                break
            num_tried += 1
        if num_tried:
            self._matcher.rollback(num_tried)

    def expected(self) -> list[int]:
        """Return the next tokens, as far as the grammar forces them."""
        if self._matcher.is_stopped():
            return []
        tokens: list[int] = self._matcher.compute_ff_tokens()
        return tokens

    def _write_mask(self, mask: Int32Array) -> None:
        if not self._matcher.is_stopped():  # also True after an error
            fill_next_token_bitmask(self._matcher, mask[None], 0)
        if self._matcher.is_stopped():
            mask[:] = self._end
