"""Chooses the running requests that draft tokens in a step, and the number of drafts, by the
success of their recent drafts.

A rejected draft wastes a query token. So a request drafts somewhat more than its recent accepted
drafts. If these are close to zero, it pauses drafting, longer each time that another try fails. The
statistics are columns of the running rows (`draft_gain`, `draft_from_len`, `draft_pause`); the
executor chooses the drafts themselves.

An output held to a grammar drafts only tokens forced by the grammar: the tokens allowed after a
guess depend on the guess.
"""

import numpy as np

from sgl_jax.core.engine_sizes import EngineSizes
from sgl_jax.core.step_plan import NO_DRAFT, Int32Array, RowIndex
from sgl_jax.mem_cache.rank_memory import RankMemory
from sgl_jax.scheduler.running_rows import RowColumns, RunningRows

# The weight of each new result in the moving average of accepted tokens per step.
_WEIGHT = 0.3
# Drafting pauses if the accepted share of drafted tokens falls below this.
_USEFUL_SHARE = 0.1
# A row drafts one token more than this many times its accepted tokens per step: drafts are accepted
# in bursts, and if all are, the number grows.
_AHEAD = 1.5
_FIRST_PAUSE = 8  # tokens
_LONGEST_PAUSE = 64


def start_drafting(running: RowColumns, row: int | RowIndex, most: int) -> None:
    """Start drafting for the requests in `row`, also after a retract, until it proves useless."""
    running.draft_gain[row] = most
    running.draft_from_len[row] = 0
    running.draft_pause[row] = _FIRST_PAUSE


def grow_for_drafts(
    memory: RankMemory, running: RunningRows, rows: RowIndex, ends: Int32Array, sizes: EngineSizes
) -> tuple[Int32Array, Int32Array | None]:
    """Choose the drafts of the decode rows `rows`, and reserve their slots after the `decode_ends`;
    none if memory is short. Return the number of drafts of each row, int32[len(rows)], and any
    known drafts (`RankPlan.drafts`)."""
    columns = running.columns
    drafts = choose_drafts(columns, rows, sizes.max_draft_tokens)
    expected = choose_expected(running, rows, sizes.max_draft_tokens)
    if expected is not None:
        drafts += expected[0]
    ahead = np.where(drafts > 0, sizes.lookahead_slots, 0).astype(np.int32)
    if not memory.grow_rows(rows, np.minimum(ends + drafts + ahead, columns.max_len[rows])):
        return np.zeros_like(drafts), None
    return drafts, None if expected is None else expected[1]


def choose_drafts(running: RowColumns, rows: RowIndex, most: int) -> Int32Array:
    """Return the number of drafts of each of `rows`, int32[len(rows)]: at most `most`, none in a
    pause, and no more than it may still generate."""
    wanted = 1 + np.ceil(_AHEAD * running.draft_gain[rows]).astype(np.int32)
    is_drafting = running.known_len[rows] >= running.draft_from_len[rows]
    longest = running.planned_len[rows] + running.unread_drafts[rows] + 1
    drafts: Int32Array = np.clip(running.max_len[rows] - longest, 0, np.minimum(wanted, most))
    drafts[~is_drafting | running.has_grammar[rows]] = 0
    return drafts


def choose_expected(
    running: RunningRows, rows: RowIndex, most: int
) -> tuple[Int32Array, Int32Array] | None:
    """Return drafts for rows with a grammar that allows only one continuation: their number for
    each of `rows`, int32[len(rows)], and the drafts, int32[len(rows), most], padded with NO_DRAFT;
    None if no row has any."""
    counts = np.zeros(len(rows), np.int32)
    drafts = np.full((len(rows), most), NO_DRAFT, np.int32)
    # The row's next tokens are certain only once all its drafts are read.
    is_sure = running.columns.has_grammar[rows] & (running.columns.unread_drafts[rows] == 0)
    for i in is_sure.nonzero()[0].tolist():
        row = int(rows[i])
        first, tokens = running.request(row).expected
        planned_len = int(running.columns.planned_len[row])
        room = min(most, int(running.columns.max_len[row]) - planned_len - 1)
        known = tokens[max(planned_len - first, 0) :][: max(room, 0)]
        if first <= planned_len and len(known):
            counts[i] = len(known)
            drafts[i, : len(known)] = known
    return (counts, drafts) if counts.any() else None


def rate_drafts(
    running: RowColumns, rows: RowIndex, drafted: Int32Array, accepted: Int32Array
) -> None:
    """Update the statistics of `rows` from newly read results: the numbers of `drafted` and
    `accepted` tokens, each int32[len(rows)]."""
    tried = drafted > 0
    rows, drafted, accepted = rows[tried], drafted[tried], accepted[tried]
    gain = running.draft_gain[rows]
    gain += _WEIGHT * (accepted - gain)
    running.draft_pause[rows[accepted > 0]] = _FIRST_PAUSE
    least = _USEFUL_SHARE * drafted
    useless = gain < least
    # Two more failures will pause it again.
    gain[useless] = 1.5 * least[useless]
    running.draft_gain[rows] = gain
    paused = rows[useless]
    running.draft_from_len[paused] = running.known_len[paused] + running.draft_pause[paused]
    running.draft_pause[paused] = np.minimum(2 * running.draft_pause[paused], _LONGEST_PAUSE)
