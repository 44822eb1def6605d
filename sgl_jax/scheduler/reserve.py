"""How many pages admission keeps for the further output of running requests.

Reserving every request's longest possible output would leave most of the pool unused; reserving
nothing would admit too much and retract all the time. So the need for memory is forecast: at some
moments ahead, how large each running request will be and with which chance it still runs
(`output_lengths.py`). Requests end one by one, and each gives back more than the others take in the
meantime, so the sum has a peak: what that exceeds the present need by is the reserve. (Gong et al.,
"Past-Future Scheduler", ASPLOS 2025, draw the lengths at random; here mean and variance of the sum
are computed, so that all hosts find the same.)
"""

from math import ceil

import numpy as np

from sgl_jax.core.compiled import compiled
from sgl_jax.core.step_plan import Int32Array, IntpArray, RowIndex
from sgl_jax.mem_cache.rank_memory import RankMemory
from sgl_jax.scheduler.output_lengths import Float64Array, OutputLengths
from sgl_jax.scheduler.running_rows import RunningRows

# How far above its mean the need of running requests is forecast, in standard deviations: it is
# higher at a moment with a chance of 40 %, at the peak of all moments more seldom.
_NUM_DEVIATIONS = 0.25
# A request that runs on with less than this chance is taken for gone.
_LEAST_CHANCE = 0.001
# Steps ahead: 0, 8, .. 24, 32, 40, .. 56, 64, 80, .. 112, 128, 160, .. 1,024. Later steps are not
# planned for: memory that is idle for longer costs more than a retract, which keeps all tokens.
_MOMENTS: IntpArray = np.concatenate(
    (np.arange(0, 32, 8), ((4 + np.arange(4)) << np.arange(3, 8)[:, None]).reshape(-1), [1024])
)


class AdmissionReserve:
    """The reserve of one rank. `conservativeness` scales it; `lengths` are those of all ranks."""

    def __init__(self, lengths: OutputLengths, conservativeness: float) -> None:
        self._lengths = lengths
        self._conservativeness = conservativeness

    def pages(
        self,
        memory: RankMemory,
        running: RunningRows,
        rows: RowIndex | None = None,
        num_freed: int = 0,
    ) -> int:
        """Pages to leave for the rank's running requests, and for the output of one more, which
        is like the youngest of them. None while nothing runs.

        With `rows`, those of these requests alone, were all others to end and to free `num_freed`
        pages.
        """
        if rows is None:
            rows = running.active
        if len(rows) == 0:
            return 0
        planned_len, max_len = running.planned_len[rows], running.max_len[rows]
        known_len = np.minimum(planned_len + np.int32(1), max_len)
        num_in_use = memory.allocator.num_pages - 1 - memory.num_reclaimable_pages - num_freed
        most = memory.pages_to_grow(rows, max_len)
        # One more like the youngest has the same limit.
        at_most = int(most.sum()) + memory.request_pages(int(max_len[-1]))
        peak = _peak(
            running.length_class[rows],
            planned_len - running.prompt_len[rows],
            max_len - planned_len,
            memory.num_held_each(rows),
            memory.pages_to_grow(rows, known_len),
            most,
            num_in_use,
            self._lengths.starts,
            self._lengths.survival,
            _MOMENTS,
        )
        forecast = min(ceil(max(peak - num_in_use, 0.0) * self._conservativeness), at_most)
        # Prompts that are not computed yet are no forecast.
        return max(forecast, int(memory.pages_to_grow(rows, planned_len).sum()))


@compiled(
    "(int32[::1], int32[::1], int32[::1], int32[::1], int32[::1], int32[::1], int64, "
    "int64[::1], float64[:, ::1], int64[::1])"
)
def _peak(
    classes: Int32Array,
    output_lens: Int32Array,
    left_lens: Int32Array,
    held: Int32Array,
    known: Int32Array,
    most: Int32Array,
    num_in_use: int,
    starts: IntpArray,
    survival: Float64Array,
    moments: IntpArray,
) -> float:
    """The most pages that the requests, and one more like the last, will hold at any moment.

    Args:
        classes: of the requests, oldest first; so are those that follow.
        output_lens: tokens generated,
        left_lens: and those that they may still generate.
        held: pages that they list,
        known: that they lack for the tokens which they have,
        most: and for all that they may come to have.
        num_in_use: pages that they list, each counted once.
        starts: as `survival`, of `OutputLengths`.
        moments: ascending from 0, in steps.
    """
    n = len(classes)
    assert n == len(output_lens) == len(left_lens) == len(held) == len(known) == len(most) > 0
    # A shared page is given back by the last that reads it: each has its part of it.
    own_part = num_in_use / max(held.sum(), 1)
    mean, variance, at_most = np.zeros((3, len(moments)))
    for i in range(n + 1):
        last = min(i, n - 1)
        output_len, left_len = output_lens[last], left_lens[last]
        size = own_part * held[last] + known[last]
        growth = (most[last] - known[last]) / max(left_len, 1)  # pages a token
        if i == n:  # one more
            output_len, left_len, size = 0, output_len + left_len, 0.0
        assert 0 <= classes[last] < len(survival)
        chances = survival[classes[last]]
        bucket = np.searchsorted(starts, output_len, "right") - 1
        now = chances[bucket]
        for j in range(len(moments) - 1):
            if moments[j] > 0 and moments[j] >= left_len:
                break
            while bucket + 1 < len(starts) and starts[bucket + 1] <= output_len + moments[j]:
                bucket += 1
            chance = chances[bucket] / now
            if chance < _LEAST_CHANCE:
                break
            # Until the next moment, in the mean.
            ahead = 0.5 * (moments[j] + moments[j + 1])
            pages = size + growth * min(ahead, left_len)
            mean[j] += chance * pages
            variance[j] += chance * (1 - chance) * pages * pages
            at_most[j] += pages
    peak = 0.0
    for j in range(len(moments) - 1):
        likely = min(mean[j] + _NUM_DEVIATIONS * np.sqrt(variance[j]), at_most[j])
        peak = max(peak, likely)
    return peak
