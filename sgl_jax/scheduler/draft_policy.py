"""Which running requests draft tokens in a step, and how many: by how useful their drafts were.

A draft that is not accepted costs a query token for nothing, so a request whose recent drafts
brought little pauses drafting, and longer each time that trying again fails. Owns these
statistics, per row; the executor chooses the drafts themselves.
"""

import numpy as np

from sgl_jax.core.engine_sizes import EngineSizes
from sgl_jax.core.step_plan import Int32Array, RowIndex

# Of each new result in the moving average of accepted tokens per step.
_WEIGHT = 0.3
# Below this many accepted tokens per step, as a share of those drafted, drafting pauses.
_USEFUL_SHARE = 0.1
_FIRST_PAUSE = 8  # tokens
_LONGEST_PAUSE = 64


class DraftPolicy:
    """Usefulness by row, for rows that draft as many tokens a step as `sizes` allow (0: none)."""

    def __init__(self, sizes: EngineSizes) -> None:
        self._most = sizes.max_draft_tokens
        self._accepted_per_step = np.zeros(sizes.num_rows, np.float32)
        self._resume_len = np.zeros(sizes.num_rows, np.int32)
        self._pause = np.zeros(sizes.num_rows, np.int32)
        self.num_drafted = 0  # tokens whose result was read, and of these:
        self.num_accepted = 0  # past a stop as well

    @property
    def is_on(self) -> bool:
        """Whether any row may ever draft."""
        return self._most > 0

    def add(self, row: int) -> None:
        """A request starts in `row`, be it after a retract: it drafts until it proves useless."""
        self._accepted_per_step[row] = self._most
        self._resume_len[row] = 0
        self._pause[row] = _FIRST_PAUSE

    def choose(self, rows: RowIndex, known_lens: Int32Array) -> Int32Array:
        """Drafts for each of `rows`, int32[len(rows)]."""
        drafts = np.where(known_lens >= self._resume_len[rows], self._most, 0)
        return drafts.astype(np.int32)

    def learn(
        self, rows: RowIndex, drafted: Int32Array, accepted: Int32Array, known_lens: Int32Array
    ) -> None:
        """Results were read of rows that drafted `drafted` tokens; `known_lens` include them."""
        tried = drafted > 0
        if not tried.any():
            return
        rows, drafted, accepted = rows[tried], drafted[tried], accepted[tried]
        self.num_drafted += int(drafted.sum())
        self.num_accepted += int(accepted.sum())
        average = self._accepted_per_step
        average[rows] += _WEIGHT * (accepted - average[rows])
        self._pause[rows[accepted > 0]] = _FIRST_PAUSE
        useless = average[rows] < _USEFUL_SHARE * drafted
        paused = rows[useless]
        self._resume_len[paused] = known_lens[tried][useless] + self._pause[paused]
        self._pause[paused] = np.minimum(2 * self._pause[paused], _LONGEST_PAUSE)
        # Two more failures will pause it again.
        average[paused] = 1.5 * _USEFUL_SHARE * self._most
