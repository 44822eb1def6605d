"""Where one output is in its grammar."""

from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher
from llguidance.numpy import fill_next_token_bitmask

from sgl_jax.core.step_plan import Int32Array, mask_words


class RowGrammar:
    """Follows the tokens of an output, and says which may come next.

    It reads no token twice, and needs no news of retracts: what it has read stays the output.
    """

    def __init__(self, matcher: LLMatcher, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._matcher = matcher
        self._num_read = 0
        self._words: Int32Array = np.zeros((1, mask_words(vocab_size)), np.int32)
        self._end: Int32Array = np.zeros(mask_words(vocab_size), np.int32)
        ids = np.array(eos_token_ids, np.int64)
        np.bitwise_or.at(
            self._end.view(np.uint32), ids >> 5, np.uint32(1) << (ids & 31).astype(np.uint32)
        )

    @property
    def error(self) -> str:
        """Why the grammar was given up: a token that it does not allow, or it costs too much."""
        # The rest of llguidance's message holds the output.
        message: str = self._matcher.get_error()
        return message.partition("\n")[0]

    def mask(self, output: Int32Array) -> Int32Array:
        """Which tokens may follow, int32[mask_words(vocab_size)]; those that end it if none may.

        `output` is all of it, int32[n]; the array is good until the next call.
        """
        fresh = output[self._num_read :].tolist()
        self._num_read = len(output)
        if fresh:
            self._matcher.consume_tokens(fresh)
        if self._matcher.is_stopped():  # or in an error
            return self._end
        fill_next_token_bitmask(self._matcher, self._words, 0)
        if self._matcher.is_error():
            return self._end
        allowed: Int32Array = self._words[0]
        return allowed
