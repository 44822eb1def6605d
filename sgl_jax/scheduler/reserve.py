"""The number of pages that admission keeps for the further output of running requests.

Reserving every request's longest possible output would leave most of the pool unused; reserving
nothing would admit too much and retract all the time. So the need for memory is forecast: for some
moments ahead, the size of each running request and the chance that it still runs
(`output_lengths.py`). Requests end one by one, and each frees more than the others take meanwhile,
so the sum has a peak: the reserve is the peak's excess over the present need. (Gong et al.,
"Past-Future Scheduler", ASPLOS 2025, draw the lengths at random; here mean and variance of the sum
are computed, so that all hosts find the same.)
"""

from collections.abc import Sequence
from math import ceil

import numpy as np

from sgl_jax.core.compiled import compiled
from sgl_jax.core.step_plan import BoolArray, Int32Array, IntpArray, RowIndex
from sgl_jax.mem_cache.rank_memory import RankMemory
from sgl_jax.mem_cache.req_to_token_pool import RowTables
from sgl_jax.mem_cache.row_growth import pages_held_and_lacking
from sgl_jax.scheduler.output_lengths import MOMENTS, Float64Array, OutputLengths
from sgl_jax.scheduler.running_rows import RowColumns, RunningRows

# How far above its mean the need of running requests is forecast, in standard deviations: it is
# higher at a moment with a chance of 40 %, at the peak of all moments more seldom.
_NUM_DEVIATIONS = 0.25
# A request that runs on with less than this chance is taken for gone.
_LEAST_CHANCE = 0.001


class AdmissionReserve:
    """The reserve of ranks. `conservativeness` scales it; `lengths` are those of all ranks."""

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
        bounds = np.array((0, len(rows)))
        return self.pages_of_each([memory], memory.rows, running, rows, bounds, num_freed)[0]

    def pages_of_each(
        self,
        memories: Sequence[RankMemory],
        tables: RowTables,
        running: RowColumns,
        rows: RowIndex,
        bounds: IntpArray,
        num_freed: int = 0,
    ) -> list[int]:
        """`pages` of several ranks.

        `tables` and `running` are columns of their joint rows; `rows` of rank k, oldest first, lie
        in [bounds[k], bounds[k + 1]).
        """
        in_use = [
            each.allocator.num_pages - 1 - each.num_reclaimable_pages - num_freed
            for each in memories
        ]
        lens = _lens(rows, running.planned_len, running.max_len)
        pages = pages_held_and_lacking(memories[0], tables, rows, lens)
        peaks, lacking, at_most, youngest = _peaks(
            rows,
            bounds,
            running.length_class,
            running.prompt_len,
            lens,
            pages,
            np.array(in_use),
            self._lengths.starts,
            self._lengths.survival,
            self._lengths.chances,
            self._lengths.is_current,
            MOMENTS,
        )
        return [
            # Prompts that are not computed yet are no forecast.
            max(self._forecast(peak - used, most, memories[0].request_pages(longest)), known)
            if longest
            else 0
            for peak, used, most, longest, known in zip(
                peaks.tolist(),
                in_use,
                at_most.tolist(),
                youngest.tolist(),
                lacking.tolist(),
                strict=True,
            )
        ]

    def _forecast(self, growth: float, at_most: int, one_more: int) -> int:
        """Pages by which the need is forecast to grow; no more than the requests, and one more,
        may come to take."""
        return min(ceil(max(growth, 0.0) * self._conservativeness), at_most + one_more)


@compiled("(int64[::1], int32[::1], int32[::1])")
def _lens(rows: RowIndex, planned_len: Int32Array, max_len: Int32Array) -> Int32Array:
    """Tokens that each of `rows` has, has with one more, and may come to have: int32[3, n]."""
    lens = np.empty((3, len(rows)), np.int32)
    assert len(planned_len) == len(max_len)
    for i in range(len(rows)):
        row = rows[i]
        assert 0 <= row < len(planned_len)
        lens[0, i], lens[2, i] = planned_len[row], max_len[row]
        lens[1, i] = min(planned_len[row] + 1, max_len[row])
    return lens


@compiled(
    "(int64, float64[::1], int64[::1], int64[::1], float64[::1])",
)
def _find_chances(
    bucket: int,
    survival: Float64Array,
    starts: IntpArray,
    moments: IntpArray,
    chances: Float64Array,
) -> None:
    """Write the chances of an output in `bucket` to go on up to each of `moments`."""
    assert len(survival) == len(starts)
    assert len(chances) < len(moments)
    first = bucket
    for j in range(len(chances)):
        while bucket + 1 < len(starts) and starts[bucket + 1] <= starts[first] + moments[j]:
            bucket += 1
        chance = survival[bucket] / survival[first]
        chances[j] = chance if chance >= _LEAST_CHANCE else 0.0


@compiled(
    "(int64[::1], int64[::1], int32[::1], int32[::1], int32[:, ::1], int32[:, ::1], int64[::1], "
    "int64[::1], float64[:, ::1], float64[:, :, ::1], boolean[:, ::1], int64[::1])"
)
def _peaks(
    rows: RowIndex,
    bounds: IntpArray,
    length_class: Int32Array,
    prompt_len: Int32Array,
    lens: Int32Array,
    pages: Int32Array,
    num_in_use: IntpArray,
    starts: IntpArray,
    survival: Float64Array,
    chances: Float64Array,
    is_current: BoolArray,
    moments: IntpArray,
) -> tuple[Float64Array, IntpArray, IntpArray, IntpArray]:
    """The most pages that each rank's requests, and one more like the last, will hold at any
    moment: float64[ranks]. Also, int64[ranks] each, the pages that they lack for the tokens which
    they have, and for all that they may come to have, and how long the last may become.

    Args:
        rows: joint, oldest first; those of rank k lie in [bounds[k], bounds[k + 1]).
        length_class: of all joint rows, as `prompt_len`.
        lens: int32[3, n] of `rows`, from `_lens`.
        pages: int32[4, n], from `pages_held_and_lacking` for `lens`.
        num_in_use: pages that the requests of each rank list, each counted once.
        starts: as `survival`, `chances` and `is_current`, of `OutputLengths`.
        moments: `MOMENTS`.
    """
    num_ranks, num_moments = len(bounds) - 1, len(moments) - 1
    peaks = np.zeros(num_ranks)
    sums = np.zeros((3, num_ranks), np.int64)
    mean, variance, at_most = np.zeros((3, num_moments))
    ahead = 0.5 * (moments[:-1] + moments[1:])  # until the next moment, in the mean
    assert bounds[num_ranks] == len(rows)
    assert num_ranks == len(num_in_use)
    assert lens.shape[1] == pages.shape[1] == len(rows)
    assert chances.shape[2] == num_moments
    for rank in range(num_ranks):
        first, end = bounds[rank], bounds[rank + 1]
        if first == end:
            continue
        mean[:], variance[:], at_most[:] = 0, 0, 0
        num_held = 0
        for i in range(first, end):
            num_held += pages[0, i]
            sums[0, rank] += pages[1, i]
            sums[1, rank] += pages[3, i]
        sums[2, rank] = lens[2, end - 1]
        # A shared page is given back by the last that reads it: each has its part of it.
        own_part = num_in_use[rank] / max(num_held, 1)
        for i in range(first, end + 1):
            last = min(i, end - 1)
            row = rows[last]
            assert 0 <= row < len(prompt_len)
            output_len, left_len = lens[0, last] - prompt_len[row], lens[2, last] - lens[0, last]
            known, most = pages[2, last], pages[3, last]
            size = own_part * pages[0, last] + known
            growth = (most - known) / max(left_len, 1)  # pages a token
            if i == end:  # one more
                output_len, left_len, size = 0, output_len + left_len, 0.0
            of_class = length_class[row]
            bucket = np.searchsorted(starts, output_len, "right") - 1
            assert 0 <= of_class < len(survival)
            goes_on = chances[of_class, bucket]
            if not is_current[of_class, bucket]:
                _find_chances(bucket, survival[of_class], starts, moments, goes_on)
                is_current[of_class, bucket] = True
            num_ahead = 1
            while num_ahead < num_moments and moments[num_ahead] < left_len:
                num_ahead += 1
            for j in range(num_ahead):
                chance = goes_on[j]
                held = size + growth * min(ahead[j], float(left_len))
                likely = chance * held
                mean[j] += likely
                variance[j] += likely * (held - likely)
                at_most[j] += held if chance > 0 else 0.0
        for j in range(num_moments):
            likely = min(mean[j] + _NUM_DEVIATIONS * np.sqrt(variance[j]), at_most[j])
            peaks[rank] = max(peaks[rank], likely)
    return peaks, sums[0], sums[1], sums[2]
