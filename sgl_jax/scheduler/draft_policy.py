"""Which running requests draft tokens in a step, and how many: by how useful their drafts were.

A draft that is not accepted costs a query token for nothing, so a request whose recent drafts
brought little pauses drafting, and longer each time that trying again fails. The statistics are
columns of the running rows (`draft_gain`, `draft_from_len`, `draft_pause`); the executor chooses
the drafts themselves.
"""

import numpy as np

from sgl_jax.core.step_plan import Int32Array, RowIndex
from sgl_jax.scheduler.running_rows import RowColumns

# Of each new result in the moving average of accepted tokens per step.
_WEIGHT = 0.3
# Below this many accepted tokens per step, as a share of those drafted, drafting pauses.
_USEFUL_SHARE = 0.1
_FIRST_PAUSE = 8  # tokens
_LONGEST_PAUSE = 64


def start_drafting(running: RowColumns, row: int, most: int) -> None:
    """A request starts in `row`, be it after a retract: it drafts until it proves useless."""
    running.draft_gain[row] = most
    running.draft_from_len[row] = 0
    running.draft_pause[row] = _FIRST_PAUSE


def choose_drafts(running: RowColumns, rows: RowIndex, most: int) -> Int32Array:
    """How many tokens each of `rows` drafts, int32[len(rows)]: `most` or none, and no more than it
    may still generate."""
    is_drafting = running.known_len[rows] >= running.draft_from_len[rows]
    longest = running.planned_len[rows] + running.unread_drafts[rows] + 1
    drafts: Int32Array = np.clip(running.max_len[rows] - longest, 0, most)
    # Which tokens a grammar allows after a draft is not known before the draft is.
    drafts[~is_drafting | running.has_grammar[rows]] = 0
    return drafts


def learn_from_drafts(
    running: RowColumns, rows: RowIndex, drafted: Int32Array, accepted: Int32Array, most: int
) -> None:
    """Results were read of rows that drafted `drafted` tokens each, and are counted as known."""
    tried = drafted > 0
    rows, drafted, accepted = rows[tried], drafted[tried], accepted[tried]
    gain = running.draft_gain[rows]
    gain += _WEIGHT * (accepted - gain)
    running.draft_pause[rows[accepted > 0]] = _FIRST_PAUSE
    useless = gain < _USEFUL_SHARE * drafted
    # Two more failures will pause it again.
    gain[useless] = 1.5 * _USEFUL_SHARE * most
    running.draft_gain[rows] = gain
    paused = rows[useless]
    running.draft_from_len[paused] = running.known_len[paused] + running.draft_pause[paused]
    running.draft_pause[paused] = np.minimum(2 * running.draft_pause[paused], _LONGEST_PAUSE)
