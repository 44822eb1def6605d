"""How many pages admission keeps for the further output of running requests.

Reserving every request's longest possible output would leave most of the pool unused; reserving
nothing would admit too much and retract all the time. So admission reserves a share of what the
running requests may still generate: the share rises whenever a retract shows it was too small,
and decays slowly while all goes well. (SGLang's new-token ratio works alike.)
"""

from math import ceil

import numpy as np

from sgl_jax.core.compiled import compiled
from sgl_jax.core.step_plan import Int32Array, RowIndex
from sgl_jax.mem_cache.rank_memory import RankMemory
from sgl_jax.scheduler.running_rows import RunningRows

# An output longer than this is not planned for: few requests use what they may.
_MAX_PLANNED_OUTPUT = 4096
_INITIAL_SHARE = 0.5
_MIN_SHARE = 0.1
_DECAY_PER_STEP = 0.001
_RAISE_PER_RETRACT = 0.1


class AdmissionReserve:
    """The reserve of one rank. `conservativeness` scales it."""

    def __init__(self, conservativeness: float) -> None:
        self._conservativeness = conservativeness
        self._share = min(_INITIAL_SHARE * conservativeness, 1.0)

    def pages(
        self,
        memory: RankMemory,
        running: RunningRows,
        rows: RowIndex | None = None,
        num_freed: int = 0,
    ) -> int:
        """Pages to leave for the rank's running requests, or for those in `rows` alone, were all
        others to end and to free `num_freed` pages."""
        if rows is None:
            rows = running.active
        if len(rows) == 0:
            return 0
        expected_lens = _expected_lens(rows, running.planned_len, running.max_len, self._share)
        return int(memory.pages_to_grow(rows, expected_lens).sum())

    def pages_of(self, row: int, memory: RankMemory, running: RunningRows) -> int:
        """What one running request adds to `pages`."""
        planned = int(running.planned_len[row])
        output = min(int(running.max_len[row]) - planned, _MAX_PLANNED_OUTPUT)
        expected_len = planned + ceil(output * self._share)
        return memory.num_to_grow(row, expected_len)

    def after_step(self) -> None:
        """A step was planned without a retract."""
        floor = min(_MIN_SHARE * self._conservativeness, 1.0)
        self._share = max(self._share - _DECAY_PER_STEP, floor)

    def after_retract(self) -> None:
        """A request had to be retracted."""
        self._share = min(self._share + _RAISE_PER_RETRACT, 1.0)


@compiled("(int64[::1], int32[::1], int32[::1], float64)")
def _expected_lens(
    rows: RowIndex, planned_len: Int32Array, max_len: Int32Array, share: float
) -> Int32Array:
    """The lengths of `rows` when they have generated a share of what they still may: int32[n]."""
    expected = np.empty(len(rows), np.int32)
    for i in range(len(rows)):
        row = rows[i]
        assert 0 <= row < len(planned_len)
        output = min(max_len[row] - planned_len[row], _MAX_PLANNED_OUTPUT)
        expected[i] = planned_len[row] + ceil(output * share)
    return expected
